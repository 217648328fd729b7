"""The rule and the guard over thousands of simulated steps: never much slower than plain decoding, near the best N.

Time is counted, not taken (tests/kit/simulated.py), so that every number here is the same on every machine. The machine
reads weights for the first rows and computes for the others; acceptance is drawn. `tests/property/test_guarded.py`
holds the same code to the text, in a real engine.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider.config import SpeculativeConfig
from outrider.engine.adaptive import AdaptiveLengths
from outrider.engine.costs import StepCosts
from outrider.engine.lengths import FixedLengths
from outrider.engine.sequence import Entry
from outrider.engine.sequence import Sequence as Running
from outrider.engine.stats import StepTimes
from outrider.engine.survival import log_odds
from outrider.types import Proposal, Verdict
from tests.kit.simulated import Drafts, Machine, World

N, NUM_SLOTS = 8, 64
PLAIN_S = 0.015


def verify_s(rows: float) -> float:
    """Eight rows cost little more than one; then each its share."""
    return PLAIN_S * (1 + 0.02 * min(rows, 8)) + 0.0011 * max(0.0, rows - 8)


def draft_s(num_requests: int, num_tokens: int) -> float:
    return num_tokens * (0.0009 + 0.00009 * num_requests)


def config_of(num_tokens: int = N, **settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="scripted", num_speculative_tokens=num_tokens, **settings)


def world(
    drafts: Drafts, load: int, *, noise: float = 0.0, error: float = 0.0, workload: str = "", **settings: Any
) -> World:
    """Guarded unless `settings` say otherwise; tables wrong by about `error`, steps by `noise`."""
    machine = Machine(verify_s, draft_s, noise=noise)
    lengths = AdaptiveLengths(config_of(**({"guard": True} | settings)), machine.costs(N, error), NUM_SLOTS)
    made = World(machine, drafts, lengths, workload=workload)
    made.load(load)
    return made


def best_fixed(mean: float, load: int) -> float:
    """Speedup over plain decoding of the best fixed N (0 included) where each draft is accepted with that chance."""
    return max(
        sum(mean**i for i in range(n + 1))
        * verify_s(load)
        / (verify_s(load * (n + 1)) + (draft_s(load, n) if n else 0.0))
        for n in range(N + 1)
    )


USELESS = {
    "never right": Drafts(0.0),
    "never right, sure of it": Drafts(0.0, insight=0.0, head=True),
    "never right, silent": Drafts(0.0, head=None),
    "hardly ever right": Drafts(0.05),
    "hardly ever right, asking": Drafts(0.05, asks=True),
}


@pytest.mark.parametrize("load", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", USELESS)
def test_useless_drafts_cost_less_than_two_percent(name: str, load: int) -> None:
    run = world(copy.deepcopy(USELESS[name]), load, noise=0.1, error=0.1).run(1500 if load == 1 else 500)
    assert run.speedup > 0.98


@pytest.mark.parametrize("kind", [{}, {"asks": True}, {"head": True}], ids=["block", "asking", "head"])
def test_drafts_are_used_as_well_as_by_the_best_fixed_length_of_each_cell(kind: dict[str, Any]) -> None:
    """The first steps included, in which nothing is known yet."""
    cells = [(0.3, 1), (0.6, 1), (0.9, 1), (0.3, 4), (0.9, 4), (0.7, 8), (0.9, 32)]
    speedups = {
        cell: world(Drafts(cell[0], **kind), cell[1]).run(500 if cell[1] < 8 else 200).speedup for cell in cells
    }
    ratios = {cell: speedup / best_fixed(*cell) for cell, speedup in speedups.items()}
    assert min(speedups.values()) > 0.98
    assert min(ratios.values()) > 0.96, ratios
    assert np.mean(list(ratios.values())) > 0.985, ratios


@pytest.mark.parametrize("mean", [0.5, 0.7])
def test_a_drafter_that_asks_makes_few_drafts_that_nobody_verifies(mean: float) -> None:
    run = world(Drafts(mean, asks=True), 4, noise=0.05).run(400)
    assert run.num_drafted < 1.3 * run.num_verified


def test_what_is_not_known_is_tried_with_one_draft() -> None:
    run = world(Drafts(0.0), 8, noise=0.05).run(1000)
    assert max(run.drafted) == 1
    assert 10 < run.drafted_steps < 50


@pytest.mark.parametrize(("mean", "load"), [(0.3, 1), (0.8, 4), (0.8, 16)])
def test_noise_and_wrong_tables_cost_a_few_percent(mean: float, load: int) -> None:
    for asks in (False, True):
        run = world(Drafts(mean, asks=asks), load, noise=0.1, error=0.1).run(400)
        assert run.speedup > max(0.98, 0.93 * best_fixed(mean, load))


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_tables_that_are_all_wrong_are_put_right_by_the_first_steps(factor: float) -> None:
    """As if measured while the machine was busy, or quiet, and it is not any more."""
    for mean, load in itertools.product((0.0, 0.8), (1, 8)):
        quick = Machine(lambda rows: factor * verify_s(rows), draft_s)
        lengths = AdaptiveLengths(config_of(guard=True), quick.costs(N), NUM_SLOTS)
        made = World(Machine(verify_s, draft_s), Drafts(mean), lengths)
        made.load(load)
        assert made.run(800).speedup > max(0.975, 0.9 * best_fixed(mean, load))


def test_lengths_follow_a_load_that_jumps() -> None:
    made, chosen = world(Drafts(0.7), 1, noise=0.05), {}
    for phase, load in enumerate((1, 32, 1)):
        made.load(load)
        chosen[phase] = made.run(150).chosen
    assert np.median(chosen[0][20:]) >= 4
    assert np.mean(chosen[1][20:]) < 0.3, "but for trials"
    assert np.median(chosen[2][:20]) >= 4


def test_a_drafter_that_recovers_comes_back_and_one_that_fails_goes() -> None:
    made = world(Drafts(0.0), 2, noise=0.05)
    assert made.run(1500).drafted_steps < 150
    made.drafts.mean = 0.8
    made.run(150)
    assert made.run(150).speedup > 0.93 * best_fixed(0.8, 2)
    made.drafts.mean = 0.0
    after = made.run(800)
    assert after.speedup > 0.98
    assert sum(chosen > 0 for chosen in after.chosen[100:]) < 70


def test_classes_are_judged_apart_and_together_cost_no_more_than_one() -> None:
    """Nine classes at once, drafts of all but one useless: the one drafts, the others cost less than 2% together."""

    class Mixed(World):
        """Requests of many classes; only drafts of the first are accepted."""

        def _start(self, slot: int) -> None:
            self.drafting = type(self.drafting)(workload=f"{len(self.running) % 9}")
            super()._start(slot)

        def _verdict(self, length: int, chances: np.ndarray) -> Verdict:
            raise NotImplementedError

    machine = Machine(verify_s, draft_s)
    lengths = AdaptiveLengths(config_of(guard=True), machine.costs(N), NUM_SLOTS)
    made = Mixed(machine, Drafts(0.0), lengths)
    made._verdict = lambda length, chances: Verdict(0, 0)  # type: ignore[method-assign]
    made.load(9)
    first, run = made.run(300), made.run(1500)
    assert first.speedup > 0.93, "each class has a first allowance"
    assert run.speedup > 0.98


def test_texts_that_a_drafter_has_to_catch_up_on_do_not_break_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.simulated.PROMPT_LEN", 1000)
    for mean in (0.0, 0.8):
        machine = Machine(verify_s, draft_s, fill_s=1e-4)
        made = World(machine, Drafts(mean), AdaptiveLengths(config_of(guard=True), machine.costs(N), NUM_SLOTS))
        made.load(2)
        run = made.run(1000)
        assert run.speedup > (1.4 if mean else 0.98)


@pytest.mark.parametrize("asks", [False, True])
def test_without_the_guard_every_request_drafts_and_verification_follows_what_pays(asks: bool) -> None:
    alone = world(Drafts(0.7, asks=asks), 1, guard=False, enable_adaptive_verification=True).run(300)
    many = world(Drafts(0.7, asks=asks), 32, guard=False, enable_adaptive_verification=True).run(150)
    assert alone.drafted_steps == 300
    assert many.drafted_steps == 150
    assert alone.num_verified / 300 > 4
    assert many.num_verified / (150 * 32) < 2


def test_fixed_lengths_are_the_configured_ones() -> None:
    machine = Machine(verify_s, draft_s)
    made = World(machine, Drafts(0.5), FixedLengths(config_of(3)))
    made.load(4)
    assert set(made.run(20).chosen) == {3}
    assert made.lengths.pace is None


def test_prompts_beside_a_step_do_not_make_tokens_dearer() -> None:
    """Rows cost 1.1 ms beside prompts and 0.3 without: no more drafts pay there, though the step is slow anyway."""
    made = world(Drafts(0.3), 4, guard=False, enable_adaptive_verification=True)
    made.run(100)
    verified = {}
    for num_prompt_rows in (0, 500):
        made.lengths.budgets(made.running, num_prompt_rows)
        entries = [Entry(sequence, 1, N, samples=True) for sequence in made.running]
        kept = made.lengths.keep(entries, Proposal(((0,) * N,) * 4, top_probs=((0.3,) * N,) * 4))
        verified[num_prompt_rows] = sum(map(len, kept.tokens))
    assert verified[500] <= verified[0] <= N
    assert verified[0] > 0


def test_a_price_says_what_a_step_took_more_than_a_plain_one() -> None:
    made = world(Drafts(0.9), 1, guard=False, enable_adaptive_verification=True)
    made.run(60)
    lengths = made.lengths
    budgets = lengths.budgets(made.running, 0)
    entries = [Entry(made.running[0], 1, budgets[0], samples=True)]
    lengths.keep(entries, Proposal(((1, 2),), top_probs=((0.9, 0.9),)))
    price = lengths.observe(entries, [Verdict(0, 0)], StepTimes(0.002, 0.02, 0.0))
    assert price is not None
    assert price.plain_s == pytest.approx(verify_s(1), rel=0.1)
    assert price.extra_s == pytest.approx(0.022 - price.plain_s, rel=0.01)
    lengths.budgets(made.running, 0)
    lengths.keep(entries, Proposal(((),)))
    assert lengths.observe(entries, [Verdict(0, 0)], StepTimes(0.0, 0.015, 0.0)) is None


# ---- sampled drafts under `standard` and `block` ----


STEPS_S = [1.0, 1.0, 1.45, 1.45, 1.9, 1.9, 2.35, 2.35]
"""Seconds by rows: a draft beyond the last step brings its neighbours for nothing."""


def verified_by_outcome(lengths: AdaptiveLengths, running: Sequence[Running]) -> dict[Any, list[int]]:
    """Drafts verified of each of two requests, for every value of two chains of three tokens from {0, 1}.

    The drafter asks how far to go, and what it says of a draft depends on the tokens before it, as it may.
    """

    def said(before: tuple[int, ...]) -> float:
        return 0.1 if before and before[-1] else 0.9

    found = {}
    for outcome in itertools.product(itertools.product((0, 1), repeat=3), repeat=2):
        trial = copy.deepcopy(lengths)
        trial.pace = trial
        budgets = trial.budgets(running, 0)
        made: list[list[int]] = [[], []]
        active = [0, 1]
        for place in range(3):
            for request in active:
                made[request].append(outcome[request][place])
            slots = [running[request].slot for request in active]
            values = [said(outcome[request][:place]) for request in active]
            more = trial.goes_on(place, slots, values)
            active = [r for r, goes in zip(active, more, strict=True) if goes and len(made[r]) < budgets[r]]
            if not active:
                break
        entries = [Entry(sequence, 1, budget, samples=True) for sequence, budget in zip(running, budgets, strict=True)]
        tops = tuple(tuple(said(tuple(made[r][:i])) for i in range(len(made[r]))) for r in (0, 1))
        kept = trial.keep(entries, Proposal(tuple(map(tuple, made)), top_probs=tops))
        found[outcome] = [len(chain) for chain in kept.tokens]
    return found


def depends_on_itself(found: dict[Any, list[int]]) -> bool:
    """Whether some draft is verified for one of its own values, or of those after it, and not for another."""
    seen: dict[Any, bool] = {}
    for outcome, lengths in found.items():
        for request, place in itertools.product((0, 1), range(3)):
            key = (request, place, outcome[1 - request], outcome[request][:place])
            if seen.setdefault(key, lengths[request] > place) != (lengths[request] > place):
                return True
    return False


def warmed(**settings: Any) -> tuple[AdaptiveLengths, list[Running]]:
    """Two requests; the drafter is taken at its word, and lately found its drafts 75% likely."""
    machine = Machine(lambda rows: float(np.interp(rows, range(1, 9), STEPS_S)), lambda *_: 0.001)
    costs = StepCosts(range(1, 9), STEPS_S, [1, 4], [[0.001] * 3] * 2)
    lengths = AdaptiveLengths(config_of(3, enable_adaptive_verification=True, **settings), costs, NUM_SLOTS)
    made = World(machine, Drafts(0.6), lengths)
    made.load(2)
    survival = lengths.survival
    known = survival._classes[0]
    known.slope, known.level, known.hopes = 1.0, 0.0, [0.0] * 3
    for own in survival._requests:
        own.odds = [log_odds(0.75)] * 3
    return lengths, made.running


@pytest.mark.parametrize("method", ["standard", "block"])
def test_whether_a_sampled_draft_is_verified_depends_only_on_tokens_before_it(method: str) -> None:
    """Every outcome of two chains is tried: this is the condition under which the text keeps its distribution."""
    lengths, running = warmed(draft_sample_method="probabilistic", rejection_sample_method=method)
    found = verified_by_outcome(lengths, running)
    assert {sum(kept) for kept in found.values()} not in ({0}, {6}), "nothing to choose tests nothing"
    assert len({tuple(kept) for kept in found.values()}) > 1, "this round's confidences rank"
    assert len({sum(kept) for kept in found.values()}) == 1, "and do not say how many"
    assert not depends_on_itself(found)


def test_the_rule_for_other_drafts_does_depend_and_is_seen_to() -> None:
    """Coupled and greedy drafts may be cut by any of what is known, and are."""
    lengths, running = warmed(draft_sample_method="probabilistic", rejection_sample_method="coupled")
    found = verified_by_outcome(lengths, running)
    assert len({sum(kept) for kept in found.values()}) > 1
    assert depends_on_itself(found)


def test_drafts_that_are_sampled_are_not_stopped_early() -> None:
    lengths, running = warmed(draft_sample_method="probabilistic", rejection_sample_method="standard")
    lengths.budgets(running, 0)
    assert all(lengths.goes_on(0, [sequence.slot for sequence in running], [1e-6, 1e-6]))


def test_a_request_that_is_off_has_no_drafts_and_one_with_its_own_length_no_more() -> None:
    made = world(Drafts(0.9), 3, guard=False, enable_adaptive_verification=True)
    for sequence, wishes in zip(made.running, ({"off": True}, {"num_speculative_tokens": 2}, {}), strict=True):
        drafting = type(made.drafting)(**wishes)
        object.__setattr__(sequence.request, "drafting", drafting)
    assert made.lengths.budgets(made.running, 0) == [0, 2, 8]


def test_a_request_that_begins_is_asked_for_at_once_however_the_last_one_ended() -> None:
    """A request's last token needs no drafts; that decision must not hold for the next request."""
    made = world(Drafts(0.9), 1)
    made.run(100)
    (ending,) = made.running
    ending.max_output = ending.num_output + 1
    assert made.lengths.budgets([ending], 0) == [0]
    made.running.clear()
    made.load(1)
    assert made.lengths.budgets(made.running, 0)[0] > 0


def test_a_run_is_the_same_again() -> None:
    runs = [world(Drafts(0.6), 4, noise=0.1, error=0.1).run(100) for _ in range(2)]
    assert runs[0] == runs[1]
