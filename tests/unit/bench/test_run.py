"""The benchmark's loop: no more requests at a time than it says, however large the groups of prompts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.run import Bench, BenchPlan, in_groups
from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.evaluate.conversation import Item
from outrider.llm import LLM
from outrider.types import SamplingParams, StepOutput
from tests.kit import talker, threads


def test_as_many_requests_run_at_a_time_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    step = Engine.step

    def counted(engine: Engine) -> list[StepOutput]:
        outputs = step(engine)
        running.append(len(engine.scheduler.running))
        return outputs

    monkeypatch.setattr(Engine, "step", counted)
    with threads.one_thread():
        plain = LLM(str(talker.save_talker(tmp_path / "target")), kv_cache_tokens=1024, enable_prefix_caching=False)
        items = [Item(index, 0, (index + 2, 3, 4)) for index in range(16)]
        plan = BenchPlan(params=SamplingParams(temperature=0, max_tokens=6), concurrency=2, repeats=1)
        bench = Bench(plain, [SpeculativeConfig(method="ngram", num_speculative_tokens=2)], items, plan)
        bench.run(lambda *_: None)
    assert max(map(len, in_groups(16, 2))) == 4, "else there is nothing to see"
    assert max(running) == 2 and bench.is_complete and bench.lossless(1).verdict == "same"
