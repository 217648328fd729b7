"""Gemma targets in the engine: text with drafts is text without them, for every length of proposals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.models.gemma import GemmaModel
from outrider.types import Request
from tests.kit import scripted, tiny
from tests.kit.gemma import gemma_model

NAMES = ("gemma3", "gemma4, keys as values", "gemma4, small")
PROMPTS = [tiny.random_prompt(seed, length) for seed, length in enumerate((1, 7, 16, 19, 45))]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def requests(**params: Any) -> list[Request]:
    return [tiny.make_request(f"{i}", prompt, seed=i, max_tokens=40, **params) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return gemma_model(request.param)


@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_greedy_text_is_the_targets_own(model: Any, num_tokens: int, rate: float) -> None:
    """Windows of 20 tokens are crossed many times, with drafts taken back on either side."""
    plain = tiny.tokens_of(tiny.make_engine(model), requests())
    drafter = scripted.Mixed(scripted.Truth(model, requests()), rate)
    engine = tiny.make_engine(model, drafter, num_tokens)
    assert tiny.tokens_of(engine, requests()) == plain
    assert engine.stats.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_drafts_from_the_text_itself_change_nothing(model: Any, num_tokens: int, temperature: float) -> None:
    plain = tiny.tokens_of(tiny.make_engine(model), requests(temperature=temperature))
    engine = tiny.make_engine(model, None, NGRAM | {"num_speculative_tokens": num_tokens})
    assert tiny.tokens_of(engine, requests(temperature=temperature)) == plain
    assert engine.stats.speculation.num_draft_tokens > 0


def test_small_steps_shared_prefixes_and_preemption_change_nothing(model: Any) -> None:
    wanted = tiny.tokens_of(tiny.make_engine(model), requests())
    drafter = scripted.Mixed(scripted.Truth(model, requests()), 0.8)
    tight = tiny.make_engine(model, drafter, 4, max_num_batched_tokens=16, kv_cache_tokens=160)
    assert tiny.tokens_of(tight, requests()) == wanted
    assert tiny.tokens_of(tight, requests()) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_a_row_does_not_see_its_neighbours(name: str) -> None:
    from outrider.native import library

    if library() is None:
        pytest.skip("no C kernels on this machine")
    model: GemmaModel | Any = gemma_model(name, dtype=torch.bfloat16)
    plain = tiny.tokens_of(tiny.make_engine(model), requests())
    engine = tiny.make_engine(model, scripted.Mixed(scripted.Truth(model, requests()), 0.8), 5)
    assert tiny.tokens_of(engine, requests()) == plain
