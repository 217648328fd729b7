"""What the Gemma 4 MTP trainee takes for the target's keys and values is what the target's cache holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.drafting.gemma4_config import Gemma4MtpConfig
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch
from outrider.drafting.unrolled import Rows
from outrider.errors import ConfigError
from outrider.models.arch import RopeScaling
from outrider.models.llama import LlamaModel
from outrider.trainees.gemma4_mtp import Gemma4MtpTrainee
from tests.kit import tiny
from tests.kit.gemma4_mtp_reference import read_afresh
from tests.kit.overheard import taps_of

LAYERS = 4
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
    "stretched": {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
}


def trainee_of(changes: dict[str, Any], **settings: Any) -> tuple[Gemma4MtpTrainee, LlamaModel]:
    config = tiny.tiny_config(num_layers=LAYERS, **changes)
    tensors = tiny.tiny_tensors(0, config)
    ids = torch.arange(0, tiny.VOCAB, 2)
    teacher = Teacher(config, tensors, ids, dtype=torch.float32, name="tiny")
    torch.manual_seed(0)
    return Gemma4MtpTrainee(TrainConfig(**settings), teacher), LlamaModel(config, tensors, max_len=256)


@pytest.mark.parametrize("name", TARGETS)
def test_keys_and_values_are_those_of_the_cache(name: str) -> None:
    trainee, model = trainee_of(TARGETS[name], taps=(0, 1, 2, 3))
    text = tiny.random_prompt(1, 40)
    taps = dict(enumerate(taps_of(model, text, range(LAYERS + 1)).chunk(LAYERS + 1, dim=1)))
    batch = TrainingBatch(torch.tensor(text), torch.arange(40) > 3, taps, (0, 40))
    for layer, expected in enumerate(read_afresh(model, text)[1]):
        for ours, theirs in zip(trainee._key_value(layer, batch, Rows(batch)), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_is_read_as_it_was_meant(name: str) -> None:
    """The rotation of the target's layer, its head sizes, and the layers that are read."""
    trainee, model = trainee_of(TARGETS[name], taps=(2,), num_layers=3)
    raw, tensors = trainee.checkpoint()
    read = Gemma4MtpConfig.read(raw, source="written")
    assert read.kv_layers == (2, 2, 2)
    assert {(layer.rope_theta, layer.rope_scaling) for layer in read.model.layers} == {
        (model.config.rope_theta, model.config.rope_scaling)
    }
    assert {(layer.num_kv_heads, layer.head_dim) for layer in read.model.layers} == {(1, 32)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == read.shapes() | read.optional_shapes()


@pytest.mark.parametrize("taps", [(0, 1), (4,), (0, 1, 2, 4)])
def test_layers_that_cannot_be_read_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected 1 or 4 layers up to 3") as caught:
        trainee_of({}, taps=taps)
    assert caught.value.param == "taps"


def test_a_rotation_that_the_format_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotary scaling of type llama3"):
        trainee_of({"rope_scaling": RopeScaling(kind="llama3", factor=8.0)})


def test_the_layers_that_are_read_without_a_word_are_spread_over_the_depth() -> None:
    trainee, _ = trainee_of({})
    assert trainee._kv_layers == (3, 3, 3, 3)
    config = tiny.tiny_config(num_layers=30)
    teacher = Teacher(config, tiny.tiny_tensors(0, config), torch.arange(9), dtype=torch.float32, name="tiny")
    assert Gemma4MtpTrainee(TrainConfig(), teacher)._kv_layers == (9, 15, 21, 27)
