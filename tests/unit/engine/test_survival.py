"""Survivals: a logistic truth is found again, by class and by request, and what was not tested teaches nothing."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.survival import Survival, log_odds
from outrider.types import Proposal

N, SLOTS = 4, 8
EVERYBODY = np.arange(SLOTS)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def teach(survival: Survival, truth: np.ndarray, said: np.ndarray, random: np.random.Generator, verified: int) -> None:
    """One round: drafts that the drafter finds `said` [R, N] likely are accepted with chances `truth` [R, N]."""
    accepted = np.cumprod(random.random(truth.shape) < truth, axis=1)[:, :verified].sum(axis=1)
    drafted = np.full(len(truth), truth.shape[1])
    survival.learn(EVERYBODY[: len(truth)], log_odds(said), drafted, np.minimum(drafted, verified), accepted)


def learned(slope: float, level: float, places: np.ndarray, rounds: int = 500, seed: int = 0) -> Survival:
    """After so many rounds of a drafter whose drafts are accepted with sigmoid(slope x + level + places[i])."""
    survival, random = Survival(SLOTS, N), np.random.default_rng(seed)
    for slot in range(SLOTS):
        survival.begin(slot, "")
    for _ in range(rounds):
        said = random.beta(2, 1, size=(SLOTS, N))
        teach(survival, sigmoid(slope * log_odds(said) + level + places), said, random, N)
    return survival


@pytest.mark.parametrize(
    ("slope", "level", "places"),
    [(1.0, 0.0, (0, 0, 0, 0)), (0.6, 0.8, (0.5, 0, -0.5, -0.5)), (0.0, -1.0, (0, 0, 0, 0)), (1.5, -1.0, (1, 0, 0, 0))],
)
def test_a_logistic_truth_is_learned(slope: float, level: float, places: tuple[float, ...]) -> None:
    said = np.array([[0.3] * N, [0.6] * N, [0.9] * N])
    truth = np.cumprod(sigmoid(slope * log_odds(said) + level + np.array(places)), axis=1)
    found = [
        learned(slope, level, np.array(places), 150, seed).survivals(EVERYBODY[:3], log_odds(said), np.full(3, N))
        for seed in range(5)
    ]
    errors = np.array(found) - truth
    assert np.abs(errors).max() < 0.25
    assert np.abs(errors.mean(axis=0)).max() < 0.1
    assert errors.mean() > -0.02, "what is asked for is hopeful, if anything"


def test_hope_is_large_where_little_was_seen_and_comes_back_while_nothing_is_drafted() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    said = np.full((SLOTS, N), 0.5)

    def hope() -> float:
        return float(survival._hope[0])

    first = hope()
    for _ in range(100):
        teach(survival, np.full((SLOTS, N), 0.6), said, random, N)
    settled = hope()
    for _ in range(2000):
        survival.rest(EVERYBODY)
    assert settled < first / 3
    assert settled * 2 < hope() <= first


def test_drafts_that_were_not_tested_teach_nothing() -> None:
    """After a rejection and beyond what was verified, whatever the drafter said: only tested places count."""
    one, other = Survival(SLOTS, N), Survival(SLOTS, N)
    slots, drafted = EVERYBODY[:2], np.array([N, N])
    odds = log_odds(np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6]]))
    changed = odds.copy()
    changed[0, 2:] = -5  # rejected at place 1
    changed[1, 3:] = 5  # three were verified and accepted
    for survival, said in ((one, odds), (other, changed)):
        survival.learn(slots, said, drafted, np.array([N, 3]), np.array([1, 3]))
    assert np.array_equal(one._weights, other._weights)
    assert np.array_equal(one._level, other._level)
    untouched = Survival(SLOTS, N)
    untouched.learn(slots, odds, drafted, np.array([0, 0]), np.array([0, 0]))
    assert np.array_equal(untouched._weights, Survival(SLOTS, N)._weights)
    assert untouched.num_rounds[0] == 0


def test_classes_are_learned_apart() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    for slot in range(SLOTS):
        survival.begin(slot, "code" if slot % 2 else "chat")
    truth = np.where(EVERYBODY % 2, 0.9, 0.2)[:, None] * np.ones(N)
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    for slot in (0, 1, 2):
        survival.begin(slot, ("new", "code", "chat")[slot])
    new, code, chat = survival.forecast(EVERYBODY[:3])[:, 0]
    assert code > 0.85
    assert chat < 0.35
    assert 0.6 < new < 0.85, "a class that nobody knows starts where all start"


def test_one_odd_request_is_known_apart_from_its_class() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    truth = np.full((SLOTS, N), 0.9)
    truth[3] = 0.2
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    found = survival.forecast(EVERYBODY)[:, 0]
    assert found[3] < 0.5 < 0.8 < np.delete(found, 3).min()
    survival.begin(3, "")
    assert survival.forecast(EVERYBODY)[3, 0] > 0.7, "the next request in its slot is another one"


def test_what_is_known_of_a_request_fades_while_it_does_not_draft() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    truth = np.full((SLOTS, N), 0.9)
    truth[3] = 0.1
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    before = survival.forecast(EVERYBODY)[3, 0]
    for _ in range(300):
        survival.rest(EVERYBODY[3:4])
    assert survival.forecast(EVERYBODY)[3, 0] > before + 0.3


def test_more_classes_than_are_kept_share_the_unnamed_one() -> None:
    survival = Survival(1, N)
    seen = []
    for index in range(40):
        survival.begin(0, f"class {index}")
        seen.append(int(survival.class_of[0]))
    assert seen[:31] == list(range(1, 32))
    assert set(seen[31:]) == {0}
    survival.begin(0, "class 3")
    assert survival.class_of[0] == 4


def test_a_head_is_taken_at_its_word_and_top_probs_are_not() -> None:
    chains, said = ((1, 2), (3,)), ((0.9, 0.8), (0.6,))
    by_head, by_top = Survival(SLOTS, N), Survival(SLOTS, N)
    for survival, proposal in (
        (by_head, Proposal(chains, confidence=said)),
        (by_top, Proposal(chains, top_probs=said)),
    ):
        odds = survival.odds(proposal)
        assert np.allclose(odds, log_odds(np.array([[0.9, 0.8, 0.5, 0.5], [0.6, 0.5, 0.5, 0.5]])))
        survival._hope[:] = 0
    head = by_head.survivals(EVERYBODY[:2], odds, np.array([2, 1]))
    assert np.allclose(head, [[0.9, 0.72, 0, 0], [0.6, 0, 0, 0]])
    top = by_top.survivals(EVERYBODY[:2], odds, np.array([2, 1]))
    assert 0.6 < top[0, 0] < 0.8
    assert np.array_equal(top == 0, head == 0)


def test_a_drafter_that_says_nothing_is_known_by_its_past() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    odds = survival.odds(Proposal(((1, 2),)))
    assert np.array_equal(odds, np.zeros((1, N)))
    for _ in range(100):
        teach(survival, np.full((SLOTS, N), 0.8), np.full((SLOTS, N), 0.5), random, N)
    assert np.allclose(survival.forecast(EVERYBODY[:1])[0], 0.8 ** np.arange(1, N + 1), atol=0.1)


def test_a_forecast_goes_by_what_was_said_of_the_request_lately() -> None:
    survival = learned(1.0, 0.0, np.zeros(N), rounds=200)
    random = np.random.default_rng(1)
    for _ in range(60):
        said = np.full((SLOTS, N), 0.8)
        said[0] = 0.2
        teach(survival, said, said, random, N)
    found = survival.forecast(EVERYBODY)[:, 0]
    assert found[0] < 0.4 < 0.7 < found[1]
    assert np.allclose(survival.next_confidence(EVERYBODY, 0), found)


def test_drafts_that_become_worthless_are_found_out_soon() -> None:
    survival = learned(1.0, 0.0, np.zeros(N), rounds=300)
    random, said = np.random.default_rng(1), np.full((SLOTS, N), 0.8)
    before = survival.forecast(EVERYBODY)[:, 0].mean()
    for _ in range(30):
        teach(survival, np.zeros((SLOTS, N)), said, random, N)
    assert survival.forecast(EVERYBODY)[:, 0].mean() < before / 3
