"""EAGLE-3 as the engine runs it, cached and batched, against a recomputation of every round from nothing.

What is verified follows a script, so that none, some and all drafts are accepted; what the drafter itself proposed is
kept and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.models.llama import LlamaModel
from tests.kit import eagle3, scripted, threads, tiny
from tests.kit.eagle3 import Made
from tests.kit.eagle3_reference import Eagle3Reference
from tests.kit.overheard import Overheard, Round, overheard, requests_of, rounds_of, taps_of

SEED = 5
TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference's matrices are too small to share: threads would only wait for each other."""
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(SEED, **eagle3.TARGET)


def hear(model: LlamaModel, made: Made, folder: Path, script: scripted.Scripted, **settings: Any) -> Engine:
    return overheard(model, made.save(folder) | settings.pop("speculative", {}), script, **settings)


def compare(model: LlamaModel, made: Made, rounds: Sequence[Round], *, sampled: bool = False) -> None:
    """Hold every round against the reference."""
    # The target's matrices as they were made, before they were packed.
    tensors = tiny.tiny_tensors(SEED, model.config)
    shared = [tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")]
    reference = Eagle3Reference(made.tensors, made.meaning, *shared)
    for item in rounds:
        taps = taps_of(model, item.history[:-1], made.meaning.taps)
        logits = reference.logits(taps, item.history, item.chain)
        chosen = logits.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        if sampled:
            probs = (logits / TEMPERATURE).softmax(1)
            for row, expected in zip(item.rows, probs, strict=True):
                dense = torch.zeros(tiny.VOCAB, dtype=torch.float64).index_put((row.ids,), row.probs.double())
                assert torch.allclose(dense, expected, atol=1e-4)
            assert bool(chosen.isfinite().all())
        else:
            assert bool((chosen >= logits.amax(1) - 1e-4).all()), item.history


@pytest.mark.parametrize("name", eagle3.VARIANTS)
def test_every_variant_equals_its_recomputation(name: str, model: LlamaModel, tmp_path: Path) -> None:
    """Few rows a step and little memory: prompts come in chunks, requests are preempted, some steps do not draft."""
    requests = requests_of((1, 7, 16, 33, 40))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=1)
    made = eagle3.VARIANTS[name]()
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 2, 0], [3, 3, 4], [4, 8, 6]]}
    engine = hear(model, made, tmp_path, script, speculative=schedule, max_num_batched_tokens=40, kv_cache_tokens=160)
    rounds = rounds_of(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert len(rounds) > 25
    assert {len(item.chain) for item in rounds} >= {1, 4, 6}
    compare(model, made, rounds)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["flat normed", "3.1", "two layers"])
def test_whatever_is_accepted(name: str, rate: float, model: LlamaModel, tmp_path: Path) -> None:
    requests = requests_of((3, 18, 31))
    script = scripted.Mixed(scripted.Truth(model, requests), rate, seed=2)
    made = eagle3.VARIANTS[name]()
    rounds = rounds_of(hear(model, made, tmp_path, script), requests)
    assert len(rounds) > 10
    compare(model, made, rounds)


@pytest.mark.parametrize("length", [48, 50])
@pytest.mark.parametrize("name", ["flat", "sliding", "two layers"])
def test_prefixes_filled_by_others_or_not_filled_yet(name: str, length: int, model: LlamaModel, tmp_path: Path) -> None:
    """The first request leaves a prompt that the drafter never read, the second reads it, the others find it read.

    A prefix of whole blocks goes on differently in the very next token, which its last row reads.
    """
    prefix = tiny.random_prompt(9, length)
    requests = [tiny.make_request("first", prefix, max_tokens=1)]
    requests += [tiny.make_request(f"{i}", [*prefix, i], seed=i, max_tokens=14) for i in range(3)]
    requests += [tiny.make_request(f"{i}", [*prefix, i, i], seed=i, max_tokens=14) for i in range(3, 6)]
    script = scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=3)
    made = eagle3.VARIANTS[name]()
    engine = hear(model, made, tmp_path, script)
    for part in (requests[:1], requests[1:2], requests[2:]):
        compare(model, made, rounds_of(engine, part))
    assert isinstance(engine.drafter, Overheard)
    assert len(engine.drafter.rounds) > 15


@pytest.mark.parametrize("name", ["flat", "3.1", "other rope"])
@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_what_is_drawn_is_drawn_from_the_recomputed_distribution(
    name: str, verification: str, model: LlamaModel, tmp_path: Path
) -> None:
    requests = requests_of((5, 17, 26), temperature=TEMPERATURE)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=4)
    schedule = [[1, 2, 6], [3, 8, 3]]
    more = {"draft_sample_method": "probabilistic", "rejection_sample_method": verification}
    made = eagle3.VARIANTS[name]()
    speculative = more | {"num_speculative_tokens_per_batch_size": schedule}
    rounds = rounds_of(hear(model, made, tmp_path, script, speculative=speculative), requests)
    assert len(rounds) > 10
    compare(model, made, rounds, sampled=True)


def test_a_longer_proposal_begins_as_a_shorter_one(model: LlamaModel, tmp_path: Path) -> None:
    requests = requests_of((4, 19))
    truth, made = scripted.Truth(model, requests), eagle3.VARIANTS["3.1"]()
    said: dict[tuple[int, ...], tuple[int, ...]] = {}
    shared = 0
    for num_tokens in (14, 3, 2, 1):
        script = scripted.Mixed(truth, 0.5, seed=6)
        engine = hear(model, made, tmp_path, script, speculative={"num_speculative_tokens": num_tokens})
        for item in rounds_of(engine, requests):
            longer = said.setdefault(item.history, item.chain)
            shared += longer != item.chain
            assert longer[: len(item.chain)] == item.chain[: len(longer)]
    assert shared > 10


def test_a_prompt_longer_than_what_is_combined_at_once(
    model: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafting.autoregressive._TAP_ROWS", 16)
    requests = requests_of((50, 77))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=7)
    made = eagle3.VARIANTS["3.1"]()
    compare(model, made, rounds_of(hear(model, made, tmp_path, script), requests))
