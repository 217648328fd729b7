"""Targets that transformers runs for us, against its own whole forward on the same files, however the text comes in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.hf import HfModel
from tests.kit import hf, threads, tiny
from tests.kit.hf import CONFIGS, RECURRENT, Reading, Target

TEXT, OTHER = tiny.random_prompt(1, 75), tiny.random_prompt(2, 51)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return hf.make(request.param, tmp_path_factory.mktemp("hf"))


def said(target: Target, ids: tuple[int, ...], **more: Any) -> Any:
    with torch.no_grad():
        return target.reference(torch.tensor([ids]), **more)


def near(target: Target, got: Tensor, wanted: Tensor) -> bool:
    # A state that is brought forward row by row rounds otherwise than one that takes 64 rows at once.
    return torch.allclose(got, wanted, atol=2e-4 if target.name in RECURRENT else 5e-5, rtol=1e-4)


def test_logits_and_taps_are_those_of_transformers(target: Target) -> None:
    expected = said(target, TEXT, output_hidden_states=True)
    layers = target.model.config.num_layers
    forward = Reading(target.model).read({0: (0, TEXT)}, taps=range(layers + 1))
    assert forward.logits.dtype == torch.float32
    assert near(target, forward.logits, expected.logits[0])
    for tap, state in zip(forward.taps[:layers], expected.hidden_states, strict=False):
        assert near(target, tap, state[0])
    # What they give after the last layer is normed; ours is not.
    assert near(target, target.model.norm(forward.taps[layers].clone()), expected.hidden_states[-1][0])


@pytest.mark.parametrize("size", [1, 7, 33])
def test_chunks_and_drafts_that_are_taken_back_change_nothing(target: Target, size: int) -> None:
    """Each chunk comes with wrong tokens behind it, which the next one overwrites."""
    text = TEXT[:24] if size == 1 else TEXT
    expected = said(target, text).logits[0]
    reading = Reading(target.model)
    for first in range(0, len(text), size):
        part = text[first : first + size]
        forward = reading.read({0: (first, [*part, *tiny.random_prompt(first, 9)])})
        assert near(target, forward.logits[: len(part)], expected[first : first + len(part)])


def test_two_texts_in_one_forward_do_not_mix(target: Target) -> None:
    reading = Reading(target.model, num_texts=2)
    reading.read({0: (0, TEXT[:40])})
    forward = reading.read({1: (0, OTHER), 0: (40, TEXT[40:])})
    assert near(target, forward.logits[: len(OTHER)], said(target, OTHER).logits[0])
    assert near(target, forward.logits[len(OTHER) :], said(target, TEXT).logits[0, 40:])


def test_what_the_cache_holds(target: Target) -> None:
    model = target.model
    recurrent = target.name in RECURRENT
    assert model.shares_prefixes is not recurrent
    cache = model.new_cache(32)
    reading = Reading(model)
    reading.read({0: (0, TEXT[:20])})
    kept = sum({id(layer): layer.num_bytes for layer in cache}.values())
    assert kept == 32 * model.bytes_per_token()
    assert any(layer.num_bytes for layer in reading.cache)


def test_layers_that_share_keys_have_one_entry(tmp_path: Path) -> None:
    model = hf.make("gemma4, small", tmp_path).model
    cache = model.new_cache(32)
    assert [next(i for i, other in enumerate(cache) if other is entry) for entry in cache] == [0, 1, 0, 1]
    assert (model.last_layer_of("sliding_attention"), model.last_layer_of("full_attention")) == (0, 1)


def test_half_precision_is_near(tmp_path: Path) -> None:
    """bfloat16 weights through the kernels; float32 logits, not rounded ones."""
    made = hf.make("qwen3_moe", tmp_path)
    model = hf.load(tmp_path, torch.bfloat16)
    logits = Reading(model).read({0: (0, TEXT)}).logits
    assert model.embedding.dtype == torch.bfloat16
    assert bool((logits != logits.bfloat16().float()).any())
    assert float((logits - said(made, TEXT).logits[0]).abs().median()) < 0.05


def test_a_state_of_a_freed_block_is_dropped(tmp_path: Path) -> None:
    model: HfModel = hf.make("qwen3_5", tmp_path).model
    engine = tiny.make_engine(model)
    requests = [tiny.make_request(f"{i}", tiny.random_prompt(i, 20), max_tokens=3) for i in range(4)]
    seen = []
    tiny.run(engine, requests, each_step=lambda e: seen.append(sum(x.num_bytes for x in e.runner.memory.cache[:3])))
    assert max(seen) > 0
    assert seen[-1] == 0
