"""Probabilities and a proposal to a verdict: how many drafts stand, and the token after them. The theorem lives here.

Whatever was drafted, the emitted tokens are distributed as the target's own (but for "synthetic", which measures cost
only), provided that `draft_probs` is what the drafts were drawn from and that whether a draft is verified does not
depend on the draft itself; "coupled" needs neither. Not here: how probabilities and noise are made (sampling), and
where a sequence ends (the engine).

  coupled    accept while the draft is the target's own keyed draw (Daliri, Musco, Suresh 2024, arXiv:2408.07978)
  standard   accept with min(1, target_probs / draft_probs), else draw what the draft lacks (Leviathan et al. 2022,
             arXiv:2211.17192, algorithm 1)
  block      accept the longest prefix that stands as a whole (Sun et al. 2024, arXiv:2403.10444, algorithm 2)
  synthetic  accept at given rates, as vLLM does

Legend: B requests, R rows of the target, D draft tokens of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ShapeError
from outrider.sampling import Purpose, RowGroup, draw, entries_of, noise_keys, race, unit_noise
from outrider.types import Distributions, Proposal, Verdict

if TYPE_CHECKING:
    from outrider.config import RejectionMethod

    Row = tuple[NDArray[np.int64], NDArray[np.float64]]


def verify(
    method: RejectionMethod,
    proposal: Proposal,
    target: Distributions,
    groups: Sequence[RowGroup],
    synthetic_rates: Sequence[float] = (),
) -> list[Verdict]:
    """Keep the prefix of each request's proposal that the target accepts, then add one token of the target's.

    A draft that is PAD, or that the target cannot draw, is rejected, and after a PAD the token is drawn as if nothing
    had been drafted there. At temperature 0 every method but synthetic accepts while the draft is the argmax.
    `synthetic_rates` are unconditional, by draft position. Shapes: `groups[b].drafts` is `proposal.tokens[b]`; `target`
    has the groups' rows in order, `proposal.draft_probs` one row a draft token. Raises ShapeError naming the field.
    Cost: coupled, one draw a row; the others, one pass over the rows of the sampled requests and one draw a request.
    """
    _check_shapes(proposal, target, groups)
    is_greedy = all(group.params.temperature == 0 for group in groups)
    if method == "coupled" or (is_greedy and (method in ("standard", "block") or not any(proposal.tokens))):
        return _match(draw(target, groups, Purpose.GUMBEL), groups)
    tested = _test(proposal, target, groups)
    if method == "standard":
        stops = _standard_stops(tested)
    elif method == "block":
        stops = [_block_stop(tested, b) for b in range(len(groups))]
    elif method == "synthetic":
        stops = _synthetic_stops(tested, synthetic_rates)
    else:
        raise ShapeError(f"method is {method!r}, expected coupled, standard, block or synthetic")
    tokens = _next_tokens(tested, stops)
    return [Verdict(stop.num_accepted, token) for stop, token in zip(stops, tokens, strict=True)]


def _check_shapes(proposal: Proposal, target: Distributions, groups: Sequence[RowGroup]) -> None:
    if len(proposal.tokens) != len(groups):
        raise ShapeError(f"Proposal.tokens has {len(proposal.tokens)} requests, expected {len(groups)}, one a group")
    for b, (tokens, group) in enumerate(zip(proposal.tokens, groups, strict=True)):
        if tokens != group.drafts:
            raise ShapeError(f"RowGroup.drafts of request {b} is {group.drafts}, expected Proposal.tokens' {tokens}")
    num_drafts = sum(map(len, proposal.tokens))
    if target.num_rows != num_drafts + len(groups):
        wanted = num_drafts + len(groups)
        raise ShapeError(f"target has {target.num_rows} rows, expected {wanted}, one a draft and one a request")
    if proposal.draft_probs is not None and proposal.draft_probs.num_rows != num_drafts:
        got = proposal.draft_probs.num_rows
        raise ShapeError(f"Proposal.draft_probs has {got} rows, expected {num_drafts}, one a draft token")


def _match(tokens: list[int], groups: Sequence[RowGroup]) -> list[Verdict]:
    """Accept while the draft equals the target's token of the same row; the token that differs comes next."""
    verdicts, row = [], 0
    for group in groups:
        num_accepted = 0
        for draft in group.drafts:
            if draft != tokens[row + num_accepted]:
                break
            num_accepted += 1
        verdicts.append(Verdict(num_accepted, tokens[row + num_accepted]))
        row += group.num_rows
    return verdicts


