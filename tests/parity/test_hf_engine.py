"""Greedy text through the engine is the target's own for every family that transformers runs, and every N."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import hf, scripted, threads, tiny
from tests.kit.hf import CONFIGS, Target


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return hf.make(request.param, tmp_path_factory.mktemp("hf"))


def test_drafts_change_nothing(target: Target) -> None:
    """Some drafts right, some wrong; prompts in chunks; for one N too few blocks, so that a request starts again."""
    model = target.model
    lengths = (14, 30, 46)
    requests = [tiny.make_request(f"{n}", tiny.random_prompt(n, n), max_tokens=12) for n in lengths]
    truth = scripted.Truth(model, requests, num_extra=8)
    expected = tiny.tokens_of(tiny.make_engine(model, max_num_batched_tokens=32), requests)
    for num_tokens in range(1, 9):
        script = scripted.Mixed(truth, 0.7, seed=num_tokens)
        tight = {"kv_cache_tokens": 96} if num_tokens == 4 else {"max_num_batched_tokens": 32}
        engine = tiny.make_engine(model, script, num_tokens, **tight)
        assert tiny.tokens_of(engine, requests) == expected, num_tokens
        counters = engine.stats.speculation
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert (engine.scheduler.num_preemptions > 0) == (num_tokens == 4)


def test_an_own_method_drafts_for_it(target: Target) -> None:
    requests = [tiny.make_request("long", tiny.random_prompt(3, 120), max_tokens=12)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = tiny.make_engine(target.model, speculative=ngram)
    assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(target.model), requests)
    assert engine.stats.speculation.num_draft_tokens > 0
