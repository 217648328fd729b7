"""The rule against brute force: every proposal length, and every allocation of drafts to requests, tried one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.budget import Chains, allocate, best_budget, best_length

MOST_REQUESTS, MOST_TOKENS = 3, 3


def random_case(seed: int) -> tuple[list[list[float]], int, list[float], list[float]]:
    """Survivals, R chains of N that do not rise, requests, and costs that rise, some of them in steps."""
    random = np.random.default_rng(seed)
    num_drafting, longest = random.integers(1, MOST_REQUESTS + 1), random.integers(1, MOST_TOKENS + 1)
    survival = np.cumprod(random.random((num_drafting, longest)) ** random.choice([0.2, 1, 3]), axis=1)
    survival *= np.arange(longest) < random.integers(0, longest + 1, size=num_drafting)[:, None]
    num_requests = int(num_drafting + random.integers(0, 2))
    draft_s = np.concatenate([[0.0], np.cumsum(random.random(longest) * random.choice([0.01, 0.1, 0.5]))])
    rises = random.random(survival.size) * random.choice([0.02, 0.3])
    if random.random() < 0.5:
        rises *= np.arange(len(rises)) % 3 == 2
    verify_s = 1 + np.concatenate([[0.0], np.cumsum(rises)])
    return survival.tolist(), num_requests, draft_s.tolist(), verify_s.tolist()


def all_allocations(survival: Chains, num_tokens: int) -> itertools.product:
    """Every way to verify some prefix of each chain of at most `num_tokens` drafts."""
    return itertools.product(range(num_tokens + 1), repeat=len(survival))


def gain(survival: Chains, lengths: tuple[int, ...]) -> float:
    return float(sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_length_and_no_allocation_is_better(seed: int) -> None:
    survival, num_requests, draft_s, verify_s = random_case(seed)
    best = max(
        (num_requests + gain(survival, lengths)) / (draft_s[num_tokens] + verify_s[sum(lengths)])
        for num_tokens in range(len(survival[0]) + 1)
        for lengths in all_allocations(survival, num_tokens)
    )
    choice = best_length(survival, num_requests, draft_s, verify_s)
    assert np.isclose(choice.tokens_per_s, best, rtol=1e-12)
    # What is chosen gives what it promises, once handed out to requests.
    drafted = [chain[: choice.num_tokens] for chain in survival]
    lengths = tuple(allocate(drafted, choice.num_verified))
    assert sum(lengths) == choice.num_verified
    spent_s = draft_s[choice.num_tokens] + verify_s[choice.num_verified]
    assert np.isclose((num_requests + gain(survival[: len(lengths)], lengths)) / spent_s, best, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_budget_for_drafts_that_are_made_is_better(seed: int) -> None:
    survival, num_requests, draft_s, verify_s = random_case(seed)
    drafted_s = float(draft_s[-1])
    rates = {
        lengths: (num_requests + gain(survival, lengths)) / (drafted_s + verify_s[sum(lengths)])
        for lengths in all_allocations(survival, len(survival[0]))
    }
    choice = best_budget(survival, num_requests, drafted_s, verify_s)
    assert np.isclose(rates[tuple(allocate(survival, choice.num_verified))], max(rates.values()), rtol=1e-12)
    assert np.isclose(choice.tokens_per_s, max(rates.values()), rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_an_allocation_is_the_best_of_its_size(seed: int) -> None:
    survival, *_ = random_case(seed)
    for size in range(sum(map(len, survival)) + 1):
        lengths = allocate(survival, size)
        same = [other for other in all_allocations(survival, len(survival[0])) if sum(other) == size]
        assert sum(lengths) == size
        assert np.isclose(gain(survival, tuple(lengths)), max(gain(survival, other) for other in same))


def test_the_maximum_is_taken_beyond_a_step_of_the_curve() -> None:
    """The second draft costs more than a whole step, the next five nothing: it pays with them, not alone."""
    survival = [[0.99**length for length in range(1, 8)]]
    verify_s = [1.0, 1.0, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2]
    choice = best_length(survival, 1, [0.0] * 8, verify_s)
    assert (choice.num_tokens, choice.num_verified) == (7, 7)
    short = best_length([survival[0][:2]], 1, [0.0] * 3, verify_s)
    assert (short.num_tokens, short.num_verified) == (1, 1)


def test_nothing_is_drafted_where_it_gains_nothing() -> None:
    choice = best_length([[0.0] * 3] * 4, 4, [0.0, 0.1, 0.2, 0.3], [1.0] * 13)
    assert (choice.num_tokens, choice.num_verified, choice.tokens_per_s) == (0, 0, 4.0)


def test_of_equal_choices_the_shortest_is_taken() -> None:
    choice = best_length([[0.5, 0.0, 0.0]], 1, [0.0] * 4, [1.0] * 4)
    assert (choice.num_tokens, choice.num_verified) == (1, 1)


def test_more_rows_than_a_step_takes_are_not_asked_for() -> None:
    """verify_s ends at the largest budget that is allowed."""
    assert best_length([[1.0] * 4] * 2, 2, [0.0] * 5, [1.0] * 4).num_verified == 3
    assert best_budget([[1.0] * 4] * 2, 2, 0.0, [1.0] * 4).num_verified == 3
