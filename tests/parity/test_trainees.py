"""What is trained is what is served: a trainee's forward over a text gives the drafts that the engine proposed for it.

The engine drafts from a history; that history with the first k drafts after it is then a text whose last draft only one
row of the trainee can predict. A teacher that wants exactly this draft must find that row agreeing. Float32 and random
weights in every tensor, so that nothing agrees by chance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafting import registry
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, Trainee, TrainingBatch
from outrider.models.llama import LlamaModel
from tests.kit import scripted, tiny
from tests.kit.overheard import Round, overheard, rounds_of, taps_of

N = 4
LAYERS = 6
DRAFTED = 40
SHAPE: dict[str, Any] = {"num_layers": LAYERS, "max_position_embeddings": 128}


class TextTeacher(Teacher):
    """Wants the token that the text has next."""

    def probs(self, batch: TrainingBatch, rows: Tensor) -> Tensor:
        wanted = torch.searchsorted(self.draft_ids, batch.ids[rows + 1])
        return torch.nn.functional.one_hot(wanted, len(self.draft_ids)).to(self.dtype)


def trainee_of(method: str, **changes: Any) -> Trainee:
    config = TrainConfig(
        draft_vocab_size=DRAFTED, block_size=N + 1, ttt_steps=N, anchors=100, markov_rank=8, max_len=128
    )
    config = config.with_overrides([f"{name}={json.dumps(value)}" for name, value in changes.items()])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(tiny.VOCAB, generator=generator)[:DRAFTED].sort().values
    target = tiny.tiny_config(**SHAPE)
    teacher = TextTeacher(target, tiny.tiny_tensors(0, target), ids, dtype=torch.float32, name="tiny")
    torch.manual_seed(2)
    trainee = registry.trainee(method)(config, teacher)
    for name, parameter in trainee.parameters.items():
        noise = torch.randn(parameter.shape)
        # Strong attention, so that drafts depend on the text and not only on their place.
        strength = 3 if "self_attn" in name else 1
        parameter.data = 1 + 0.3 * noise if "norm" in name else strength * noise * parameter.shape[-1] ** -0.5
    return trainee


def save(trainee: Trainee, folder: Path) -> None:
    config, tensors = trainee.checkpoint()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def agreement(trainee: Trainee, model: LlamaModel, item: Round, depth: int) -> tuple[float, float]:
    """(rows that agree, rows) at a draft position, over the text that ends with that draft."""
    text = [*item.history, *item.chain[: depth + 1]]
    layers = range(LAYERS + 1)
    taps = taps_of(model, text, layers).chunk(LAYERS + 1, dim=1)
    is_response = torch.arange(len(text)) >= len(item.history) - 1
    batch = TrainingBatch(torch.tensor(text), is_response, dict(zip(layers, taps, strict=True)), (0, len(text)))
    loss = trainee.loss(batch, torch.Generator())
    return float(loss.agreed[depth]), float(loss.counted[depth])


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {method: (method, {}) for method in registry.trainable()} | {
    "dflash, not causal": ("dflash", {"causal": False, "taps": [0, 3, 6], "num_layers": 2}),
    "dspark, one tap": ("dspark", {"taps": [3], "num_layers": 3, "intermediate_size": 32}),
    "gemma4_mtp, one layer read": ("gemma4_mtp", {"taps": [5], "num_layers": 2, "hidden_size": 32}),
    "gemma4_mtp, layers of its own": ("gemma4_mtp", {"taps": [0, 2, 4], "num_layers": 3, "intermediate_size": 48}),
    "eagle3, other taps": ("eagle3", {"taps": [0, 2, 4, 6], "intermediate_size": 48}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_drafts_what_serving_drafts(name: str, tmp_path: Path) -> None:
    method, changes = VARIANTS[name]
    model = tiny.tiny_model(0, **SHAPE)
    trainee = trainee_of(method, **changes)
    requests = [tiny.make_request(f"{i}", tiny.random_prompt(i, 5 + 9 * i), seed=i, max_tokens=16) for i in range(3)]
    script = scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=1)
    save(trainee, tmp_path)
    settings = {"method": method, "model": str(tmp_path), "num_speculative_tokens": N}
    rounds = [item for item in rounds_of(overheard(model, settings, script), requests) if len(item.chain) == N]
    assert len(rounds) > 8
    assert len({item.chain for item in rounds}) > 2
    for item in rounds:
        for depth in range(N):
            assert agreement(trainee, model, item, depth) == (1, 1), (item, depth)


@pytest.mark.parametrize("method", registry.trainable())
def test_rows_of_one_conversation_do_not_see_another(method: str) -> None:
    """Two conversations together cost what they cost apart."""
    model = tiny.tiny_model(0, **SHAPE)
    trainee = trainee_of(method)
    layers = range(LAYERS + 1)
    parts = []
    for seed, length in ((1, 20), (2, 31)):
        text = tiny.random_prompt(seed, length)
        taps = dict(zip(layers, taps_of(model, text, layers).chunk(LAYERS + 1, dim=1), strict=True))
        parts.append(TrainingBatch(torch.tensor(text), torch.arange(length) >= 6, taps, (0, length)))
    both = TrainingBatch(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.is_response for part in parts]),
        {layer: torch.cat([part.taps[layer] for part in parts]) for layer in layers},
        (0, 20, 51),
    )
    apart = [trainee.loss(part, torch.Generator()) for part in parts]
    together = trainee.loss(both, torch.Generator())
    assert float(together.total.detach()) == pytest.approx(sum(float(loss.total.detach()) for loss in apart), rel=1e-5)
    assert together.weight == pytest.approx(sum(loss.weight for loss in apart))
    assert torch.equal(together.counted, apart[0].counted + apart[1].counted)
