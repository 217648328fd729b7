"""Gemma 4 MTP drafters as the engine runs them, batched over paged memory, against a recomputation of every round.

What is verified follows a script, so that none, some and all drafts are accepted; what the drafter itself proposed is
kept and compared. Rejected rows of the target become NaN: a draft that reads one shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.engine import Engine
from tests.kit import gemma4_mtp, scripted, threads, tiny
from tests.kit.gemma4_mtp import VARIANTS, Made
from tests.kit.gemma4_mtp_reference import Gemma4MtpReference
from tests.kit.overheard import Overheard, Round, overheard, requests_of, rounds_of

TEMPERATURE = 0.8
SOME = ("dense", "centroids", "reduced")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The reference's matrices are too small to share: threads would only wait for each other."""
    with threads.one_thread():
        yield


def hear(made: Made, folder: Path, model: Any, script: scripted.Scripted, **settings: Any) -> Engine:
    speculative = {"method": "gemma4_mtp", "model": str(made.save(folder))} | settings.pop("speculative", {})
    return overheard(model, speculative, script, **settings)


def compare(made: Made, model: Any, rounds: Sequence[Round], *, sampled: bool = False) -> None:
    """Hold every round against the reference."""
    reference = Gemma4MtpReference(made.tensors, made.meaning, model)
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
    model, requests = made.target(), requests_of((1, 7, 16, 33, 40))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=1)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 2, 0], [3, 3, 4], [4, 8, 6]]}
    engine = hear(made, tmp_path, model, script, speculative=schedule, max_num_batched_tokens=40, kv_cache_tokens=160)
    rounds = rounds_of(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert len(rounds) > 25
    assert {len(item.chain) for item in rounds} >= {1, 4, 6}
    assert len({item.chain for item in rounds}) > 10
    compare(made, model, rounds)


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("dense", {"window": 19}),
    "no window": ("keys as values", {"window": None}),
    "layer": ("reduced", {"reads": 1}),
    "rotation": ("llama", {"theta": 10_000.0}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_recomputation_would_see_another_layer(change: str, tmp_path: Path) -> None:
    name, fields = CHANGES[change]
    made = VARIANTS[name]()
    model, requests = made.target(), requests_of((20, 29, 35))
    rounds = rounds_of(
        hear(made, tmp_path, model, scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=8)), requests
    )
    compare(made, model, rounds)
    layers = tuple(
        replace(layer, **fields) if layer.window is not None or "window" not in fields else layer
        for layer in made.meaning.layers
    )
    made.meaning = replace(made.meaning, layers=layers)
    with pytest.raises(AssertionError):
        compare(made, model, rounds)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", SOME)
def test_whatever_is_accepted(name: str, rate: float, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.target(), requests_of((3, 18, 31))
    script = scripted.Mixed(scripted.Truth(model, requests), rate, seed=2)
    rounds = rounds_of(hear(made, tmp_path, model, script), requests)
    assert len(rounds) > 10
    compare(made, model, rounds)


@pytest.mark.parametrize("length", [48, 50])
@pytest.mark.parametrize("name", SOME)
def test_prefixes_that_others_computed(name: str, length: int, tmp_path: Path) -> None:
    """The first request leaves a prompt from which nothing was drafted; the others find it and draft at once."""
    made = VARIANTS[name]()
    model, prefix = made.target(), tiny.random_prompt(9, length)
    requests = [tiny.make_request("first", prefix, max_tokens=1)]
    requests += [tiny.make_request(f"{i}", [*prefix, i], seed=i, max_tokens=14) for i in range(3)]
    engine = hear(made, tmp_path, model, scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=3))
    for part in (requests[:1], requests[1:2], requests[2:]):
        compare(made, model, rounds_of(engine, part))
    assert isinstance(engine.drafter, Overheard)
    assert len(engine.drafter.rounds) > 10


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("verification", ["coupled", "standard"])
def test_what_is_drawn_is_drawn_from_the_recomputed_distribution(name: str, verification: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.target(), requests_of((5, 17, 26), temperature=TEMPERATURE)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=4)
    speculative = {
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": verification,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 8, 3]],
    }
    rounds = rounds_of(hear(made, tmp_path, model, script, speculative=speculative), requests)
    assert len(rounds) > 10
    compare(made, model, rounds, sampled=True)


def test_all_groups_of_tokens_are_all_tokens(tmp_path: Path) -> None:
    """Scored group by group, all of them, or all at once: the same drafts."""
    grouped = VARIANTS["centroids"]()
    grouped.config["centroid_intermediate_top_k"] = 16
    whole = VARIANTS["centroids"]()
    whole.config["use_ordered_embeddings"] = False
    whole.config["text_config"].pop("final_logit_softcapping")
    whole.tensors = {name: tensor for name, tensor in whole.tensors.items() if "masked" not in name}
    said = []
    for made, folder in ((grouped, tmp_path / "grouped"), (whole, tmp_path / "whole")):
        model, requests = made.target(), requests_of((4, 19))
        script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=6)
        rounds = rounds_of(hear(made, folder, model, script), requests)
        said.append([(item.history, item.chain) for item in rounds])
    assert said[0] == said[1]
    assert len(said[0]) > 10


@pytest.mark.parametrize("name", SOME)
def test_a_longer_proposal_begins_as_a_shorter_one(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model, requests = made.target(), requests_of((4, 19))
    truth = scripted.Truth(model, requests)
    said: dict[tuple[int, ...], tuple[int, ...]] = {}
    shared = 0
    for num_tokens in (14, 3, 2, 1):
        script = scripted.Mixed(truth, 0.5, seed=6)
        speculative = {"num_speculative_tokens": num_tokens}
        for item in rounds_of(hear(made, tmp_path, model, script, speculative=speculative), requests):
            longer = said.setdefault(item.history, item.chain)
            shared += longer != item.chain
            assert longer[: len(item.chain)] == item.chain[: len(longer)]
    assert shared > 10


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_greedy_text_is_the_targets_own(num_tokens: int, tmp_path: Path) -> None:
    """Whatever the length, with a drafter that is often right and often wrong."""
    model = tiny.tiny_model(3, cyclic=True)
    requests = requests_of((1, 2, 16, 17, 45))
    folder = gemma4_mtp.save_gemma4_mtp(tmp_path)
    settings = {"method": "gemma4_mtp", "num_speculative_tokens": num_tokens, "model": str(folder)}
    engine = tiny.make_engine(model, speculative=settings)
    assert tiny.tokens_of(engine, requests) == tiny.tokens_of(tiny.make_engine(model), requests)
    assert 20 < engine.stats.speculation.num_accepted_tokens < engine.stats.speculation.num_draft_tokens
