"""The verdict whether speculation changed the text: the same, a near-tie, or a divergence and where.

Two texts of one prompt are compared token by token. Where they part, the target is asked once more, by a plain forward
over the common text: if both tokens were as good as tied there, the arithmetic of one row or of several may round
either way, and the texts count as lossless; else somebody emitted what the target would not have said. Greedy text is
judged by logits, seeded text by logits plus the noise of the draw, so this is for greedy and coupled verification;
where draws differ by design, evaluate/distribution.py judges. Nothing is generated here: evaluate/check.py and bench
do that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.config import SpeculativeConfig
from outrider.models.attention import GROUP, Batch
from outrider.models.target import Target
from outrider.sampling import Purpose, RowGroup, TokenCounts, distributions, gumbel, noise_keys, unit_noise
from outrider.types import SamplingParams

VerdictName = Literal["same", "near-tie", "divergence", "not-applicable"]
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest margin, in logits, that rounding explains, by the type of weights and activations."""

_SEVERITY: tuple[VerdictName, ...] = ("not-applicable", "same", "near-tie", "divergence")


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """What plain and speculative decoding said to the same prompt under the same `params`, whose seed is set."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    plain: tuple[int, ...]
    speculative: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two texts part: output token `position` from 0, what each said (None: it had ended), and the margin.

    `margin` is in logits: how far the worse of the two tokens was from being the target's choice; infinite where no
    change of the logits would bring it about.
    """

    prompt_index: int
    position: int
    plain_token: int | None
    speculative_token: int | None
    margin: float


@dataclass(frozen=True, kw_only=True)
class TextVerdict:
    """The verdict over many prompts. `num_tokens` were compared: those up to the place where texts part, and there."""

    verdict: VerdictName
    num_prompts: int = 0
    num_tokens: int = 0
    bound: float = 0.0
    differences: tuple[Difference, ...] = ()
    reason: str = ""

    @property
    def max_margin(self) -> float:
        """The largest margin of the differences, 0 without any."""
        return max((item.margin for item in self.differences), default=0.0)

    @property
    def divergences(self) -> list[Difference]:
        """The differences that rounding does not explain."""
        return [item for item in self.differences if not item.margin < self.bound]

    @property
    def near_tie_rate(self) -> float:
        """Near-ties that came out differently, for each token compared."""
        return (len(self.differences) - len(self.divergences)) / max(1, self.num_tokens)

    def as_json(self) -> dict[str, Any]:
        """Plain data; an infinite margin is null."""
        found = asdict(self) | {"max_margin": self.max_margin, "near_tie_rate": self.near_tie_rate}
        found["differences"] = [asdict(item) | {"margin": _finite(item.margin)} for item in self.differences]
        return found | {"max_margin": _finite(self.max_margin)}


def worst(verdicts: Sequence[VerdictName]) -> VerdictName:
    """The gravest of several verdicts; not-applicable if there is none."""
    return max(verdicts, key=_SEVERITY.index, default="not-applicable")


def why_not_comparable(config: SpeculativeConfig, params: SamplingParams) -> str:
    """Why the text under these settings is not meant to be plain decoding's, token for token; empty if it is."""
    method = config.rejection_sample_method
    if method == "synthetic":
        return "synthetic verification: the text is not the target's"
    if params.temperature > 0 and method != "coupled":
        return f"{method} verification draws with noise of its own: only the distribution is the target's"
    return ""


def compare(target: Target, pairs: Sequence[TextPair]) -> TextVerdict:
    """Judge texts that are meant to be equal. Cost: a forward over prompt and text for each pair that differs."""
    bound = BOUNDS[target.embedding.dtype]
    places = [_first_difference(pair) for pair in pairs]
    differences = tuple(
        _difference(target, pair, place) for pair, place in zip(pairs, places, strict=True) if place is not None
    )
    ends = [len(pair.plain) if place is None else place + 1 for pair, place in zip(pairs, places, strict=True)]
    verdict: VerdictName = "same"
    if differences:
        verdict = "near-tie" if all(item.margin < bound for item in differences) else "divergence"
    return TextVerdict(
        verdict=verdict, num_prompts=len(pairs), num_tokens=sum(ends), bound=bound, differences=differences
    )


