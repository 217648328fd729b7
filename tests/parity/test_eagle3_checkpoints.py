"""What an EAGLE-3 checkpoint must be: every tensor and key that is wrong is refused by name before a draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.eagle3 import Eagle3Config
from outrider.drafting.checkpoint import method_of, read_checkpoint
from outrider.engine.engine import Engine
from outrider.errors import DrafterMismatch, LoadError
from outrider.models.llama import LlamaModel
from tests.kit import eagle3, tiny
from tests.kit.damage import DAMAGES
from tests.kit.eagle3 import VARIANTS, Made

# Without these the target's own are used, where they fit; t2d is for training only.
SHARED, UNREAD = {"embed_tokens.weight", "lm_head.weight"}, {"t2d"}
WHOLE = ("flat", "norm before fc", "3.1", "qwen3", "two layers", "biased")
# Each tensor once, in the first of these that has it.
FIRST_WITH = {tensor: name for name in reversed(WHOLE) for tensor in VARIANTS[name]().tensors}
EVERY_TENSOR = [(name, tensor) for tensor, name in FIRST_WITH.items()]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(5, **eagle3.TARGET)


def load(model: LlamaModel, made: Made, folder: Path) -> Engine:
    return tiny.make_engine(model, speculative={"num_speculative_tokens": 5} | made.save(folder))


def named(tensor: str) -> str:
    return tensor.replace(".", r"\.")


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_checkpoints_load_and_say_their_method(name: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    drafter = load(model, made, tmp_path).drafter
    assert drafter is not None
    assert drafter.taps == made.meaning.taps
    assert method_of(read_checkpoint(str(tmp_path))) == "eagle3"


def test_the_tensors_alone_say_the_method(tmp_path: Path) -> None:
    for name in ("flat", "speculators"):
        made = VARIANTS[name]()
        made.config = {}
        made.save(tmp_path / f"dflash-{name}")
        assert method_of(read_checkpoint(str(tmp_path / f"dflash-{name}"))) == "eagle3"


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_missing_tensor_is_named(name: str, tensor: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    del made.tensors[tensor]
    if tensor in UNREAD | ({"embed_tokens.weight"} if "d2t" in made.tensors else SHARED):
        assert load(model, made, tmp_path).drafter is not None
        return
    with pytest.raises(DrafterMismatch, match=named(tensor)):
        load(model, made, tmp_path)


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_name_is_named(name: str, tensor: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.tensors["other." + tensor] = made.tensors.pop(tensor)
    with pytest.raises(DrafterMismatch, match=named(tensor)):
        load(model, made, tmp_path)


@pytest.mark.parametrize("spoil", DAMAGES)
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_type_or_shape_is_named(
    name: str, tensor: str, spoil: Callable[[Tensor], Tensor], model: LlamaModel, tmp_path: Path
) -> None:
    made = VARIANTS[name]()
    made.tensors[tensor] = spoil(made.tensors[tensor])
    with pytest.raises(DrafterMismatch, match=named(tensor)):
        load(model, made, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("name", "tensor"), [pair for pair in EVERY_TENSOR if pair[1] not in ("d2t", "t2d")])
def test_a_value_that_is_not_finite_is_refused(
    name: str, tensor: str, value: float, model: LlamaModel, tmp_path: Path
) -> None:
    made = VARIANTS[name]()
    made.tensors[tensor].view(-1)[-1] = value
    with pytest.raises(DrafterMismatch, match="NaN or infinity in " + named(tensor)):
        load(model, made, tmp_path)


@pytest.mark.parametrize("name", WHOLE)
def test_half_precision_is_widened(name: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.tensors = {key: t.bfloat16() if t.is_floating_point() else t for key, t in made.tensors.items()}
    assert load(model, made, tmp_path).drafter is not None


# ---- the target ----


@pytest.mark.parametrize("name", ["flat", "speculators"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [({"vocab": 80}, "vocabulary"), ({"hidden_size": 96}, "width"), ({"num_layers": 4}, "layer")],
)
def test_another_target_is_refused(name: str, changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    other = tiny.tiny_model(5, **(eagle3.TARGET | changes))
    with pytest.raises(DrafterMismatch, match=what):
        load(other, VARIANTS[name](), tmp_path)


@pytest.mark.parametrize("tensor", sorted(SHARED))
def test_a_drafter_of_another_width_needs_ends_of_its_own(tensor: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["wide"]()
    del made.tensors[tensor]
    with pytest.raises(DrafterMismatch, match=named(tensor)):
        load(model, made, tmp_path)


@pytest.mark.parametrize("offset", [-tiny.VOCAB, tiny.VOCAB, 1])
def test_a_map_of_ids_leads_to_different_ids_of_the_target(offset: int, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["speculators"]()
    ids = made.tensors["d2t"] + torch.arange(len(made.tensors["d2t"]))
    # Past the ends of the vocabulary, or onto the neighbour's id.
    made.tensors["d2t"][0] = ids[1] if offset == 1 else offset
    with pytest.raises(DrafterMismatch, match="d2t"):
        load(model, made, tmp_path)


def test_an_embedding_equal_to_the_targets_is_held_once(model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["flat"]()
    made.tensors["embed_tokens.weight"] = model.embedding.clone()
    drafter: Any = load(model, made, tmp_path).drafter
    assert drafter._loop._vocabulary.embedding is model.embedding


# ---- settings ----


def read(config: dict[str, Any], num_target_layers: int = 30) -> Eagle3Config:
    return Eagle3Config.read(config, source="here", num_target_layers=num_target_layers)


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 30]}, (0, 4, 30)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 4], "target_layer_ids": [9]}, (2, 4)),
        ({"target_layer_ids": [-1, 4, 29]}, (0, 5, 30)),
        ({"eagle_config": {"layer_ids": [3, 5, 7]}}, (3, 5, 7)),
        # vLLM reads the nested list for the width of fc alone.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, (2, 15, 27)),
        ({}, (2, 15, 27)),
    ],
)
def test_where_the_taps_are_named(keys: dict[str, Any], taps: tuple[int, ...]) -> None:
    assert read(eagle3.layer_keys(**keys)).taps == taps


def test_what_a_silent_file_means() -> None:
    for config, normed in ((VARIANTS["flat"]().config, False), (VARIANTS["speculators"]().config, True)):
        found = read(config)
        assert found.norm_before_residual == normed
        assert (found.norm_before_fc, found.fc_norm, found.norm_output) == (False, False, False)


@pytest.mark.parametrize(
    ("name", "has_query_norm"),
    [
        ("LlamaForCausalLM", False),
        ("Eagle3MiniMaxM2ForCausalLM", False),
        ("Eagle3Qwen2_5vlForCausalLM", False),
        ("Eagle3Qwen3vlForCausalLM", False),
        ("Qwen3ForCausalLM", True),
        ("Qwen3Eagle3Model", True),
    ],
)
def test_whose_layers_a_class_has(name: str, has_query_norm: bool) -> None:
    assert read(eagle3.layer_keys(architectures=[name])).model.qk_norm == has_query_norm


BAD_KEYS: list[tuple[str, str, Any]] = [
    ("flat", "eagle_aux_hidden_state_layer_ids", []),
    ("flat", "eagle_aux_hidden_state_layer_ids", [1, 3]),
    ("flat", "eagle_aux_hidden_state_layer_ids", [1, 3, 3]),
    ("flat", "eagle_aux_hidden_state_layer_ids", [1, 3, 7]),
    ("flat", "eagle_aux_hidden_state_layer_ids", [-1, 3, 5]),
    ("flat", "eagle_aux_hidden_state_layer_ids", "1, 3, 5"),
    ("flat", "eagle_aux_hidden_state_layer_ids", None),
    ("flat", "architectures", ["Eagle3DeepseekV2ForCausalLM"]),
    ("flat", "architectures", ["PeagleLlamaForCausalLM"]),
    ("flat", "architectures", ["DFlashDraftModel"]),
    ("flat", "architectures", ["Gemma4Eagle3Model"]),
    ("flat", "architectures", ["Qwen3Eagle3Model"]),
    ("flat", "num_target_layers", 5),
    ("flat", "target_hidden_size", 32),
    ("flat", "draft_vocab_size", tiny.VOCAB - 1),
    ("flat", "draft_vocab_size", tiny.VOCAB + 1),
    ("flat", "draft_vocab_size", 0),
    ("flat", "norm_before_fc", True),
    ("flat", "norm_before_residual", "yes"),
    ("flat", "fc_norm", True),
    ("flat", "num_hidden_layers", 2),
    ("flat", "attention_bias", True),
    ("flat", "hidden_act", "gelu"),
    ("flat", "hidden_size", None),
    ("flat", "head_dim", 64),
    ("flat", "layer_types", ["sliding_attention"]),
    ("flat", "layer_types", ["full_attention"] * 2),
    ("flat", "layer_types", ["linear_attention"]),
    ("flat", "eagle_config", {"use_aux_hidden_state": False}),
    ("3.1", "fc_norm", False),
    ("3.1", "speculators_model_type", "peagle"),
    ("3.1", "speculators_model_type", "dflash"),
    ("3.1", "draft_vocab_size", tiny.VOCAB),
    ("3.1", "transformer_layer_config", {"model_type": "gemma4_text"}),
    ("qwen3", "transformer_layer_config", eagle3.layer_keys()),
    ("last state", "eagle_config", {"use_aux_hidden_state": True}),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD_KEYS)
def test_a_config_that_does_not_belong_is_refused(
    name: str, key: str, value: Any, model: LlamaModel, tmp_path: Path
) -> None:
    made = VARIANTS[name]()
    made.config[key] = value
    with pytest.raises((DrafterMismatch, LoadError)) as caught:
        load(model, made, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_that_drafts_in_parallel_is_refused(model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["flat"]()
    made.tensors["mask_hidden"] = torch.zeros(1, 3 * tiny.WIDTH)
    with pytest.raises(DrafterMismatch, match="mask_hidden"):
        load(model, made, tmp_path)


def test_a_drafter_needs_a_model(model: LlamaModel) -> None:
    with pytest.raises(DrafterMismatch, match="eagle3") as caught:
        tiny.make_engine(model, speculative={"method": "eagle3", "num_speculative_tokens": 3})
    assert caught.value.param == "model"
