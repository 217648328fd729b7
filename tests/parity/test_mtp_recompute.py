"""Prediction modules as the engine runs them, cached and batched, against a recomputation of every round from nothing.

What is verified follows a script, so that none, some and all drafts are accepted; what the module itself proposed is
kept and compared. The recomputation has a target of its own, so nothing but the ids is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.models.llama import LlamaModel
from tests.kit import mtp, scripted, threads, tiny
from tests.kit.mtp import MIMO, QWEN, VARIANTS, Made, Meaning
from tests.kit.mtp_reference import MtpReference
from tests.kit.overheard import Overheard, Round, overheard, requests_of, rounds_of, spoil_unused

TEMPERATURE = 0.8
BOTH = ("mimo", "qwen")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference's matrices are too small to share: threads would only wait for each other."""
    with threads.one_thread():
        yield


def hear(model: LlamaModel, script: scripted.Scripted, **settings: Any) -> Engine:
    return overheard(model, {"method": "mtp"} | settings.pop("speculative", {}), script, **settings)


def compare(made: Made, rounds: Sequence[Round], *, sampled: bool = False) -> None:
    """Hold every round against the reference."""
    reference = MtpReference(made.target, made.module, made.meaning)
    for item in rounds:
        logits = reference.logits(item.history, item.chain)
        chosen = logits.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        if sampled:
            probs = (logits / TEMPERATURE).softmax(1)
            for row, expected in zip(item.rows, probs, strict=True):
                dense = torch.zeros(tiny.VOCAB, dtype=torch.float64).index_put((row.ids,), row.probs.double())
                assert torch.allclose(dense, expected, atol=1e-4)
        else:
            assert bool((chosen >= logits.amax(1) - 1e-4).all()), item.history


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_its_recomputation(name: str, tmp_path: Path) -> None:
    """Few rows a step and little memory: prompts come in chunks, requests are preempted, some steps do not draft."""
    made = VARIANTS[name]()
    model, requests = made.load(tmp_path), requests_of((1, 7, 16, 33, 40))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=1)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 2, 0], [3, 3, 4], [4, 8, 6]]}
    engine = hear(model, script, speculative=schedule, max_num_batched_tokens=40, kv_cache_tokens=160)
    rounds = rounds_of(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert len(rounds) > 25
    assert {len(item.chain) for item in rounds} >= {1, 4, 6}
    compare(made, rounds)


@pytest.mark.parametrize("change", ["state_first", "after_norm", "blind_start"])
@pytest.mark.parametrize("name", BOTH)
def test_the_recomputation_would_see_another_fusion(name: str, change: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.load(tmp_path), requests_of((2, 9))
    rounds = rounds_of(hear(model, scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=8)), requests)
    compare(made, rounds)
    made.meaning = replace(made.meaning, **{change: not getattr(made.meaning, change)})
    with pytest.raises(AssertionError):
        compare(made, rounds)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", BOTH)
def test_whatever_is_accepted(name: str, rate: float, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.load(tmp_path), requests_of((3, 18, 31))
    rounds = rounds_of(hear(model, scripted.Mixed(scripted.Truth(model, requests), rate, seed=2)), requests)
    assert len(rounds) > 10
    compare(made, rounds)


@pytest.mark.parametrize("length", [48, 50])
@pytest.mark.parametrize("name", [*BOTH, "sliding"])
def test_prefixes_filled_by_others_or_not_filled_yet(name: str, length: int, tmp_path: Path) -> None:
    """The first request leaves a prompt that the drafter never read, the second reads it, the others find it read.

    A prefix of whole blocks goes on differently in the very next token, which its last row reads.
    """
    made = VARIANTS[name]()
    model, prefix = made.load(tmp_path), tiny.random_prompt(9, length)
    requests = [tiny.make_request("first", prefix, max_tokens=1)]
    requests += [tiny.make_request(f"{i}", [*prefix, i], seed=i, max_tokens=14) for i in range(3)]
    requests += [tiny.make_request(f"{i}", [*prefix, i, i], seed=i, max_tokens=14) for i in range(3, 6)]
    engine = hear(model, scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=3))
    for part in (requests[:1], requests[1:2], requests[2:]):
        compare(made, rounds_of(engine, part))
    assert isinstance(engine.drafter, Overheard)
    assert len(engine.drafter.rounds) > 15


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_what_is_drawn_is_drawn_from_the_recomputed_distribution(name: str, verification: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.load(tmp_path), requests_of((5, 17, 26), temperature=TEMPERATURE)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=4)
    speculative = {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": verification,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 8, 3]],
    }
    rounds = rounds_of(hear(model, script, speculative=speculative), requests)
    assert len(rounds) > 10
    compare(made, rounds, sampled=True)


@pytest.mark.parametrize(("name", "modules"), [("mimo", 1), ("qwen", 1), ("mimo of two", 2), ("qwen of three", 3)])
def test_every_length(name: str, modules: int, tmp_path: Path) -> None:
    """N = 1 to 8 where the number of modules allows it: drafts as recomputed, and the target's own greedy text."""
    made = VARIANTS[name]()
    model, requests = made.load(tmp_path), requests_of((1, 17, 34))
    expected = tiny.tokens_of(tiny.make_engine(model), requests)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=4)
    for num_tokens in [n for n in range(1, 9) if n <= modules or n % modules == 0]:
        engine = hear(model, script, speculative={"num_speculative_tokens": num_tokens})
        results = tiny.run(engine, requests, each_step=spoil_unused)
        assert {key: result.tokens for key, result in results.items()} == expected
        counters = engine.stats.speculation
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert isinstance(engine.drafter, Overheard)
        compare(made, engine.drafter.rounds[:: 1 + num_tokens // 2])


@pytest.mark.parametrize("name", BOTH)
def test_a_longer_proposal_begins_as_a_shorter_one(name: str, tmp_path: Path) -> None:
    model, requests = VARIANTS[name]().load(tmp_path), requests_of((4, 19))
    truth = scripted.Truth(model, requests)
    said: dict[tuple[int, ...], tuple[int, ...]] = {}
    shared = 0
    for num_tokens in (14, 3, 2, 1):
        script = scripted.Mixed(truth, 0.5, seed=6)
        for item in rounds_of(hear(model, script, speculative={"num_speculative_tokens": num_tokens}), requests):
            longer = said.setdefault(item.history, item.chain)
            shared += longer != item.chain
            assert longer[: len(item.chain)] == item.chain[: len(longer)]
    assert shared > 10


@pytest.mark.parametrize("name", BOTH)
def test_a_module_in_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    """It is taken in place of the target's, which drafts otherwise."""
    made, others = VARIANTS[name](), VARIANTS["mimo as qwen2"]()
    made.save_delta(tmp_path / "delta")
    for whole, module in ((False, made.module), (True, others.module)):
        model, requests = replace(made, module=module).load(tmp_path / f"{whole}", whole=whole), requests_of((6, 21))
        script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=7)
        rounds = rounds_of(hear(model, script, speculative={"model": str(tmp_path / "delta")}), requests)
        assert len(rounds) > 8
        compare(made, rounds)


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("meaning", [MIMO, QWEN], ids=BOTH)
def test_greedy_text_is_the_targets_own(meaning: Meaning, num_tokens: int, tmp_path: Path) -> None:
    """Whatever the length, with a module that is often right and often wrong."""
    model = tiny.tiny_model(3, cyclic=True)
    requests = requests_of((1, 2, 16, 17, 45))
    settings = {"method": "mtp", "num_speculative_tokens": num_tokens, "model": str(mtp.save_mtp(tmp_path, meaning))}
    engine = tiny.make_engine(model, speculative=settings)
    assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(model), requests)
    assert 20 < engine.stats.speculation.num_accepted_tokens < engine.stats.speculation.num_draft_tokens
