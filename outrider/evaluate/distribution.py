"""Whether two sets of sampled texts come from the same distribution: the test for verification that draws anew.

Two-sample tests on tokens and on lengths, both by permutation: which text is whose is shuffled within each prompt, so
the p-values hold whatever the distribution, small samples and the dependence between positions included. Plain NumPy,
no tables. What it cannot see: differences that need more samples than it got (sizes are part of the verdict).
Sources: chi-square of homogeneity, Pearson 1900; two-sample Kolmogorov-Smirnov statistic, Smirnov 1939; permutation
p-values that count the observed arrangement, Phipson and Smyth 2010. Legend: S texts of both sides of one prompt,
A arrangements (the first is the real one), C columns of a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.evaluate.lossless import VerdictName

ALPHA = 1e-3
"""Chance of a false alarm, for the token and the length test together."""

_NUM_SHUFFLES = 4999
_LEAST_COUNT = 10  # texts of both sides that must have a token at a position for it to get a column of its own
_ENDED, _RARE = -1, -2

Texts = Sequence[Sequence[int]]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class DistributionVerdict:
    """The verdict, its p-values, and how much was looked at. `num_samples`: texts of each prompt and side."""

    verdict: VerdictName
    p_tokens: float = 1.0
    p_lengths: float = 1.0
    num_prompts: int = 0
    num_samples: int = 0
    num_positions: int = 0
    mean_len_plain: float = 0.0
    mean_len_speculative: float = 0.0
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare_distributions(
    plain: Sequence[Texts], speculative: Sequence[Texts], num_positions: int
) -> DistributionVerdict:
    """Judge sampled texts, prompt by prompt: the tokens at each of the first positions, and the lengths.

    `plain[i]` and `speculative[i]` hold texts of prompt i that were drawn independently of each other.
    """
    random = np.random.default_rng(0)
    by_tokens, by_lengths = [], []
    for ours, theirs in zip(plain, speculative, strict=True):
        sides, both = _arrangements(len(ours), len(theirs), random), [*ours, *theirs]
        by_tokens.append(chi_square(token_table(both, num_positions), sides))
        by_lengths.append(smirnov(np.array([len(text) for text in both]), sides))
    p_tokens, p_lengths = p_value(sum(by_tokens)), p_value(sum(by_lengths))
    return DistributionVerdict(
        verdict="divergence" if 2 * min(p_tokens, p_lengths) < ALPHA else "same",
        p_tokens=p_tokens,
        p_lengths=p_lengths,
        num_prompts=len(plain),
        num_samples=min(map(len, plain)),
        num_positions=num_positions,
        mean_len_plain=_mean_len(plain),
        mean_len_speculative=_mean_len(speculative),
    )


def token_table(texts: Texts, num_positions: int) -> Floats:
    """Which text has what at which position, [S, C] of 0 and 1; rare tokens of a position share a column."""
    columns = []
    for place in range(num_positions):
        said = [text[place] if place < len(text) else _ENDED for text in texts]
        counts = Counter(said)
        pooled = np.array([token if counts[token] >= _LEAST_COUNT else _RARE for token in said])
        columns += [pooled == token for token in np.unique(pooled)]
    return np.stack(columns, axis=1).astype(np.float64)


def chi_square(table: Floats, sides: Floats) -> Floats:
    """The chi-square statistic of two sides over a table's columns, summed over its positions, [A].

    Shapes: table [S, C], no column empty; sides [A, S], 1 where a text is the first side's.
    """
    counts, totals = sides @ table, table.sum(axis=0)
    share = sides[0].mean()
    expected = totals * share
    return np.asarray(((counts - expected) ** 2 / expected).sum(axis=1) / (1 - share))


def smirnov(sizes: NDArray[np.int64], sides: Floats) -> Floats:
    """The largest distance between the two sides' cumulative distributions of sizes [S], for each arrangement, [A]."""
    reached = (sizes[:, None] <= np.unique(sizes)).astype(np.float64)
    first = sides @ reached
    num_first = sides[0].sum()
    second = (reached.sum(axis=0) - first) / (len(sizes) - num_first)
    return np.asarray(np.abs(first / num_first - second).max(axis=1))


def p_value(statistics: Floats | int) -> float:
    """How many of the arrangements [A] have a statistic of at least the first one's: that one counted, a share."""
    values = np.atleast_1d(statistics)
    return float((values >= values[0] - 1e-9).mean())


def _arrangements(num_first: int, num_second: int, random: np.random.Generator) -> Floats:
    real = np.repeat([1.0, 0.0], [num_first, num_second])
    return np.vstack([real, random.permuted(np.tile(real, (_NUM_SHUFFLES, 1)), axis=1)])


def _mean_len(groups: Sequence[Texts]) -> float:
    return float(np.mean([len(text) for texts in groups for text in texts]))