@dataclass(frozen=True)
class _Stop:
    """Where verification of one request ended; `scale` weighs the target against the draft in what comes next."""

    num_accepted: int
    scale: float = 1.0


@dataclass(frozen=True)
class _Tested:
    """A proposal laid beside the target: per draft token what both give it and its number in (0, 1), all length D.

    Draft i of request b is entry `first_draft[b] + i` here and row `first_draft[b] + b + i` of the target.
    """

    proposal: Proposal
    target: Distributions
    groups: Sequence[RowGroup]
    first_draft: list[int]
    target_probs: list[float]
    draft_probs: list[float]
    noise: list[float]

    def target_row(self, b: int, i: int) -> Row:
        """The target's distribution at row i of request b."""
        return _row(self.target, self.first_draft[b] + b + i)

    def rest(self, b: int, i: int, scale: float) -> Row:
        """What `scale` times the target's row i of request b has beyond the distribution of draft i; not normalised."""
        ids, weights = self.target_row(b, i)
        if self.proposal.draft_probs is None:
            keep = ids != self.groups[b].drafts[i]
            return ids[keep], scale * weights[keep]
        rest = scale * weights - _probs_at(_row(self.proposal.draft_probs, self.first_draft[b] + i), ids)
        keep = rest > 0
        return ids[keep], rest[keep]


def _test(proposal: Proposal, target: Distributions, groups: Sequence[RowGroup]) -> _Tested:
    tokens = np.array([token for group in groups for token in group.drafts], dtype=np.int64)
    sizes = [len(group.drafts) for group in groups]
    first_draft = list(accumulate(sizes, initial=0))
    draft_rows = np.arange(len(tokens))
    target_rows = draft_rows + np.repeat(np.arange(len(groups)), sizes)
    noise = unit_noise(noise_keys(groups, Purpose.ACCEPT)[target_rows], 0) if len(tokens) else tokens
    drafted = proposal.draft_probs
    return _Tested(
        proposal,
        target,
        groups,
        first_draft,
        target_probs=_probs_of(target, target_rows, tokens).tolist(),
        draft_probs=(tokens >= 0).astype(float).tolist()
        if drafted is None
        else _probs_of(drafted, draft_rows, tokens).tolist(),
        noise=noise.tolist(),
    )


def _row(dist: Distributions, row: int) -> Row:
    start, stop = dist.starts[row : row + 2].tolist()
    return dist.ids[start:stop].numpy(), dist.probs[start:stop].numpy().astype(np.float64)


