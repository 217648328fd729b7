"""Theorems 1, 7 and 10 with lengths that change from step to step: by the guard, by adaptive verification, by whim.

Whatever a request drafts, however far a drafter goes and however much of it is verified: the text is the target's own,
and the books hold (`tiny.run` sees to that). `tests/unit/engine/test_adaptive.py` has what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, Pace
from outrider.engine.adaptive import AdaptiveLengths
from outrider.engine.budget import draft_budget
from outrider.engine.costs import StepCosts
from outrider.engine.engine import Engine
from outrider.engine.lengths import Price
from outrider.engine.safe_drafter import cut
from outrider.engine.sequence import Entry
from outrider.engine.sequence import Sequence as Running
from outrider.engine.stats import StepTimes
from outrider.models.llama import LlamaModel
from outrider.types import DraftParams, Proposal, Verdict
from tests.contract.test_drafters import PROVIDERS
from tests.kit import books, scripted, tiny
from tests.kit.scripted import Scripted, Truth

N = 5
REQUESTS = [
    tiny.make_request(f"{i}", tiny.random_prompt(i, length), seed=i, temperature=0.7 * (i % 2), max_tokens=40)
    for i, length in enumerate((1, 2, 7, 16, 17, 40))
]
MODES: dict[str, dict[str, Any]] = {
    "guard": {"guard": True},
    "adaptive": {"guard": False, "enable_adaptive_verification": True},
    "both": {"guard": True, "enable_adaptive_verification": True},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(3, cyclic=True)


@pytest.fixture(scope="module")
def plain(model: LlamaModel) -> dict[str, list[int]]:
    return tiny.tokens_of(tiny.make_engine(model), REQUESTS)


@pytest.fixture(scope="module")
def truth(model: LlamaModel) -> Truth:
    return Truth(model, REQUESTS)


class Whims:
    """Lengths by chance: each request drafts or not, as far as it likes, and any part of that is verified.

    Is told as `AdaptiveLengths` is, and names a price, so that what a request saved is counted too.
    """

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        self._config, self.random = config, np.random.default_rng(seed)
        self.pace: Pace | None = self
        self.num_stopped = self.num_cut = 0
        self.has_drafts = False

    def begin(self, sequence: Running) -> None:
        assert sequence.slot >= 0

    def budgets(self, sequences: Sequence[Running], num_prompt_rows: int) -> list[int]:
        ceilings = [draft_budget(sequence, self._config, len(sequences)) for sequence in sequences]
        off = self.random.random() < 0.3
        return [0 if off or self.random.random() < 0.3 else int(self.random.integers(c + 1)) for c in ceilings]

    def goes_on(self, place: int, slots: Sequence[int], top_probs: Sequence[float]) -> list[bool]:
        assert len(slots) == len(top_probs) > 0
        assert all(0 < value <= 1.0001 for value in top_probs)
        more: list[bool] = (self.random.random(len(slots)) < 0.7).tolist()
        self.num_stopped += more.count(False)
        return more

    def keep(self, entries: Sequence[Entry], proposal: Proposal) -> Proposal:
        self.has_drafts = any(proposal.tokens)
        lengths = [int(self.random.integers(len(chain) + 1)) for chain in proposal.tokens]
        self.num_cut += sum(map(len, proposal.tokens)) - sum(lengths)
        return cut(proposal, lengths)

    def observe(self, entries: Sequence[Entry], verdicts: Sequence[Verdict | None], times: StepTimes) -> Price | None:
        assert len(entries) == len(verdicts)
        return Price(0.01, 0.001) if self.has_drafts else None


def on_a_whim(engine: Engine, seed: int) -> Whims:
    """Give an engine lengths by chance."""
    assert engine.speculative is not None
    whims = Whims(engine.speculative, seed)
    engine.lengths = engine.scheduler.lengths = whims
    return whims


@pytest.fixture(scope="module", params=PROVIDERS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    settings = PROVIDERS[request.param](tmp_path_factory.mktemp(request.param))
    return SpeculativeConfig.parse({"method": request.param, "num_speculative_tokens": N} | settings)


# ---- every method, as it is ----


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_no_whim_changes_a_text(
    sampling: str, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    """N = 0 and back, early stops and cuts, with a cache that suffices and one that preempts."""
    changes: dict[str, Any] = {"draft_sample_method": sampling}
    accepted = 0
    for seed, cache in enumerate((2048, 128)):
        engine = tiny.make_engine(model, speculative=replace(config, **changes), kv_cache_tokens=cache)
        whims = on_a_whim(engine, seed)
        assert tiny.tokens_of(engine, REQUESTS) == plain
        assert (engine.scheduler.num_preemptions > 0) == (cache == 128)
        assert whims.num_cut > 0
        assert engine.stats.num_breaches == 0
        accepted += engine.stats.speculation.num_accepted_tokens
    assert accepted > 20


@pytest.mark.parametrize("mode", MODES)
def test_measured_lengths_change_no_text(
    mode: str, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    """Costs are measured on this very machine before the first request; nothing of that shows."""
    for cache in (2048, 128):
        engine = tiny.make_engine(model, speculative=replace(config, **MODES[mode]), kv_cache_tokens=cache)
        books.check_at_rest(engine)
        for _ in range(2):
            assert tiny.tokens_of(engine, REQUESTS) == plain
        assert engine.stats.num_breaches == 0


@pytest.mark.parametrize("mode", MODES)
def test_lengths_that_come_and_go_change_no_text(
    mode: str, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    """Tables under which drafts pay, and do not, in turns: drafters leave and catch up."""
    engine = tiny.make_engine(model, speculative=replace(config, **MODES[mode]), costs=costs(0.01))
    lengths = engine.lengths
    assert isinstance(lengths, AdaptiveLengths)

    def turn(engine: Engine) -> None:
        lengths.costs = costs((0.01, 3.0)[engine.stats.num_steps // 7 % 2])
        lengths._step.accounts.clear()

    results = tiny.run(engine, REQUESTS, each_step=turn)
    assert {name: result.tokens for name, result in results.items()} == plain
    assert engine.stats.speculation.num_drafts > 0


def costs(draft_s: float) -> StepCosts:
    """Rows cost little; drafting costs so much a token. Real steps were seen, so that drafting may begin."""
    made = StepCosts([1, 64], [1.0, 1.5], [1], [[draft_s * n for n in range(1, N + 1)]])
    for num_rows in (1, 64):
        for _ in range(4):
            made.observe_verify(num_rows, float(made.verify(num_rows)))
    return made


def test_requests_that_come_go_and_ask_for_their_own_change_nobodys_text(
    model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    """Aborted at any step, off, or with an N of their own, beside others; the drafts of those who are off are none."""
    wishes = [DraftParams(), DraftParams(off=True), DraftParams(num_speculative_tokens=1), DraftParams(workload="b")]
    mixed = [replace(request, drafting=wishes[i % 4]) for i, request in enumerate(REQUESTS)]
    for mode in MODES.values():
        engine = tiny.make_engine(model, speculative=replace(config, **mode), costs=costs(0.001), kv_cache_tokens=256)
        for num_steps in (1, 3, 6):
            for request in REQUESTS[2:4]:
                engine.add(replace(request, request_id="gone" + request.request_id))
            for _ in range(num_steps):
                engine.step()
            for name in list(engine._sequences):
                engine.abort(name)
            books.check_at_rest(engine)
        results = tiny.run(engine, mixed)
        assert {name: result.tokens for name, result in results.items()} == plain
        for request in mixed:
            stats = results[request.request_id].stats
            assert stats is not None
            assert stats.workload == request.drafting.workload
            longest = max((n for n, count in enumerate(stats.verified_histogram) if count), default=0)
            assert longest <= (0 if request.drafting.off else request.drafting.num_speculative_tokens or N)
        assert engine.stats.num_breaches == 0
        assert set(engine.stats.workloads) == {"", "b"}


# ---- scripted drafters ----


SCRIPTS: dict[str, Callable[[Truth], Scripted]] = {
    "oracle": scripted.Oracle,
    "contrarian": scripted.Contrarian,
    "mixed": lambda truth: scripted.Mixed(truth, 0.6),
    "liar": scripted.Liar,
    "stutterer": lambda truth: scripted.Stutterer(),
    "sampler": lambda truth: scripted.Sampler(),
    "crasher": lambda truth: scripted.Crasher(truth, 3, (1, 2)),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("mode", MODES)
def test_scripts_change_no_text(
    mode: str, script: str, model: LlamaModel, truth: Truth, plain: dict[str, list[int]]
) -> None:
    speculative = SpeculativeConfig(method="scripted", num_speculative_tokens=N, **MODES[mode])
    for tables in (costs(0.001), costs(2.0)):
        engine = tiny.make_engine(model, SCRIPTS[script](truth), speculative, costs=tables)
        assert tiny.tokens_of(engine, REQUESTS) == plain
        engine = tiny.make_engine(model, SCRIPTS[script](truth), speculative)
        on_a_whim(engine, 1)
        assert tiny.tokens_of(engine, REQUESTS) == plain


@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_text_is_the_targets_own_under_other_rules_too(
    method: str, model: LlamaModel, plain: dict[str, list[int]]
) -> None:
    speculative = SpeculativeConfig(
        method="scripted",
        num_speculative_tokens=N,
        rejection_sample_method=method,  # type: ignore[arg-type]
        draft_sample_method="probabilistic",
        guard=True,
    )
    greedy = [request for request in REQUESTS if not request.params.temperature]
    engine = tiny.make_engine(model, scripted.Sampler(), speculative, costs=costs(0.001))
    assert tiny.tokens_of(engine, greedy) == {request.request_id: plain[request.request_id] for request in greedy}


def test_what_is_not_verified_is_counted_as_trimmed(model: LlamaModel, truth: Truth) -> None:
    """Drafted = accepted + rejected + untested + trimmed, for a request, its class and the engine."""
    drafter = scripted.Mixed(truth, 0.6)
    engine = tiny.make_engine(model, drafter, N)
    whims = on_a_whim(engine, 2)
    results = tiny.run(engine, [replace(r, drafting=DraftParams(workload=f"{i % 2}")) for i, r in enumerate(REQUESTS)])
    counters = engine.stats.speculation
    assert counters.num_draft_tokens == sum(map(len, drafter.proposed))
    assert counters.num_trimmed_tokens == whims.num_cut > 0
    for total, name in ((counters.num_trimmed_tokens, "num_trimmed"), (counters.num_untested_tokens, "num_untested")):
        assert total == sum(getattr(result.stats, name) for result in results.values())
    by_class = engine.stats.workloads.values()
    assert sum(part.num_trimmed_tokens for part in by_class) == counters.num_trimmed_tokens
    assert all(part.broken_identities() == [] for part in by_class)


def test_a_count_that_does_not_add_up_is_counted(model: LlamaModel, truth: Truth, caplog: Any) -> None:
    engine = tiny.make_engine(model, scripted.Oracle(truth), N)
    for request in REQUESTS[:2]:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine._sequences["0"].counters.num_accepted_tokens += 1
    while engine.has_work:
        engine.step()
    assert engine.stats.num_breaches == 1
    assert "do not add up: drafted = accepted" in caplog.text


# ---- what it saves ----


def test_saved_seconds_are_what_others_would_have_taken(model: LlamaModel, truth: Truth) -> None:
    """A price of 1 ms a drafting step and 10 ms a plain one: a request gains 10 for each token beyond one a step."""
    engine = tiny.make_engine(model, scripted.Oracle(truth), N)
    on_a_whim(engine, 3)
    stats = tiny.run(engine, REQUESTS[3:4])["3"].stats
    assert stats is not None
    assert stats.saved_s is not None
    assert stats.saved_s == pytest.approx(0.01 * stats.num_accepted - 0.001 * stats.num_drafts)
    assert engine.stats.saved_s == pytest.approx(stats.saved_s)


def test_nothing_is_saved_where_nobody_measures(model: LlamaModel, truth: Truth) -> None:
    stats = tiny.run(tiny.make_engine(model, scripted.Oracle(truth), N), REQUESTS[:1])["0"].stats
    assert stats is not None
    assert stats.saved_s is None


def test_a_drafter_is_not_asked_where_drafts_do_not_pay(model: LlamaModel, truth: Truth) -> None:
    """But for a few trials; with the guard off it is asked in every round."""
    rounds = {}
    for guard in (True, False):
        drafter = scripted.Contrarian(truth)
        speculative = SpeculativeConfig(
            method="scripted", num_speculative_tokens=N, guard=guard, enable_adaptive_verification=True
        )
        engine = tiny.make_engine(model, drafter, speculative, costs=costs(0.2))
        tiny.run(engine, REQUESTS)
        rounds[guard] = drafter.num_rounds
    assert rounds[True] < 20 < 30 < rounds[False]


def test_a_pace_is_asked_once_for_each_place_in_order(model: LlamaModel, config: SpeculativeConfig) -> None:
    """Of drafters that ask at all; whom it stops gets no further draft."""
    engine = tiny.make_engine(model, speculative=config)
    whims, asked = on_a_whim(engine, 4), []

    def goes_on(place: int, slots: Sequence[int], top_probs: Sequence[float]) -> list[bool]:
        asked.append((place, tuple(slots)))
        return [slot % 2 == 0 for slot in slots]

    whims.goes_on = goes_on  # type: ignore[method-assign]
    assert engine.safe_drafter is not None
    propose = engine.safe_drafter.drafter.propose

    def checked(context: DraftContext) -> Proposal:
        asked.clear()
        proposal = propose(context)
        assert [place for place, _ in asked] == list(range(len(asked)))
        if asked:
            stopped = [len(c) for c, slot in zip(proposal.tokens, context.slots, strict=True) if slot % 2]
            assert all(length <= 1 for length in stopped)
        return proposal

    engine.safe_drafter.drafter.propose = checked  # type: ignore[method-assign]
    tiny.run(engine, REQUESTS)
