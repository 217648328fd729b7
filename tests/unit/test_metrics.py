"""Counters whose sums merge and balance, against rounds counted one by one; percentiles; the bootstrap interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.metrics import SpeculationCounters, bootstrap_ratio, percentile


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, int, int]:
    """(drafted, accepted, committed) of a possible round; a stop may leave nothing to commit but the first token."""
    drafted = draw(st.integers(0, 6))
    accepted = draw(st.integers(0, drafted))
    return drafted, accepted, draw(st.integers(1, accepted + 1))


def counted(items: list[tuple[int, int, int]]) -> SpeculationCounters:
    counters = SpeculationCounters()
    for item in items:
        counters.observe_round(*item)
    return counters


# Three drafting rounds of 4, one of 2, and one round without drafts, which counts only as a round.
EXAMPLE = [(4, 4, 5), (4, 1, 2), (4, 0, 1), (2, 1, 1), (0, 0, 1)]


def test_counters_of_a_worked_example() -> None:
    counters = counted(EXAMPLE)
    assert (counters.num_rounds, counters.num_drafts) == (5, 4)
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (14, 6)
    assert (counters.num_rejected_tokens, counters.num_untested_tokens) == (3, 5)
    assert (counters.num_committed, counters.num_discarded) == (10, 1)
    assert counters.acceptance_histogram == [1, 2, 0, 0, 1]
    assert counters.mean_acceptance_length == 1 + 6 / 4
    assert counters.mean_committed_length == 10 / 5
    assert counters.acceptance_rate == 6 / 14
    assert counters.per_position_acceptance == [3 / 4, 1 / 4, 1 / 4, 1 / 4]


def test_nothing_observed_divides_by_nothing() -> None:
    counters = SpeculationCounters()
    assert counters.mean_acceptance_length == 1
    assert counters.acceptance_rate == counters.mean_committed_length == 0
    assert counters.per_position_acceptance == []
    assert counters.broken_identities() == []


def test_a_round_without_drafts_does_not_lower_acceptance() -> None:
    assert counted([(3, 3, 4), (0, 0, 1)]).mean_acceptance_length == 4


@given(st.lists(rounds()))
def test_identities_hold_and_positions_sum_to_the_mean(items: list[tuple[int, int, int]]) -> None:
    counters = counted(items)
    assert counters.broken_identities() == []
    assert counters.mean_acceptance_length == pytest.approx(1 + sum(counters.per_position_acceptance))
    rates = counters.per_position_acceptance
    assert rates == sorted(rates, reverse=True)


@given(st.lists(rounds()), st.lists(rounds()))
def test_merged_parts_equal_the_whole(first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]) -> None:
    merged, whole = counted(first), counted(first + second)
    part = counted(second)
    before = counted(second)
    merged.merge(part)
    assert merged == whole
    assert part == before, "merging must leave the other as it was"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_drafts", "histogram sums"),
        ("num_draft_tokens", "drafted ="),
        ("num_accepted_tokens", "histogram weighs"),
        ("num_rejected_tokens", "drafted ="),
        ("num_untested_tokens", "drafted ="),
        ("num_committed", "committed + discarded"),
        ("num_discarded", "committed + discarded"),
        ("num_trimmed_tokens", "drafted ="),
        ("num_rounds", "committed + discarded"),
    ],
)
def test_one_wrong_sum_breaks_an_identity(name: str, words: str) -> None:
    counters = counted(EXAMPLE)
    setattr(counters, name, getattr(counters, name) + 1)
    assert any(words in broken for broken in counters.broken_identities())


def test_percentile() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([7], 0.99) == 7
    assert percentile(list(range(101)), 0.9) == pytest.approx(90)
    assert math.isnan(percentile([], 0.5))


def test_bootstrap_of_a_constant_ratio_has_no_width() -> None:
    ratio, low, high = bootstrap_ratio([2, 4, 6, 8], [1, 2, 3, 4])
    assert (ratio, low, high) == (2, pytest.approx(2), pytest.approx(2))


def test_bootstrap_is_a_ratio_of_sums_in_pairs_and_repeats_itself() -> None:
    above, below = [10.0, 1.0, 1.0, 4.0], [1.0, 1.0, 10.0, 4.0]
    ratio, low, high = bootstrap_ratio(above, below)
    assert ratio == 1.0  # the mean of the single ratios would be 3
    assert 0.1 <= low < ratio < high <= 10
    assert bootstrap_ratio(above, below) == (ratio, low, high)
    narrow = bootstrap_ratio(above, below, level=0.5)
    assert low <= narrow[1] < narrow[2] <= high


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(4)
    hits = 0
    for _ in range(200):
        below = random.uniform(1, 3, size=40)
        above = below * 1.5 + random.normal(0, 0.5, size=40)
        _, low, high = bootstrap_ratio(above.tolist(), below.tolist(), num_resamples=400)
        hits += low <= 1.5 <= high
    assert 178 <= hits <= 200  # 95% of 200 is 190; four standard deviations are 12
