"""Survivals: a logistic truth is found again, by class and by request, and what was not tested teaches nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.engine.survival import Survival, log_odds
from outrider.types import Proposal

N, SLOTS = 4, 8
EVERYBODY = range(SLOTS)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def teach(survival: Survival, truth: np.ndarray, said: np.ndarray, random: np.random.Generator, verified: int) -> None:
    """One round: drafts that the drafter finds `said` [R, N] likely are accepted with chances `truth` [R, N]."""
    accepted = np.cumprod(random.random(truth.shape) < truth, axis=1)[:, :verified].sum(axis=1)
    for slot in range(len(truth)):
        survival.learn(slot, odds_of(said[slot]), verified, int(accepted[slot]))


def odds_of(said: np.ndarray) -> list[float]:
    return [log_odds(float(value)) for value in said]


def first_survivals(survival: Survival) -> np.ndarray:
    """Of the first draft of each slot, before it is made."""
    return np.array([survival.forecast(slot, N)[0] for slot in EVERYBODY])


def learned(slope: float, level: float, places: np.ndarray, rounds: int = 500, seed: int = 0) -> Survival:
    """After so many rounds of a drafter whose drafts are accepted with sigmoid(slope x + level + places[i])."""
    survival, random = Survival(SLOTS, N), np.random.default_rng(seed)
    for slot in range(SLOTS):
        survival.begin(slot, "")
    for _ in range(rounds):
        said = random.beta(2, 1, size=(SLOTS, N))
        teach(survival, sigmoid(slope * np.log(said / (1 - said)) + level + places), said, random, N)
    return survival


@pytest.mark.parametrize(
    ("slope", "level", "places"),
    [(1.0, 0.0, (0, 0, 0, 0)), (0.6, 0.8, (0.5, 0, -0.5, -0.5)), (0.0, -1.0, (0, 0, 0, 0)), (1.5, -1.0, (1, 0, 0, 0))],
)
def test_a_logistic_truth_is_learned(slope: float, level: float, places: tuple[float, ...]) -> None:
    said = np.array([[0.3] * N, [0.6] * N, [0.9] * N])
    truth = np.cumprod(sigmoid(slope * np.log(said / (1 - said)) + level + np.array(places)), axis=1)
    found = []
    for seed in range(5):
        survival = learned(slope, level, np.array(places), 150, seed)
        found.append([survival.survivals(slot, odds_of(said[slot])) for slot in range(3)])
    errors = np.array(found) - truth
    assert np.abs(errors).max() < 0.25
    assert np.abs(errors.mean(axis=0)).max() < 0.1
    assert errors.mean() > -0.02, "what is asked for is hopeful, if anything"


def test_hope_is_large_where_little_was_seen_and_comes_back_while_nothing_is_drafted() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    said = np.full((SLOTS, N), 0.5)

    def hope() -> float:
        return survival._classes[0].hopes[0]

    first = hope()
    for _ in range(100):
        teach(survival, np.full((SLOTS, N), 0.6), said, random, N)
    settled = hope()
    for _ in range(2000):
        survival.rest(EVERYBODY, 1)
    assert settled < first / 3
    assert settled * 2 < hope() <= first


def test_drafts_that_were_not_tested_teach_nothing() -> None:
    """After a rejection and beyond what was verified, whatever the drafter said: only tested places count."""

    def known(survival: Survival) -> tuple[Any, ...]:
        of_class = survival._classes[0]
        own = survival._requests[0]
        return of_class.slope, of_class.level, of_class.places, of_class.place_variances, own.level, own.variance

    said = [2.0, 1.5, 1.0, 0.5]
    for verified, accepted, tested in ((N, 1, 2), (3, 3, 3), (0, 0, 0)):
        one, other = Survival(SLOTS, N), Survival(SLOTS, N)
        one.learn(0, said, verified, accepted)
        other.learn(0, [*said[:tested], *[-5.0] * (N - tested)], verified, accepted)
        assert known(one) == known(other)
        assert (known(one) == known(Survival(SLOTS, N))) == (tested == 0)
        assert one.num_rounds(0) == (tested > 0)


def test_classes_are_learned_apart() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    for slot in range(SLOTS):
        survival.begin(slot, "code" if slot % 2 else "chat")
    truth = np.where(np.arange(SLOTS) % 2, 0.9, 0.2)[:, None] * np.ones(N)
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    for slot in (0, 1, 2):
        survival.begin(slot, ("new", "code", "chat")[slot])
    new, code, chat = first_survivals(survival)[:3]
    assert code > 0.85
    assert chat < 0.35
    assert 0.6 < new < 0.85, "a class that nobody knows starts where all start"


def test_one_odd_request_is_known_apart_from_its_class() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    truth = np.full((SLOTS, N), 0.9)
    truth[3] = 0.2
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    found = first_survivals(survival)
    assert found[3] < 0.5 < 0.75 < np.delete(found, 3).min()
    survival.begin(3, "")
    assert first_survivals(survival)[3] > 0.7, "the next request in its slot is another one"


def test_what_is_known_of_a_request_fades_while_it_does_not_draft() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    truth = np.full((SLOTS, N), 0.9)
    truth[3] = 0.1
    for _ in range(60):
        teach(survival, truth, np.full((SLOTS, N), 0.7), random, N)
    before = first_survivals(survival)[3]
    for _ in range(300):
        survival.rest([3], 1)
    assert first_survivals(survival)[3] > before + 0.3


def test_what_a_drafter_last_said_of_a_request_fades_while_it_rests() -> None:
    """A dip ends drafting, and then nothing new is said: it must not be for good."""
    survival = learned(1.0, 0.0, np.zeros(N), rounds=200)
    usual = survival.forecast(0, N)[0]
    for _ in range(10):
        survival.learn(0, [-4.0] * N, 0, 0)
    dip = survival.forecast(0, N)[0]
    survival.rest([0], 150)
    assert dip < usual - 0.3
    assert survival.forecast(0, N)[0] > (usual + dip) / 2


def test_more_classes_than_are_kept_share_the_unnamed_one() -> None:
    survival = Survival(1, N)
    seen = []
    for index in range(40):
        survival.begin(0, f"class {index}")
        seen.append(survival.class_of[0])
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
        assert odds == [odds_of(np.array(values)) for values in said]
        survival._classes[0].hopes = [0.0] * N
    assert by_head.survivals(0, odds[0]) == pytest.approx([0.9, 0.72])
    assert by_head.survivals(1, odds[1]) == pytest.approx([0.6])
    assert 0.6 < by_top.survivals(0, odds[0])[0] < 0.8


def test_a_drafter_that_says_nothing_is_known_by_its_past() -> None:
    survival, random = Survival(SLOTS, N), np.random.default_rng(0)
    assert survival.odds(Proposal(((1, 2), ()))) == [[0.0, 0.0], []]
    for _ in range(100):
        teach(survival, np.full((SLOTS, N), 0.8), np.full((SLOTS, N), 0.5), random, N)
    assert survival.forecast(0, N) == pytest.approx(0.8 ** np.arange(1, N + 1), abs=0.1)
    assert len(survival.forecast(0, 2)) == 2


def test_a_forecast_goes_by_what_was_said_of_the_request_lately() -> None:
    survival = learned(1.0, 0.0, np.zeros(N), rounds=200)
    random = np.random.default_rng(1)
    for _ in range(60):
        said = np.full((SLOTS, N), 0.8)
        said[0] = 0.2
        teach(survival, said, said, random, N)
    found = first_survivals(survival)
    assert found[0] < 0.4 < 0.7 < found[1]
    assert [survival.next_confidence(slot, 0) for slot in EVERYBODY] == pytest.approx(found)


def test_drafts_that_become_worthless_are_found_out_soon() -> None:
    survival = learned(1.0, 0.0, np.zeros(N), rounds=300)
    random, said = np.random.default_rng(1), np.full((SLOTS, N), 0.8)
    before = first_survivals(survival).mean()
    for _ in range(30):
        teach(survival, np.zeros((SLOTS, N)), said, random, N)
    assert first_survivals(survival).mean() < before / 3
