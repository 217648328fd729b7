"""Logits to probabilities, and draws from them: the only place where either is done, for target and drafters alike.

Probabilities are sparse rows (types.Distributions); temperature 0 is a row with one entry, so greedy is no second path.
Randomness is keyed: a hash of (seed, choice index, purpose, position, token id), never a stream, so nothing is used up
and nothing is rolled back. Every row is worked on alone, single-threaded and in a fixed order, so its result is the
same to the last bit whatever else is in the batch. Not here: whether a draft stands (verify).

Sources: the order of the filters is vLLM's (`vllm/v1/worker/gpu/sample/sampler.py`, `logit_bias.py`, `penalties.py`);
the hash is SplitMix64's finaliser (Steele, Lea, Flood 2014), the draw the Gumbel-max trick (Maddison et al. 2014).
Legend: T rows, V vocabulary, R rows of a Distributions, nnz its entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import RequestError, ShapeError
from outrider.types import PAD, Distributions, SamplingParams, TokenLogprobs

Floats = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]
Keys = NDArray[np.uint64]

_FLOOR = -64 * math.log(2)  # entries this far (in log) below the likeliest: together they weigh less than a rounding
_LONG_ROW = 512  # rows with more entries are drawn one by one with a bound; shorter ones together, entry by entry
_COLUMN = 64  # scores that the search for the largest k takes together
_BINS = 64  # bins of the search for the nucleus, for each unit of log-probability
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class Purpose(IntEnum):
    """What a random number is for; two purposes never share one.

    GUMBEL is the target's own draw of a position, and that of a drafter coupled to it. The others are keyed by the
    round too: block verification decides by drafts that it then throws away, so their noise must not come back.
    """

    GUMBEL = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


class TokenCounts:
    """Which tokens one sequence has seen, for its penalties: those of the prompt, and how often each was output.

    `in_output` [V] int32. Append committed tokens only; drafts are counted where they are used.
    """

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int]) -> None:
        self.in_output: NDArray[np.int32] = np.zeros(vocab_size, dtype=np.int32)
        self._seen = dict.fromkeys(prompt_ids)

    def append(self, token_id: int) -> None:
        """Count one more committed output token."""
        self.in_output[token_id] += 1
        self._seen[token_id] = None

    def seen_with(self, drafts: Sequence[int]) -> tuple[Ids, NDArray[np.int32]]:
        """Every id of prompt, output and drafts, once, and how often it is in the output with the drafts."""
        drafted = [token for token in drafts if 0 <= token < len(self.in_output)]
        ids = np.fromiter({**self._seen, **dict.fromkeys(drafted)}, dtype=np.int64)
        counts = self.in_output[ids]
        for token in drafted:
            counts[ids == token] += 1
        return ids, counts


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows of logits of one request: what they draw, under which key, after which tokens.

    Row i draws the token of absolute index `position + i` and has seen `drafts[:i]`; there are len(drafts) + 1 rows.
    `num_output` tokens were output before row 0; `end_ids` are banned while fewer than `min_tokens` were. `counts` is
    needed where `params` has penalties. `round_start` is the position of the round's first row where that is not
    `position` (a drafter that draws its chain token by token).
    """

    params: SamplingParams
    seed: int
    choice_index: int
    position: int
    drafts: tuple[int, ...] = ()
    num_output: int = 0
    counts: TokenCounts | None = None
    end_ids: tuple[int, ...] = ()
    round_start: int | None = None

    @property
    def num_rows(self) -> int:
        """One for each draft and one after them."""
        return len(self.drafts) + 1

    @property
    def first_position(self) -> int:
        """The position of the round's first row."""
        return self.position if self.round_start is None else self.round_start

    @property
    def num_banned(self) -> int:
        """How many of the rows, from the first, may not end the sequence."""
        return min(max(self.params.min_tokens - self.num_output, 0), self.num_rows) if self.end_ids else 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every row is the argmax of its logits as they are."""
        has_changes = self.params.logit_bias or self.params.has_penalties or self.num_banned
        return self.params.temperature == 0 and not has_changes


def draft_group(group: RowGroup, index: int, num_rows: int = 1) -> RowGroup:
    """The rows by which a drafter draws drafts `index` to `index + num_rows - 1` of a round that starts at `group`.

    They follow the request's temperature, filters and bias but not its penalties or `min_tokens`; a drafter that wants
    less replaces `params`. In the verdict, `draft_probs` has to be the distribution of these rows.
    """
    params = group.params
    if params.has_penalties:
        params = replace(params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    start, unknown = group.first_position, (PAD,) * (num_rows - 1)
    return RowGroup(params, group.seed, group.choice_index, start + index, drafts=unknown, round_start=start)


# ---- logits to probabilities ----


def distributions(logits: Tensor, groups: Sequence[RowGroup]) -> Distributions:
    """What each row of logits may draw, and how likely.

    In order: logit bias, `min_tokens` ban, penalties (earlier drafts of the group count as output), temperature, min_p,
    top_k, top_p, normalised. Ties at a filter's edge and in the argmax go to the lower id; top_k keeps exactly k. Ids
    of a row ascend. Shapes: logits [T, V] bf16 or fp32, the groups' rows in order; T rows come back, on the CPU. All
    arithmetic is fp32, sums fp64. Raises ShapeError, and RequestError for a bias outside the vocabulary. Cost: one
    argmax where all rows are greedy as they are, else about 0.1 to 0.3 ms a row of 49152.
    """
    num_rows = sum(group.num_rows for group in groups)
    if logits.ndim != 2 or logits.shape[0] != num_rows:
        raise ShapeError(f"logits is {tuple(logits.shape)}, expected [{num_rows}, V], one row a row of the groups")
    if all(group.is_plain_greedy for group in groups):
        return Distributions(greedy(logits).cpu(), torch.ones(num_rows), torch.arange(num_rows + 1))
    blocks = torch.split(logits, [group.num_rows for group in groups])
    rows = [row for block, group in zip(blocks, groups, strict=True) for row in _group_rows(block, group)]
    ids, probs = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*rows, strict=True))
    return Distributions(ids, probs, torch.tensor([0, *accumulate(len(row_ids) for row_ids, _ in rows)]))


def concatenate(parts: Sequence[Distributions]) -> Distributions:
    """The rows of several distributions, one after the other; at least one part."""
    lengths = torch.cat([part.starts.diff() for part in parts])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Distributions(torch.cat([part.ids for part in parts]), torch.cat([part.probs for part in parts]), starts)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the lowest id on ties. Shapes: logits [T, V], result [T] int64, same device."""
    if logits.device.type != "cpu":
        return torch.argmax(logits, dim=-1)
    # NumPy's argmax is several times torch's on a CPU, and a few rows in fp32 stay in the cache.
    parts = [part.float().numpy().argmax(axis=1) for part in torch.split(logits.detach(), 8)]
    return torch.from_numpy(np.concatenate(parts))


