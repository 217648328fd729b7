"""Theorem 3: rolling back leaves nothing behind, in the target's cache and in a drafter's.

After any verdict a sequence's cache holds all its committed tokens but the last, and what the target says next is what
it says after reading the text afresh. A drafter that is the target itself agrees with it always, whatever was rejected,
preempted, shared or not drafted before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.drafters.draft_model import DraftModelDrafter
from outrider.drafting.base import DraftContext
from outrider.engine.engine import Engine
from outrider.models.attention import Batch
from outrider.models.llama import LlamaModel
from outrider.types import Proposal, Request
from tests.kit import scripted, tiny

REQUESTS = [
    tiny.make_request(f"{i}", tiny.random_prompt(i, length), seed=i, temperature=0.7 * (i % 2), max_tokens=40)
    for i, length in enumerate((1, 5, 15, 16, 17, 40))
]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(2)


def fresh_logits(model: LlamaModel, tokens: np.ndarray) -> torch.Tensor:
    """What the target says after a text, read in one pass into an empty cache."""
    num_blocks = -(-len(tokens) // 16)
    last = np.array([len(tokens) - 1])
    batch = Batch.pack(tokens, [(0, len(tokens))], [list(range(num_blocks))], last, 16, model.device)
    return model(batch, model.new_cache(num_blocks * 16)).logits[0]


def cached_logits(engine: Engine, sequence: Any) -> torch.Tensor:
    """What the target says after the anchor, read over the cache as it stands; the cache is put back."""
    last = sequence.num_tokens - 1
    blocks = sequence.blocks if sequence.num_tokens <= len(sequence.blocks) * 16 else [*sequence.blocks, 0]
    if blocks is not sequence.blocks:
        return torch.empty(0)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in engine.target.memory.cache]
    batch = Batch.pack(sequence.tokens[last:], [(last, 1)], [blocks], np.array([0]), 16, engine.model.device)
    logits = engine.model(batch, engine.target.memory.cache).logits[0]
    for layer, (keys, values) in zip(engine.target.memory.cache, kept, strict=True):
        layer.keys.copy_(keys)
        layer.values.copy_(values)
    return logits


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_after_any_verdict_the_cache_is_a_fresh_prefills(rate: float, model: LlamaModel) -> None:
    truth = scripted.Truth(model, REQUESTS)
    compared = 0

    def check(engine: Engine) -> None:
        nonlocal compared
        for sequence in engine.scheduler.running:
            assert sequence.num_output > 0
            assert sequence.num_computed == sequence.num_tokens - 1
            logits = cached_logits(engine, sequence)
            if len(logits):
                assert torch.equal(logits, fresh_logits(engine.model, sequence.tokens))
                compared += 1

    engine = tiny.make_engine(model, scripted.Mixed(truth, rate, seed=7), 5)
    tiny.run(engine, REQUESTS, each_step=check)
    assert compared > 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny(tmp_path_factory.mktemp("self"), 2)


class Spoiled:
    """The target as its own drafter, some of whose drafts are replaced by wrong ones; keeps account of which."""

    taps: tuple[int, ...] = ()

    def __init__(self, inner: DraftModelDrafter, rate: float) -> None:
        self.inner, self.rate, self.random = inner, rate, np.random.default_rng(3)
        self.whole: list[tuple[int, int]] = []
        self.begin, self.end = inner.begin, inner.end

    def propose(self, context: DraftContext) -> Proposal:
        chains = []
        for slot, chain in zip(context.slots, self.inner.propose(context).tokens, strict=True):
            assert len(chain) == context.budgets[context.slots.index(slot)]
            spoiled = [t if self.random.random() > self.rate else (t + 1) % tiny.VOCAB for t in chain]
            chains.append(tuple(spoiled))
            first_bad = next((i for i, (a, b) in enumerate(zip(chain, spoiled, strict=True)) if a != b), len(chain))
            self.whole.append((first_bad, len(chain)))
        return Proposal(tuple(chains))


def self_engine(model: LlamaModel, folder: Path, rate: float = 0.0, **settings: Any) -> Engine:
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    speculative |= settings.pop("speculative", {})
    engine = tiny.make_engine(model, speculative=speculative, **settings)
    inner = engine.drafter
    assert isinstance(inner, DraftModelDrafter)
    for layer in inner._cache:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    if rate:
        assert engine.safe_drafter is not None
        engine.safe_drafter.drafter = Spoiled(inner, rate)
    return engine


def greedy(lengths: Sequence[int], max_tokens: int = 40) -> list[Request]:
    return [
        tiny.make_request(f"{i}", tiny.random_prompt(50 + i, length), seed=i, max_tokens=max_tokens)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.9])
def test_drafting_with_the_target_itself_survives_rejections(rate: float, model: LlamaModel, folder: Path) -> None:
    requests = greedy((1, 6, 16, 31, 47))
    engine = self_engine(model, folder, rate)
    assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(model), requests)
    drafter = engine.drafter
    assert isinstance(drafter, Spoiled)
    # Exactly the drafts before the first spoiled one are accepted: the drafter's own cache was right in every round.
    assert engine.stats.speculation.num_accepted_tokens == sum(first for first, _ in drafter.whole)
    assert engine.stats.speculation.num_draft_tokens == sum(length for _, length in drafter.whole)


def all_accepted(engine: Engine) -> None:
    counters = engine.stats.speculation
    assert counters.num_draft_tokens > 0
    assert counters.num_accepted_tokens == counters.num_draft_tokens


def test_drafting_with_the_target_itself_survives_preemption(model: LlamaModel, folder: Path) -> None:
    requests = greedy((20, 30, 25, 10))
    for caching in (True, False):
        engine = self_engine(model, folder, kv_cache_tokens=128, enable_prefix_caching=caching)
        assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(model), requests)
        assert engine.scheduler.num_preemptions > 0
        all_accepted(engine)


def test_drafting_with_the_target_itself_survives_prefix_hits(model: LlamaModel, folder: Path) -> None:
    prefix = tiny.random_prompt(9, 48)
    engine = self_engine(model, folder)
    plain = tiny.make_engine(model, enable_prefix_caching=False)
    for tail in range(4):
        requests = [
            tiny.make_request(f"{tail}{i}", [*prefix, *tiny.random_prompt(tail * i, 1 + tail)], max_tokens=20)
            for i in range(3)
        ]
        assert tiny.tokens_of(engine, requests) == tiny.tokens_of(plain, requests)
    all_accepted(engine)


def test_a_prefix_that_was_filled_without_drafts_is_caught_up(model: LlamaModel, folder: Path) -> None:
    """The first request drafts nothing, so the drafter has not read the blocks that the second one shares."""
    prompt = tiny.random_prompt(9, 50)
    engine = self_engine(model, folder)
    tiny.run(engine, [tiny.make_request("first", prompt, max_tokens=1)])
    result = tiny.run(engine, [tiny.make_request("second", [*prompt, 3], max_tokens=20)])["second"]
    assert result.stats is not None
    assert result.stats.num_cached_tokens == 48
    all_accepted(engine)


def test_steps_without_drafts_leave_no_gap(model: LlamaModel, folder: Path) -> None:
    """N is 3 for one request, 0 for two or three, 2 for four and more: it goes 2, 0, 3 while the batch thins out."""
    schedule = [[1, 1, 3], [2, 3, 0], [4, 8, 2]]
    requests = [
        tiny.make_request(f"{i}", tiny.random_prompt(70 + i, 9 + i), seed=i, max_tokens=length)
        for i, length in enumerate((80, 14, 30, 9, 22))
    ]
    engine = self_engine(model, folder, speculative={"num_speculative_tokens_per_batch_size": schedule})
    seen: list[int] = []

    def watch(running: Engine) -> None:
        seen.append(running.stats.speculation.num_draft_tokens)

    assert (
        tiny.run(engine, requests, each_step=watch)["0"].tokens
        == tiny.tokens_of(tiny.make_engine(model), requests[:1])["0"]
    )
    grew = np.diff(seen) > 0
    assert "01" in "".join("1" if step else "0" for step in grew), "drafting must have stopped and come back"
    all_accepted(engine)


def test_a_step_without_drafts_asks_the_drafter_nothing(model: LlamaModel) -> None:
    requests = greedy((5, 6))
    silent = scripted.Oracle(scripted.Truth(model, requests))
    speculative = {
        "method": "scripted",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 8, 0]],
    }
    engine = tiny.make_engine(model, silent, speculative)
    tiny.run(engine, requests)
    assert silent.num_rounds == 0
    assert engine.stats.speculation.num_drafts == 0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_sampling_drafter_that_is_the_target_is_always_accepted(method: str, model: LlamaModel, folder: Path) -> None:
    """Where draft and target distributions are equal, the ratio is 1: anything less is a wrong cache or wrong rows."""
    requests = [
        tiny.make_request(f"{i}", tiny.random_prompt(i, 4 + i), seed=i, temperature=1.0, max_tokens=40)
        for i in range(4)
    ]
    more = {"rejection_sample_method": method, "draft_sample_method": "probabilistic"}
    engine = self_engine(model, folder, speculative=more)
    tiny.run(engine, requests)
    all_accepted(engine)


def test_a_coupled_sampling_drafter_that_is_the_target_is_always_accepted(model: LlamaModel, folder: Path) -> None:
    requests = [
        tiny.make_request(f"{i}", tiny.random_prompt(i, 4 + i), seed=i, temperature=1.3, top_k=9, max_tokens=40)
        for i in range(4)
    ]
    engine = self_engine(model, folder, speculative={"draft_sample_method": "probabilistic"})
    assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(model), requests)
    all_accepted(engine)


def test_fresh_engines_accept_the_same_number(model: LlamaModel, folder: Path) -> None:
    """Uninitialised memory would show as counts that differ from engine to engine."""
    request = greedy((13,), max_tokens=10)
    make: Callable[[], Engine] = lambda: self_engine(model, folder)  # noqa: E731
    counts = set()
    for _ in range(20):
        engine = make()
        tiny.run(engine, request)
        counts.add(engine.stats.speculation.num_accepted_tokens)
    assert counts == {7}