def _probs_of(dist: Distributions, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """What row `rows[i]` gives to `tokens[i]`, 0 where it does not list it."""
    ids, probs, starts = dist.ids.numpy(), dist.probs.numpy(), dist.starts.numpy()
    lengths = starts[rows + 1] - starts[rows]
    # A row that lists the whole vocabulary has the token at its own index; only the other rows have to be searched.
    guess = starts[rows] + np.clip(tokens, 0, lengths - 1)
    found = np.where(ids[guess] == tokens, probs[guess], 0.0).astype(np.float64)
    missed = np.flatnonzero(ids[guess] != tokens)
    entries, _ = entries_of(starts, rows[missed])
    owner = np.repeat(missed, lengths[missed])
    hits = np.flatnonzero(ids[entries] == tokens[owner])
    found[owner[hits]] = probs[entries[hits]]
    return found


def _probs_at(row: Row, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """What a row gives to each of `ids`."""
    row_ids, probs = row
    if np.array_equal(row_ids, ids):
        return probs
    table = np.zeros(max(int(row_ids.max()), int(ids.max())) + 1)
    table[row_ids] = probs
    found: NDArray[np.float64] = table[ids]
    return found


def _leading(accepted: list[bool], first_draft: list[int]) -> list[_Stop]:
    stops = []
    for first, last in pairwise(first_draft):
        num_accepted = 0
        while first + num_accepted < last and accepted[first + num_accepted]:
            num_accepted += 1
        stops.append(_Stop(num_accepted))
    return stops


def _standard_stops(tested: _Tested) -> list[_Stop]:
    accepted = []
    for b, group in enumerate(tested.groups):
        part = slice(tested.first_draft[b], tested.first_draft[b + 1])
        if group.params.temperature == 0:
            accepted += [target > 0 for target in tested.target_probs[part]]
            continue
        three = zip(tested.noise[part], tested.draft_probs[part], tested.target_probs[part], strict=True)
        # With draft_probs 0 the draft cannot have been drawn from it; such a draft is rejected, as in vLLM.
        accepted += [draft > 0 and noise * draft < target for noise, draft, target in three]
    return _leading(accepted, tested.first_draft)


def _synthetic_stops(tested: _Tested, rates: Sequence[float]) -> list[_Stop]:
    most = max((len(group.drafts) for group in tested.groups), default=0)
    if len(rates) < most:
        raise ShapeError(f"synthetic_rates has {len(rates)} rates, expected at least {most}, one a draft position")
    conditional = [rate / before if before > 0 else 0.0 for before, rate in pairwise([1.0, *rates])]
    accepted = [
        draft >= 0 and tested.noise[first + i] < conditional[i]
        for first, group in zip(tested.first_draft, tested.groups, strict=False)
        for i, draft in enumerate(group.drafts)
    ]
    return _leading(accepted, tested.first_draft)


def _block_stop(tested: _Tested, b: int) -> _Stop:
    """The longest prefix whose joint weight passes its own test; a shorter prefix may fail and a longer one pass.

    `scale` is rho of the paper: how much of the target's weight the prefix still carries, at most 1.
    """
    group, first = tested.groups[b], tested.first_draft[b]
    if group.params.temperature == 0:
        part = slice(first, tested.first_draft[b + 1])
        return _leading([target > 0 for target in tested.target_probs[part]], [0, len(group.drafts)])[0]
    length = next((i for i, draft in enumerate(group.drafts) if draft < 0), len(group.drafts))
    best, scale = _Stop(0), 1.0
    for i in range(length):
        target, draft = tested.target_probs[first + i], tested.draft_probs[first + i]
        scale = min(1.0, scale * target / draft) if draft > 0 else 0.0
        if scale == 0:
            break
        if tested.noise[first + i] <= _block_threshold(tested, b, i + 1, scale, i + 1 == length):
            best = _Stop(i + 1, scale)
    return best


def _block_threshold(tested: _Tested, b: int, i: int, scale: float, is_last: bool) -> float:
    """The probability of stopping no earlier than after i drafts, given that it is not later."""
    if is_last:
        return scale
    rest = float(tested.rest(b, i, scale)[1].sum())
    return rest / (rest + 1 - scale) if scale < 1 else 1.0


def _next_tokens(tested: _Tested, stops: Sequence[_Stop]) -> list[int]:
    """The recovered or bonus token of each request, drawn under the key of its own row."""
    rows = [_next_row(tested, b, stop) for b, stop in enumerate(stops)]
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids, _ in rows], out=starts[1:])
    keys = noise_keys(tested.groups, Purpose.RESIDUAL)
    chosen = [tested.first_draft[b] + b + stop.num_accepted for b, stop in enumerate(stops)]
    ids, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return race(ids, weights, starts, keys[chosen])


def _next_row(tested: _Tested, b: int, stop: _Stop) -> Row:
    group, i = tested.groups[b], stop.num_accepted
    was_rejected = i < len(group.drafts) and group.drafts[i] >= 0
    if was_rejected and group.params.temperature > 0:
        rest = tested.rest(b, i, stop.scale)
        # Nothing is left where target and draft agree to the last bit but for rounding; the target's own row is right.
        if len(rest[0]):
            return rest
    return tested.target_row(b, i)
