"""Theorem 4: a request's text is its own affair. Neighbours, batch size, how its prompt is cut, preemption, shared
prefixes and what ran before change nothing, with speculation or without, greedy or seeded.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.engine import Engine
from outrider.models.llama import LlamaModel
from outrider.types import Request
from tests.kit import scripted, tiny
from tests.kit.scripted import Scripted, Truth

PREFIX = tiny.random_prompt(99, 40)
SPECULATIVE = (False, True)


def some_requests(num: int = 8, max_tokens: int = 30) -> list[Request]:
    """Half greedy, half sampled; half with a shared prefix; prompts from 1 token to 79."""
    return [
        tiny.make_request(
            f"{i}",
            [*(PREFIX if i % 4 > 1 else ()), *tiny.random_prompt(i, 1 + 5 * i)],
            seed=i,
            temperature=0.9 * (i % 2),
            max_tokens=max_tokens,
            frequency_penalty=0.3 * (i == 3),
        )
        for i in range(num)
    ]


REQUESTS = some_requests()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return tiny.tiny_model(4, request.param)


@pytest.fixture(scope="module")
def truth(model: LlamaModel) -> Truth:
    return Truth(model, REQUESTS)


@pytest.fixture(scope="module")
def alone(model: LlamaModel) -> dict[str, list[int]]:
    """Each request in an engine of its own, without drafts, its prompt in one piece, nothing shared."""
    return {
        r.request_id: tiny.tokens_of(tiny.make_engine(model, enable_prefix_caching=False), [r])[r.request_id]
        for r in REQUESTS
    }


def drafter_for(truth: Truth, speculative: bool) -> Scripted | None:
    return scripted.Mixed(truth, 0.75, seed=1) if speculative else None


def make(model: LlamaModel, truth: Truth, speculative: bool, **settings: Any) -> Engine:
    return tiny.make_engine(model, drafter_for(truth, speculative), 4 if speculative else None, **settings)


@pytest.mark.parametrize("speculative", SPECULATIVE)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_batch_and_prefix_caching(
    max_num_seqs: int, caching: bool, speculative: bool, model: LlamaModel, truth: Truth, alone: dict[str, list[int]]
) -> None:
    engine = make(model, truth, speculative, max_num_seqs=max_num_seqs, enable_prefix_caching=caching)
    for _ in range(2):  # the second time every prompt is known
        assert tiny.tokens_of(engine, REQUESTS) == alone
    results = tiny.run(engine, REQUESTS)
    cached = sum(result.stats.num_cached_tokens for result in results.values() if result.stats)
    assert (cached > 0) == caching


@pytest.mark.parametrize("speculative", SPECULATIVE)
@pytest.mark.parametrize("rows", [2, 3, 5, 16, 17, 64])
def test_prompt_chunks(
    rows: int, speculative: bool, model: LlamaModel, truth: Truth, alone: dict[str, list[int]]
) -> None:
    engine = make(model, truth, speculative, max_num_batched_tokens=rows, max_num_seqs=2)
    most = 0
    before = engine.runner.forward

    def forward(entries: Any, drafts: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(entry.num_rows + len(tokens) for entry, tokens in zip(entries, drafts, strict=True)))
        return before(entries, drafts)

    engine.runner.forward = forward  # type: ignore[method-assign]
    assert tiny.tokens_of(engine, REQUESTS) == alone
    assert 1 < most <= rows


@pytest.mark.parametrize("speculative", SPECULATIVE)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("tokens", [112, 144, 192])
def test_preemption(
    tokens: int, caching: bool, speculative: bool, model: LlamaModel, truth: Truth, alone: dict[str, list[int]]
) -> None:
    engine = make(model, truth, speculative, kv_cache_tokens=tokens, enable_prefix_caching=caching)
    assert tiny.tokens_of(engine, REQUESTS) == alone
    assert engine.scheduler.num_preemptions > 0


def test_long_answers_that_are_preempted_say_true_numbers(model: LlamaModel) -> None:
    """Blocks of its own output that a request finds again are no cached prompt."""
    requests = [tiny.make_request(f"{i}", tiny.random_prompt(i, 3), max_tokens=70) for i in range(3)]
    engine = tiny.make_engine(model, kv_cache_tokens=112)
    results = tiny.run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert [result.stats.num_cached_tokens for result in results.values() if result.stats] == [0, 0, 0]


@pytest.mark.parametrize("speculative", SPECULATIVE)
def test_arrivals_at_any_step(speculative: bool, model: LlamaModel, truth: Truth, alone: dict[str, list[int]]) -> None:
    """Requests come while others run, in an order that is drawn anew each time."""
    random = np.random.default_rng(5)
    for _ in range(6):
        engine = make(model, truth, speculative, kv_cache_tokens=160, max_num_batched_tokens=24)
        waiting = [REQUESTS[i] for i in random.permutation(len(REQUESTS))]
        texts: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
        while waiting or engine.has_work:
            if waiting and (random.random() < 0.3 or not engine.has_work):
                engine.add(waiting.pop())
            for output in engine.step():
                texts[output.request_id] += output.token_ids
        assert texts == alone


@pytest.mark.parametrize("speculative", SPECULATIVE)
def test_a_cancelled_neighbour_leaves_no_trace(
    speculative: bool, model: LlamaModel, truth: Truth, alone: dict[str, list[int]]
) -> None:
    """A request with the same prompt is dropped at every step in turn; what follows it is right."""
    for request, steps in itertools.product(REQUESTS[6:8], range(1, 9)):
        engine = make(model, truth, speculative, max_num_batched_tokens=20)
        engine.add(replace(request, request_id="dropped"))
        for _ in range(steps):
            engine.step()
        assert engine.abort("dropped") is not None
        assert tiny.tokens_of(engine, [request])[request.request_id] == alone[request.request_id]


def test_seeded_and_unseeded_requests_do_not_disturb_each_other(
    model: LlamaModel, truth: Truth, alone: dict[str, list[int]]
) -> None:
    """The façade draws a new seed where none was given: other seeds beside it change nothing for the seeded ones."""
    for other_seed in range(5):
        others = [
            tiny.make_request(f"other{i}", REQUESTS[i].prompt_ids, seed=1000 * other_seed + i + 77, temperature=1.0)
            for i in range(4)
        ]
        mixed = [request for pair in zip(others, REQUESTS[:4], strict=True) for request in pair]
        texts = tiny.tokens_of(make(model, truth, True), mixed)
        assert {name: texts[name] for name in ("0", "1", "2", "3")} == {n: alone[n] for n in ("0", "1", "2", "3")}


def test_different_seeds_and_choices_give_different_texts(model: LlamaModel) -> None:
    prompt = REQUESTS[1].prompt_ids
    requests = [
        tiny.make_request(f"{seed}-{choice}", prompt, seed=seed, choice=choice, temperature=1.0)
        for seed in range(20)
        for choice in range(3)
    ]
    texts = tiny.tokens_of(tiny.make_engine(model, kv_cache_tokens=8192), requests)
    assert len({tuple(text) for text in texts.values()}) > 55


def test_one_request_five_times(model: LlamaModel, truth: Truth, alone: dict[str, list[int]]) -> None:
    """Alone, again, among others, after preemption, after a cancelled twin: on one engine."""
    request = REQUESTS[7]
    engine = make(model, truth, True, kv_cache_tokens=144)
    seen = [tiny.tokens_of(engine, [request])["7"], tiny.tokens_of(engine, [request])["7"]]
    seen += [tiny.tokens_of(engine, REQUESTS)["7"], tiny.tokens_of(engine, REQUESTS[::-1])["7"]]
    assert engine.scheduler.num_preemptions > 0
    engine.add(replace(request, request_id="twin"))
    engine.step()
    engine.abort("twin")
    seen.append(tiny.tokens_of(engine, [request])["7"])
    assert seen == [alone["7"]] * 5
