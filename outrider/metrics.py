"""Counters and ratios of speculative decoding, as plain sums that can be merged, and the statistics of a benchmark.

The four counters and their meanings are vLLM's (0.32, `v1/spec_decode/metrics.py`): one observation for each request
and step that had at least one draft token; accepted counts drafts before a stop cuts them. Rates are computed from
the sums when asked for, never stored. Not here: time (engine/stats.py) and who prints what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass
class SpeculationCounters:
    """Sums over rounds. `acceptance_histogram[a]` counts drafting rounds that accepted exactly a drafts.

    num_rounds: every round, with or without drafts. num_drafts: rounds with at least one. num_committed: tokens that
    were committed. num_discarded: tokens chosen but cut off by a stop or limit.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_untested_tokens: int = 0
    num_committed: int = 0
    num_discarded: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def observe_round(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Add one round: drafts verified, drafts accepted, and tokens committed after a stop may have cut them."""
        self.num_rounds += 1
        self.num_committed += num_committed
        self.num_discarded += num_accepted + 1 - num_committed
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        rejected = min(1, num_drafted - num_accepted)
        self.num_rejected_tokens += rejected
        self.num_untested_tokens += num_drafted - num_accepted - rejected
        missing = num_drafted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        self.acceptance_histogram[num_accepted] += 1

    def merge(self, other: SpeculationCounters) -> None:
        """Add another's sums to these."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        missing = len(other.acceptance_histogram) - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        for accepted, count in enumerate(other.acceptance_histogram):
            self.acceptance_histogram[accepted] += count

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafting rounds, the bonus token counted; 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def mean_committed_length(self) -> float:
        """Tokens committed in a round on average, after stops cut; rounds without drafts included."""
        return self.num_committed / max(1, self.num_rounds)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def per_position_acceptance(self) -> list[float]:
        """Share of drafting rounds that accepted draft i, by i from 0: unconditional, as vLLM's."""
        counts = self.acceptance_histogram
        return [sum(counts[i + 1 :]) / max(1, self.num_drafts) for i in range(len(counts) - 1)]

    def broken_identities(self) -> list[str]:
        """Accounting identities that do not hold, in words; empty when all is well."""
        histogram = self.acceptance_histogram
        parts = self.num_accepted_tokens + self.num_rejected_tokens + self.num_untested_tokens
        checks = {
            "drafted = accepted + rejected + untested": self.num_draft_tokens == parts,
            "histogram sums to drafting rounds": sum(histogram) == self.num_drafts,
            "histogram weighs to accepted": sum(a * n for a, n in enumerate(histogram)) == self.num_accepted_tokens,
            "committed + discarded = rounds + accepted": self.num_committed + self.num_discarded
            == self.num_rounds + self.num_accepted_tokens,
        }
        return [name for name, holds in checks.items() if not holds]


_SUMS = [name for name in SpeculationCounters.__dataclass_fields__ if name.startswith("num_")]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share (0 to 1) lies, interpolated; nan for no values."""
    return float(np.quantile(np.asarray(values), share)) if len(values) else float("nan")


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    factor: tuple[Sequence[float], Sequence[float]] | None = None,
    num_resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float, float, float]:
    """sum(numerators) / sum(denominators) over paired items, and its percentile bootstrap interval (low, high).

    `factor` multiplies the ratio by another one of sums over the same items. Items are resampled as wholes, with a
    fixed seed. Source: Efron and Tibshirani 1993, chapter 13.
    """
    columns = [numerators, denominators, *(factor or ())]
    values = np.array(columns, dtype=np.float64)
    picks = np.random.default_rng(0).integers(values.shape[1], size=(num_resamples, values.shape[1]))
    whole, resampled = values.sum(axis=1), values[:, picks].sum(axis=2)
    low, high = np.quantile(_product_of_ratios(resampled), [(1 - level) / 2, (1 + level) / 2])
    return float(_product_of_ratios(whole)), float(low), float(high)


def _product_of_ratios(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rows 0, 2, … over rows 1, 3, …, multiplied."""
    return np.asarray((sums[0::2] / sums[1::2]).prod(axis=0))
