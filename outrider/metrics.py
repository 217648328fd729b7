"""Counters and ratios of speculative decoding, as plain sums that can be merged, and the statistics of a benchmark.

The four counters and their meanings are vLLM's (0.32, `v1/spec_decode/metrics.py`): one observation for each request
and step that had at least one draft token; accepted counts drafts before a stop cuts them. Rates are computed from
the sums when asked for, never stored. Not here: time (engine/stats.py) and who prints what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass
class SpeculationCounters:
    """Sums over rounds. `acceptance_histogram[a]` counts drafting rounds that accepted exactly a drafts.

    num_rounds: every round, with or without drafts. num_drafts: rounds with at least one. num_draft_tokens: all that
    were drafted, and of them num_trimmed_tokens were not verified. num_rejected_tokens, num_untested_tokens: verified
    and found wrong, and those after them. num_committed: tokens that were committed. num_discarded: tokens chosen but
    cut off by a stop or limit. `verified_histogram[n]`: rounds, of all, that verified exactly n drafts.
    num_drafting_requests, request_length_sum: finished requests that drafted, and their mean acceptance lengths.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    num_untested_tokens: int = 0
    num_trimmed_tokens: int = 0
    num_committed: int = 0
    num_discarded: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    verified_histogram: list[int] = field(default_factory=list)
    num_drafting_requests: int = 0
    request_length_sum: float = 0.0

    def observe_round(self, num_drafted: int, num_accepted: int, num_committed: int, num_trimmed: int = 0) -> None:
        """Add one round: drafts made, accepted, tokens committed after a stop may have cut, drafts not verified."""
        num_verified = num_drafted - num_trimmed
        self.num_rounds += 1
        self.num_committed += num_committed
        self.num_discarded += num_accepted + 1 - num_committed
        _count(self.verified_histogram, num_verified, num_verified)
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.num_trimmed_tokens += num_trimmed
        rejected = min(1, num_verified - num_accepted)
        self.num_rejected_tokens += rejected
        self.num_untested_tokens += num_verified - num_accepted - rejected
        _count(self.acceptance_histogram, num_accepted, num_drafted)

    def observe_request(self, counters: SpeculationCounters) -> None:
        """Add a finished request's own mean acceptance length, if it drafted at all."""
        if counters.num_drafts:
            self.num_drafting_requests += 1
            self.request_length_sum += counters.mean_acceptance_length

    def merge(self, other: SpeculationCounters) -> None:
        """Add another's sums to these."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            mine, theirs = getattr(self, name), getattr(other, name)
            mine += [0] * (len(theirs) - len(mine))
            for place, count in enumerate(theirs):
                mine[place] += count

    @property
    def num_wasted_tokens(self) -> int:
        """Drafts that were verified in vain."""
        return self.num_rejected_tokens + self.num_untested_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafting rounds, the bonus token counted; 1 where nothing was drafted. Weighs by rounds."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def request_acceptance_length(self) -> float:
        """The same as a mean over finished requests, whatever their length."""
        return self.request_length_sum / self.num_drafting_requests if self.num_drafting_requests else 1.0

    @property
    def mean_committed_length(self) -> float:
        """Tokens committed in a round on average, after stops cut; rounds without drafts included."""
        return self.num_committed / max(1, self.num_rounds)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def first_acceptance(self) -> float:
        """Share of rounds that verified a draft and accepted the first one: hardly depends on N, nor on trimming."""
        verified = self.num_rounds - (self.verified_histogram[0] if self.verified_histogram else 0)
        return sum(self.acceptance_histogram[1:]) / max(1, verified)

    @property
    def per_position_acceptance(self) -> list[float]:
        """Share of drafting rounds that accepted draft i, by i from 0: unconditional, as vLLM's."""
        counts = self.acceptance_histogram
        return [sum(counts[i + 1 :]) / max(1, self.num_drafts) for i in range(len(counts) - 1)]

    def broken_identities(self) -> list[str]:
        """Accounting identities that do not hold, in words; empty when all is well."""
        histogram, verified = self.acceptance_histogram, self.verified_histogram
        num_verified = self.num_accepted_tokens + self.num_rejected_tokens + self.num_untested_tokens
        checks = {
            "drafted = accepted + rejected + untested + trimmed": self.num_draft_tokens
            == num_verified + self.num_trimmed_tokens,
            "histogram sums to drafting rounds": sum(histogram) == self.num_drafts,
            "histogram weighs to accepted": sum(a * n for a, n in enumerate(histogram)) == self.num_accepted_tokens,
            "verified histogram sums to rounds": sum(verified) == self.num_rounds,
            "verified histogram weighs to verified": sum(a * n for a, n in enumerate(verified)) == num_verified,
            "committed + discarded = rounds + accepted": self.num_committed + self.num_discarded
            == self.num_rounds + self.num_accepted_tokens,
        }
        return [name for name, holds in checks.items() if not holds]


_HISTOGRAMS = ("acceptance_histogram", "verified_histogram")
_SUMS = [name for name in SpeculationCounters.__dataclass_fields__ if name not in _HISTOGRAMS]


def _count(histogram: list[int], place: int, highest: int) -> None:
    """One more at a place, in a histogram that reaches to `highest` at least."""
    histogram += [0] * (highest + 1 - len(histogram))
    histogram[place] += 1


@dataclass
class AcceptanceDrift:
    """Whether drafts are accepted as before: means over requests that forget, a slow one for reference and a quick one.

    Collapse: the quick mean of accepted drafts a round fell below half the reference (a damaged drafter, another
    template, another workload). Too good: nearly every draft is accepted, as in a text that repeats itself for ever.
    """

    reference: float = 0.0
    recent: float = 0.0
    recent_rate: float = 0.0
    num_requests: int = 0

    def observe(self, counters: SpeculationCounters) -> None:
        """Add a finished request; one that drafted less than a few rounds says nothing."""
        if counters.num_drafts < _DRIFT_LEAST_ROUNDS:
            return
        accepted = counters.num_accepted_tokens / counters.num_drafts
        self.num_requests += 1
        for name, value, memory in (
            ("reference", accepted, 256),
            ("recent", accepted, 8),
            ("recent_rate", counters.acceptance_rate, 8),
        ):
            before = getattr(self, name)
            setattr(self, name, before + (value - before) / min(self.num_requests, memory))

    @property
    def alarm(self) -> Literal["", "collapse", "too good"]:
        """What is wrong, "" for nothing or too few requests to say."""
        if self.num_requests < _DRIFT_LEAST_REQUESTS:
            return ""
        if self.recent < self.reference / 2:
            return "collapse"
        return "too good" if self.recent_rate > _TOO_GOOD else ""


_DRIFT_LEAST_ROUNDS, _DRIFT_LEAST_REQUESTS, _TOO_GOOD = 4, 16, 0.98


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
