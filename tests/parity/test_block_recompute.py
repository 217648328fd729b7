"""DFlash and DSpark as the engine runs them, cached and batched, against a recomputation of every round from nothing.

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
from tests.kit import block_checkpoints, scripted, threads, tiny
from tests.kit.block_checkpoints import Made
from tests.kit.block_reference import BlockReference
from tests.kit.overheard import Overheard, Round, requests_of, rounds_of, taps_of
from tests.kit.overheard import overheard as hear

SEED = 5
TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference's matrices are too small to share: threads would only wait for each other."""
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(SEED, **block_checkpoints.TARGET)


def overheard(model: LlamaModel, made: Made, folder: Path, script: scripted.Scripted, **settings: Any) -> Engine:
    return hear(model, made.save(folder) | settings.pop("speculative", {}), script, **settings)


def compare(model: LlamaModel, made: Made, rounds: Sequence[Round], *, sampled: bool = False) -> None:
    """Hold every round against the reference."""
    # The target's output matrix as it was made, before it was packed.
    head = tiny.tiny_tensors(SEED, model.config)["lm_head.weight"]
    reference = BlockReference(made.tensors, made.meaning, model.embedding, head)
    ids = reference.draft_ids()
    for item in rounds:
        taps = taps_of(model, item.history[:-1], made.meaning.taps)
        logits, confidence = reference.logits(taps, item.history[-1], item.chain)
        wide = torch.full((len(logits), tiny.VOCAB), -torch.inf, dtype=torch.float64)
        wide[:, ids] = logits
        chosen = wide.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        if sampled:
            probs = (wide / TEMPERATURE).softmax(1)
            for row, expected in zip(item.rows, probs, strict=True):
                dense = torch.zeros(tiny.VOCAB, dtype=torch.float64).index_put((row.ids,), row.probs.double())
                assert torch.allclose(dense, expected, atol=1e-4)
            assert bool(chosen.isfinite().all())
        else:
            assert bool((chosen >= wide.amax(1) - 1e-4).all()), item.history
        if confidence is None:
            assert item.confidence is None
        else:
            assert item.confidence == pytest.approx(confidence.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", block_checkpoints.VARIANTS)
def test_every_variant_equals_its_recomputation(name: str, model: LlamaModel, tmp_path: Path) -> None:
    """Few rows a step and little memory: prompts come in chunks, requests are preempted, some steps do not draft."""
    requests = requests_of((1, 7, 16, 33, 40))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=1)
    made = block_checkpoints.VARIANTS[name]()
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 2, 0], [3, 3, 4], [4, 8, 6]]}
    engine = overheard(
        model, made, tmp_path, script, speculative=schedule, max_num_batched_tokens=40, kv_cache_tokens=160
    )
    rounds = rounds_of(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert len(rounds) > 25
    assert {len(item.chain) for item in rounds} >= {1, 4, 6}
    compare(model, made, rounds)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["dflash mixed", "dspark rnn"])
def test_whatever_is_accepted(name: str, rate: float, model: LlamaModel, tmp_path: Path) -> None:
    requests = requests_of((3, 18, 31))
    script = scripted.Mixed(scripted.Truth(model, requests), rate, seed=2)
    made = block_checkpoints.VARIANTS[name]()
    rounds = rounds_of(overheard(model, made, tmp_path, script), requests)
    assert len(rounds) > 10
    compare(model, made, rounds)


@pytest.mark.parametrize("name", ["dflash zlab", "dspark speculators"])
def test_prefixes_filled_by_others_or_not_filled_yet(name: str, model: LlamaModel, tmp_path: Path) -> None:
    """The first request leaves a prompt that the drafter never read, the second reads it, the others find it read."""
    prefix = tiny.random_prompt(9, 50)
    requests = [tiny.make_request("first", prefix, max_tokens=1)]
    requests += [tiny.make_request(f"{i}", [*prefix, i], seed=i, max_tokens=14) for i in range(3)]
    script = scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=3)
    made = block_checkpoints.VARIANTS[name]()
    engine = overheard(model, made, tmp_path, script)
    for part in (requests[:1], requests[1:2], requests[2:]):
        compare(model, made, rounds_of(engine, part))
    assert isinstance(engine.drafter, Overheard)
    assert len(engine.drafter.rounds) > 6


@pytest.mark.parametrize(
    "name", ["dflash other rope", "dflash speculators", "dspark gated", "dspark speculators", "dspark topk"]
)
@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_what_is_drawn_is_drawn_from_the_recomputed_distribution(
    name: str, verification: str, model: LlamaModel, tmp_path: Path
) -> None:
    requests = requests_of((5, 17, 26), temperature=TEMPERATURE)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=4)
    more = {"draft_sample_method": "probabilistic", "rejection_sample_method": verification}
    made = block_checkpoints.VARIANTS[name]()
    rounds = rounds_of(overheard(model, made, tmp_path, script, speculative=more), requests)
    assert len(rounds) > 10
    compare(model, made, rounds, sampled=True)


@pytest.mark.parametrize("name", ["dflash sliding both ways", "dspark fill-in"])
def test_every_length_is_a_block_of_its_own(name: str, model: LlamaModel, tmp_path: Path) -> None:
    requests = requests_of((4, 19))
    truth, made = scripted.Truth(model, requests), block_checkpoints.VARIANTS[name]()
    for num_tokens in (1, 2, 3, 14):
        script = scripted.Mixed(truth, 0.5, seed=num_tokens)
        engine = overheard(model, made, tmp_path, script, speculative={"num_speculative_tokens": num_tokens})
        compare(model, made, rounds_of(engine, requests))