def _group_rows(logits: Tensor, group: RowGroup) -> list[tuple[Ids, Floats]]:
    if group.is_plain_greedy:
        tokens = greedy(logits)
    else:
        rows = _adjusted(logits, group)
        if group.params.temperature > 0:
            return [_filtered(row, group.params) for row in rows]
        tokens = greedy(torch.from_numpy(rows))
    return [(np.array([token], dtype=np.int64), np.ones(1, dtype=np.float32)) for token in tokens.tolist()]


def _adjusted(logits: Tensor, group: RowGroup) -> NDArray[np.float32]:
    """The group's logits after bias, ban and penalties, in fp32; a copy."""
    params = group.params
    rows: NDArray[np.float32] = logits.detach().to("cpu", torch.float32, copy=True).numpy()
    if params.logit_bias:
        outside = [token for token in params.logit_bias if not 0 <= token < rows.shape[1]]
        if outside:
            limit = rows.shape[1] - 1
            raise RequestError(f"logit_bias names token {outside[0]}, expected 0 to {limit}", param="logit_bias")
        rows[:, list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), dtype=np.float32)
    rows[: group.num_banned, list(group.end_ids)] = -np.inf
    if params.has_penalties:
        if group.counts is None:
            raise ShapeError("RowGroup.counts is None, expected TokenCounts because params has penalties")
        for i, row in enumerate(rows):
            _penalise(row, params, group.counts, group.drafts[:i])
    return rows


def _penalise(row: NDArray[np.float32], params: SamplingParams, counts: TokenCounts, drafts: Sequence[int]) -> None:
    ids, num_output = counts.seen_with(drafts)
    seen = row[ids]
    repetition = np.float32(params.repetition_penalty)
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= np.float32(params.frequency_penalty) * num_output.astype(np.float32)
    seen -= np.float32(params.presence_penalty) * (num_output > 0)
    row[ids] = seen


