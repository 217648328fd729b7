"""Costs at start-up: measured once, kept under a name that says for what, and nothing of it stays in the cache."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext
from outrider.engine import calibration
from outrider.engine.adaptive import AdaptiveLengths
from outrider.engine.costs import StepCosts
from outrider.engine.engine import Engine
from outrider.models.llama import LlamaModel
from outrider.types import Proposal
from tests.kit import books, scripted, tiny

N = 4


class Constant(scripted.Scripted):
    """Drafts token 1, as far as it may."""

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        return (1,) * context.budgets[index]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(3)


def config_of(**changes: Any) -> SpeculativeConfig:
    settings = {"method": "scripted", "num_speculative_tokens": N, "guard": True}
    return SpeculativeConfig(**(settings | changes))


def start(target: LlamaModel, drafter: scripted.Scripted | None = None, **changes: Any) -> Engine:
    engine_settings = {key: changes.pop(key) for key in ("max_num_seqs", "kv_cache_tokens") if key in changes}
    return tiny.make_engine(target, drafter or Constant(), config_of(**changes), **engine_settings)


def costs_of(engine: Engine) -> StepCosts:
    assert isinstance(engine.lengths, AdaptiveLengths)
    return engine.lengths.costs


def test_costs_are_measured_once_and_kept(folder: Path, model: LlamaModel) -> None:
    first, drafter = start(model), Constant()
    again = start(model, drafter)
    assert drafter.num_rounds == 1, "to warm it up"
    assert len(list(folder.iterdir())) == 1
    assert costs_of(first).verify_from(1, 40) == costs_of(again).verify_from(1, 40)
    assert costs_of(first).draft(3) == costs_of(again).draft(3)


def test_what_was_measured_is_positive_and_never_falls(folder: Path, model: LlamaModel) -> None:
    costs = costs_of(start(model))
    rows = costs.verify_from(1, 8 * (N + 1))
    assert rows[0] > 0
    assert (np.diff(rows) >= 0).all()
    drafted = costs.draft(2)
    assert len(drafted) == N + 1
    assert (np.diff(drafted) >= 0).all()
    assert costs.fill_s >= 0


def test_each_setup_has_a_file_of_its_own(folder: Path, model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another target, drafter, length, dtype, batch, number of threads or machine."""

    def count() -> int:
        return len(list(folder.iterdir()))

    start(model)
    for number, changes in enumerate(
        [{"num_speculative_tokens": 3}, {"model": "other"}, {"draft_sample_method": "probabilistic"}], start=2
    ):
        start(model, **changes)
        assert count() == number
    start(tiny.tiny_model(4))
    start(model, max_num_seqs=4)
    assert count() == 6
    monkeypatch.setattr(calibration, "_machine", lambda: "another")
    start(model)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(77))
    start(model)
    assert count() == 8
    for changes in ({}, {"rejection_sample_method": "block"}, {"guard": False, "enable_adaptive_verification": True}):
        start(model, **changes)
    assert count() == 8, "what makes no difference to a step's cost shares a file"


def test_a_damaged_file_is_measured_again(folder: Path, model: LlamaModel) -> None:
    start(model)
    (path,) = folder.iterdir()
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    drafter = Constant()
    start(model, drafter)
    assert drafter.num_rounds > 1
    assert StepCosts.load(path) is not None


def test_blocks_slots_and_drafter_are_left_as_they_were(folder: Path, model: LlamaModel) -> None:
    request = tiny.make_request("a", tiny.random_prompt(1, 30), max_tokens=30)
    expected = tiny.tokens_of(tiny.make_engine(model), [request])
    for cache in (16, 32, 64, 2048):
        drafter = Constant()
        engine = start(model, drafter, kv_cache_tokens=cache)
        books.check_at_rest(engine)
        assert drafter.live == set()
        if cache >= 64:
            assert tiny.tokens_of(engine, [request]) == expected
        for path in folder.iterdir():
            path.unlink()


def test_nothing_is_measured_where_lengths_are_fixed(folder: Path, model: LlamaModel) -> None:
    drafter = Constant()
    start(model, drafter, guard=None)
    assert drafter.num_rounds == 0
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_more(
    folder: Path, model: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be", encoding="utf-8")
    engine = start(model)
    assert "step costs cannot be kept in" in caplog.text
    assert costs_of(engine).verify(1) > 0


def test_a_drafter_that_fails_is_heard_of_when_it_is_used(
    folder: Path, model: LlamaModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Constant):
        def propose(self, context: DraftContext) -> Proposal:
            raise RuntimeError(books.ON_PURPOSE)

    engine = start(model, Failing())
    assert "drafter's cost cannot be measured" in caplog.text
    books.check_at_rest(engine)
    request = tiny.make_request("a", tiny.random_prompt(1, 10), max_tokens=40)
    assert tiny.tokens_of(engine, [request]) == tiny.tokens_of(tiny.make_engine(model), [request])


def test_measuring_is_bounded_in_time(folder: Path, model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target and a drafter that take long are measured at a few places; the tables reach as far all the same."""
    monkeypatch.setattr(calibration, "_VERIFY_S", 0.1)
    monkeypatch.setattr(calibration, "_DRAFT_S", 0.1)
    num_forwards = 0

    class Slow(Constant):
        def propose(self, context: DraftContext) -> Proposal:
            time.sleep(0.06)
            return super().propose(context)

    forward = calibration._forward

    def slow(*args: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1
        time.sleep(0.06)
        forward(*args)

    monkeypatch.setattr(calibration, "_forward", slow)
    drafter = Slow()
    costs = costs_of(start(model, drafter))
    assert num_forwards <= 6
    assert drafter.num_rounds <= 9
    assert costs.verify(32) > costs.verify(4) > 0.05
    assert costs.draft(8)[N] > 0.05


def test_a_machine_that_slows_down_meanwhile_makes_no_place_dearer_than_another(
    folder: Path, model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward takes as long as any other; for a third of the measuring, all take twice as long."""
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    def forward(*args: Any) -> None:
        nonlocal clock
        clock += 0.02 if 0.15 < clock < 0.33 else 0.01

    monkeypatch.setattr(calibration, "_forward", forward)
    costs = costs_of(start(model))
    assert clock > 0.4, "all of it is measured"
    assert costs.verify(32) == pytest.approx(costs.verify(1))


def test_costs_can_be_given(folder: Path, model: LlamaModel) -> None:
    given, drafter = StepCosts([1, 8], [1.0, 2.0], [1], [[0.1] * N]), Constant()
    engine = tiny.make_engine(model, drafter, config_of(), costs=given)
    assert costs_of(engine) is given
    assert drafter.num_rounds == 0
    assert replace(config_of(), guard=None).is_adaptive is False