def choice_margin(logits: torch.Tensor, group: RowGroup, token: int) -> float:
    """How far, in logits, a row is from choosing `token`: 0 if it does, infinite if no rounding can make it.

    Shapes: logits [1, V]; `group` has that one row. For a draw the noise counts, and a filter's edge is taken as
    uncertain by the bound of bf16: a token just outside may be chosen, one just inside need not be an obstacle.
    """
    raw = replace(group.params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    row = distributions(logits, [replace(group, params=raw)])
    ids, scores = row.ids.numpy(), np.log(row.probs.numpy().astype(np.float64))
    temperature = group.params.temperature
    surely = possibly = np.ones(len(ids), dtype=bool)
    if temperature > 0:
        surely, possibly = (_kept(scores, group.params, slack) for slack in (-_EDGE, _EDGE))
        scores = scores + temperature * gumbel(unit_noise(noise_keys([group], Purpose.GUMBEL)[0], ids))
    own = ids == token
    if not (own & possibly).any():
        return math.inf
    return float(scores[surely | own].max() - scores[own][0])


_EDGE = BOUNDS[torch.bfloat16]


def _kept(scores: NDArray[np.float64], params: SamplingParams, slack: float) -> NDArray[np.bool_]:
    """The tokens that the filters keep if logits are `slack` kinder (above 0) or harsher (below 0) to each of them."""
    ranked = np.sort(scores)[::-1]
    kept = np.ones(len(scores), dtype=bool)
    if 0 < params.top_k < len(scores):
        kept &= scores >= ranked[params.top_k - 1] - slack
    if params.min_p > 0:
        kept &= scores >= ranked[0] + params.temperature * math.log(params.min_p) - slack
    if params.top_p < 1:
        weights = np.exp((ranked - ranked[0]) / params.temperature)
        before = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
        # What lies above a token that is moved by the slack; logits that move by x move a share by x / 2T at most.
        above = before[np.searchsorted(-ranked, -(scores + slack))]
        kept &= above < params.top_p + slack / (2 * params.temperature)
    kept[scores.argmax()] = True
    return kept


def _first_difference(pair: TextPair) -> int | None:
    for place, (left, right) in enumerate(zip(pair.plain, pair.speculative, strict=False)):
        if left != right:
            return place
    shorter, longer = sorted((len(pair.plain), len(pair.speculative)))
    return None if shorter == longer else shorter


def _difference(target: Target, pair: TextPair, place: int) -> Difference:
    said = [text[place] if place < len(text) else None for text in (pair.plain, pair.speculative)]
    return Difference(
        prompt_index=pair.prompt_index,
        position=place,
        plain_token=said[0],
        speculative_token=said[1],
        margin=_margin(target, pair, place, said),
    )


def _margin(target: Target, pair: TextPair, place: int, said: Sequence[int | None]) -> float:
    """Of the two tokens' margins the larger; one text ending where the other goes on cannot be a matter of rounding."""
    logits = _logits_after(target, (*pair.prompt_ids, *pair.plain[:place]))
    group = _row_group(target, pair, place)
    return max(math.inf if token is None else choice_margin(logits, group, token) for token in said)


def _logits_after(target: Target, ids: Sequence[int]) -> torch.Tensor:
    """Logits [1, V] after all of `ids`, by one plain forward with a cache of its own."""
    num_blocks = -(-len(ids) // GROUP)
    spans, last = [(0, len(ids))], np.array([len(ids) - 1])
    tokens = np.array(ids, dtype=np.int64)
    batch = Batch.pack(tokens, spans, [range(num_blocks)], last, GROUP, target.device)
    return target(batch, target.new_cache(num_blocks * GROUP)).logits


def _row_group(target: Target, pair: TextPair, place: int) -> RowGroup:
    """The row as the engine drew it."""
    params = pair.params
    counts = TokenCounts(target.config.vocab_size, pair.prompt_ids) if params.has_penalties else None
    if counts is not None:
        for token in pair.plain[:place]:
            counts.append(token)
    eos = () if params.ignore_eos else tuple(target.config.eos_token_ids)
    return RowGroup(
        params=params,
        seed=params.seed or 0,
        choice_index=0,
        position=len(pair.prompt_ids) + place,
        num_output=place,
        counts=counts,
        end_ids=(*eos, *params.stop_token_ids) if params.min_tokens else (),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