def _filtered(row: NDArray[np.float32], params: SamplingParams) -> tuple[Ids, Floats]:
    """The ids that temperature and filters leave, ascending, and their probabilities."""
    scores = _below_max(row)
    scores /= np.float32(max(params.temperature, 1e-30))
    cutoff = max(_FLOOR, math.log(params.min_p)) if params.min_p > 0 else _FLOOR
    if 0 < params.top_k < len(scores):
        ids = _largest(scores, params.top_k)
        ids = np.sort(ids[scores[ids] >= cutoff])
    else:
        ids = np.flatnonzero(scores >= cutoff)
    if params.top_p < 1:
        ids = _nucleus(scores, ids, params.top_p)
    weights = np.exp(scores if len(ids) == len(scores) else scores[ids])
    weights /= np.float32(weights.sum(dtype=np.float64))
    return ids, weights


def _below_max(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A row of logits less its largest: at most 0, so that nothing overflows and the bits sort as the values do."""
    largest = row.max()
    if not np.isfinite(largest):
        raise ShapeError(f"logits has a row whose largest value is {largest}, expected finite; the model is at fault")
    below: NDArray[np.float32] = row - largest
    return below


def _largest(scores: NDArray[np.float32], count: int) -> Ids:
    """The ids of the `count` largest scores, largest first, lower id first on ties. Scores are at most 0."""
    width = len(scores) // _COLUMN
    near = np.arange(len(scores))
    if count <= width:
        # Each of `count` columns has a score of at least the count-th largest column maximum: nothing below it matters.
        maxima = scores[: width * _COLUMN].reshape(_COLUMN, width).max(axis=0)
        near = np.flatnonzero(scores >= np.partition(maxima, width - count)[width - count])
    return _descending(scores, near)[:count]


def _descending(scores: NDArray[np.float32], ids: Ids) -> Ids:
    # Of floats at most 0, the larger the bits the smaller the value; the id below them settles ties and fits 32 bits.
    keys = scores[ids].view(np.uint32).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _nucleus(scores: NDArray[np.float32], ids: Ids, top_p: float) -> Ids:
    """Of `ids` those that have less than `top_p` of the weight before them, likeliest first; ascending."""
    weights = np.exp(scores[ids])
    bins = (scores[ids] * np.float32(-_BINS)).astype(np.int64)
    filled = np.cumsum(np.bincount(bins, weights=weights))
    wanted = top_p * filled[-1]
    edge = int(np.searchsorted(filled, wanted))
    # Bins before the edge are inside and bins beyond it outside, as wholes: only the edge has to be sorted.
    order = _descending(scores, ids[bins == edge])
    before = filled[edge - 1] if edge else 0.0
    last = np.searchsorted(before + np.cumsum(np.exp(scores[order]), dtype=np.float64), wanted)
    return np.sort(np.concatenate([ids[bins < edge], order[: int(last) + 1]]))


# ---- keyed randomness ----


def uniform(seed: int, choice_index: int, position: int, purpose: Purpose, token_ids: Ids) -> NDArray[np.float64]:
    """One number in (0, 1) for each token id, the same whenever the key is; the row is the first of its round."""
    return unit_noise(noise_keys([RowGroup(SamplingParams(), seed, choice_index, position)], purpose), token_ids)


def gumbel(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise from numbers in (0, 1)."""
    return -np.log(-np.log(unit))


def noise_keys(groups: Sequence[RowGroup], purpose: Purpose) -> Keys:
    """The key of each row of the groups, for `unit_noise` and `race`. Shape: [R] uint64."""
    num_rows = np.array([group.num_rows for group in groups], dtype=np.int64)
    keys = np.zeros(len(groups), dtype=np.uint64)
    for field in (
        [group.seed & 0xFFFFFFFFFFFFFFFF for group in groups],
        [group.choice_index << 8 | purpose for group in groups],
        [0 if purpose is Purpose.GUMBEL else group.first_position for group in groups],
    ):
        keys = _mix((keys ^ np.array(field, dtype=np.uint64)) + _GOLDEN)
    first = np.array([group.position for group in groups], dtype=np.int64) - (np.cumsum(num_rows) - num_rows)
    positions = np.repeat(first, num_rows) + np.arange(num_rows.sum())
    return _mix((np.repeat(keys, num_rows) ^ positions.astype(np.uint64)) + _GOLDEN)


def unit_noise(keys: Keys | np.uint64, token_ids: Ids | Sequence[int] | int) -> NDArray[np.float64]:
    """Numbers in (0, 1), never 0 or 1, by key and token id; shapes broadcast."""
    hashed = _mix(np.atleast_1d(np.asarray(token_ids).astype(np.uint64) * _GOLDEN + keys))
    hashed >>= np.uint64(12)
    unit = hashed.astype(np.float64)
    unit += 0.5
    unit *= 2.0**-52
    return unit


def _mix(values: Keys) -> Keys:
    """SplitMix64's finaliser, in place: every bit of the input changes half of the output's."""
    for shift, multiplier in _ROUNDS:
        values ^= values >> shift
        values *= multiplier
    values ^= values >> np.uint64(31)
    return values


# ---- draws ----


def draw(dist: Distributions, groups: Sequence[RowGroup], purpose: Purpose) -> list[int]:
    """One token of each row: the largest log-probability plus keyed Gumbel noise, so a sample of the row.

    A row with one entry gives it, unhashed. Raises ShapeError. Cost: about 0.3 ms for an entry in each of 49152 ids.
    """
    num_rows = sum(group.num_rows for group in groups)
    if dist.num_rows != num_rows:
        raise ShapeError(f"dist has {dist.num_rows} rows, expected {num_rows}, one for each row of the groups")
    if len(dist.ids) == num_rows:
        return [*dist.ids.tolist()]
    return race(dist.ids.numpy(), dist.probs.numpy(), dist.starts.numpy(), noise_keys(groups, purpose))


def race(ids: Ids, weights: Floats, starts: Ids, keys: Keys) -> list[int]:
    """One id of each row, with probability in proportion to its weight: the Gumbel-max draw under the row's key.

    Shapes: ids and weights [nnz], starts [R+1], keys [R]. Weights are above 0 and need not sum to 1.
    """
    lengths = np.diff(starts)
    winners = starts[:-1].copy()
    for row in np.flatnonzero(lengths > _LONG_ROW).tolist():
        part = slice(starts[row], starts[row + 1])
        winners[row] += _race_long(ids[part], weights[part], keys[row])
    short = np.flatnonzero((lengths > 1) & (lengths <= _LONG_ROW))
    if len(short):
        entries, bounds = entries_of(starts, short)
        unit = unit_noise(np.repeat(keys[short], lengths[short]), ids[entries])
        scores = _scores(weights[entries], unit)
        best = np.repeat(np.maximum.reduceat(scores, bounds[:-1]), lengths[short])
        hits = np.flatnonzero(scores == best)
        # The first hit at or after a row's start is the row's own: each row has one.
        winners[short] = entries[hits[np.searchsorted(hits, bounds[:-1])]]
    return [*ids[winners].tolist()]


def entries_of(starts: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Where the entries of `rows` lie, row after row, and where each row starts among them. Shapes: [n], [rows + 1]."""
    lengths = starts[rows + 1] - starts[rows]
    bounds = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return np.arange(bounds[-1]) + np.repeat(starts[rows] - bounds[:-1], lengths), bounds


def _race_long(ids: Ids, weights: Floats, key: np.uint64) -> int:
    """The index of the winner, with logarithms only for entries that can win.

    The winner has the least -log(u) / weight, and -log(u) is at least 1 - u: whatever has a larger (1 - u) / weight
    than one entry's true value has lost.
    """
    unit = unit_noise(key, ids)
    least = (1 - unit) / weights
    first = int(least.argmin())
    alive = np.flatnonzero(least <= -math.log(unit[first]) / float(weights[first]) * (1 + 1e-9))
    return int(alive[_scores(weights[alive], unit[alive]).argmax()])


def _scores(weights: Floats, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(weights.astype(np.float64)) + gumbel(unit)


def logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the model's raw distribution: of each row's token, and of its `num_top` likeliest.

    No temperature, filter, penalty or bias. Ranks count from 1, lower id first on ties. Shapes: logits [T, V], T ids.
    """
    if logits.ndim != 2 or len(token_ids) != logits.shape[0]:
        raise ShapeError(f"token_ids has {len(token_ids)} ids, expected one a row of logits {tuple(logits.shape)}")
    rows = logits.detach().to("cpu", torch.float32).numpy()
    return [_row_logprobs(row, token, num_top) for row, token in zip(rows, token_ids, strict=True)]


def _row_logprobs(row: NDArray[np.float32], token: int, num_top: int) -> TokenLogprobs:
    scores = _below_max(row)
    log_total = math.log(np.exp(scores).sum(dtype=np.float64))
    own = scores[token]
    rank = 1 + int(np.count_nonzero(scores > own)) + int(np.count_nonzero(scores[:token] == own))
    top = _largest(scores, min(num_top, len(scores))) if num_top > 0 else np.zeros(0, dtype=np.int64)
    values = zip(top.tolist(), scores[top].tolist(), strict=True)
    return TokenLogprobs(token, float(own) - log_total, rank, {best: score - log_total for best, score in values})
