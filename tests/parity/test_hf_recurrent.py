"""Targets whose layers keep a state: whatever part of the drafts is accepted, the state goes on from exactly there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import ShapeError
from outrider.models.recurrent import StateCache
from tests.kit import hf, scripted, threads, tiny
from tests.kit.hf import RECURRENT, Reading, Target

TEXT = tiny.random_prompt(1, 40)
LENGTHS = range(1, 9)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", params=RECURRENT)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return hf.make(request.param, tmp_path_factory.mktemp("hf"))


def states_of(reading: Reading) -> list[dict[int, dict[str, Tensor]]]:
    """Of the one text's layers with a state: by the number of tokens seen, the state's tensors by name."""
    layers = [layer for layer in reading.cache if isinstance(layer, StateCache)]
    return [{n: tensors(state) for n, state in kept.items()} for layer in layers for kept in layer._states.values()]


def tensors(state: Any) -> dict[str, Tensor]:
    tables = {name: table for name, table in vars(state).items() if isinstance(table, dict)}
    return {f"{n}.{k}": t.clone() for n, table in tables.items() for k, t in table.items() if isinstance(t, Tensor)}


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for rounding, which depends on how many rows a product has."""
    return torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_state_after_a_verdict_is_that_of_the_accepted_rows(target: Target, num_tokens: int) -> None:
    """N drafts are verified and each number of them accepted: states are those of a text that never saw the others."""
    for accepted in range(num_tokens + 1):
        reading, plain = Reading(target.model), Reading(target.model)
        for each in (reading, plain):
            each.read({0: (0, TEXT[:9])})
        true = TEXT[9 : 10 + accepted]
        drafted = [*true, *((token + 1) % tiny.VOCAB for token in TEXT[10 + accepted : 10 + num_tokens])]
        said = reading.read({0: (9, drafted)}).logits
        assert [sorted(kept) for kept in states_of(reading)] == [list(range(10, 11 + num_tokens))] * 3
        expected = plain.read({0: (9, true)}).logits
        assert near(said[: len(true)], expected)
        for ours, theirs in zip(states_of(reading), states_of(plain), strict=True):
            kept, wanted = ours[10 + accepted], theirs[10 + accepted]
            assert kept.keys() == wanted.keys() and len(kept) > 1
            assert all(near(kept[name], wanted[name]) for name in kept)
            others = [state for length, state in ours.items() if length != 10 + accepted]
            assert not any(near(state[name], wanted[name]) for state in others for name in state)
        # The next forward begins there.
        after = {0: (10 + accepted, TEXT[10 + accepted : 13 + accepted])}
        assert near(reading.read(after).logits, plain.read(after).logits)


def test_a_place_that_no_state_was_kept_of_is_refused(target: Target) -> None:
    reading = Reading(target.model)
    reading.read({0: (0, TEXT[:9])})
    with pytest.raises(ShapeError, match="goes on at token 20"):
        reading.read({0: (20, TEXT[20:22])})


def test_requests_that_start_again_say_the_same(target: Target) -> None:
    """Too few blocks for all: whoever gives way begins anew, and has no state left of the time before."""
    model = target.model
    requests = [tiny.make_request(f"{n}", tiny.random_prompt(n, n), max_tokens=16) for n in (14, 30, 46)]
    truth = scripted.Truth(model, requests, num_extra=8)
    expected = tiny.tokens_of(tiny.make_engine(model), requests)
    for num_tokens in (1, 3, 8):
        engine = tiny.make_engine(model, scripted.Mixed(truth, 0.7, seed=num_tokens), num_tokens, kv_cache_tokens=96)
        assert tiny.tokens_of(engine, requests) == expected
        assert engine.scheduler.num_preemptions > 0
        counters = engine.stats.speculation
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_no_prefix_is_shared(target: Target) -> None:
    """The same prompt again and again, of more than two blocks: every one of them is computed."""
    model, prompt = target.model, tiny.random_prompt(8, 40)
    engine = tiny.make_engine(model)
    for name in ("first", "second"):
        requests = [tiny.make_request(f"{name} {i}", prompt, max_tokens=6) for i in range(2)]
        results = tiny.run(engine, requests)
        assert len({tuple(result.tokens) for result in results.values()}) == 1
        assert [result.stats and result.stats.num_cached_tokens for result in results.values()] == [0, 0]
    own = tiny.make_engine(tiny.tiny_model())
    tiny.run(own, [tiny.make_request("first", prompt)])
    again = tiny.run(own, [tiny.make_request("second", prompt)])["second"].stats
    assert again is not None and again.num_cached_tokens > 0
