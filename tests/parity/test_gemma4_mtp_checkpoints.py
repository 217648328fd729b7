"""What a Gemma 4 MTP drafter must be: every tensor and key that is wrong is refused by name before a draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.checkpoint import method_of, read_checkpoint
from outrider.engine.engine import Engine
from outrider.errors import DrafterMismatch, LoadError, OutriderError
from tests.kit import tiny
from tests.kit.damage import DAMAGES
from tests.kit.gemma import gemma_model
from tests.kit.gemma4_mtp import VARIANTS, Made

FULL, SLIDING = "full_attention", "sliding_attention"
# Each tensor once, in the first of these that has it.
FIRST_WITH = {
    tensor: name for name in reversed(("dense", "centroids", "reduced")) for tensor in VARIANTS[name]().tensors
}
EVERY_TENSOR = [(name, tensor) for tensor, name in FIRST_WITH.items()]
WEIGHTS = [(name, tensor) for name, tensor in EVERY_TENSOR if VARIANTS[name]().tensors[tensor].is_floating_point()]


def load(made: Made, folder: Path, target: Any = None) -> Engine:
    settings = {"method": "gemma4_mtp", "num_speculative_tokens": 4, "model": str(made.save(folder))}
    return tiny.make_engine(made.target() if target is None else target, speculative=settings)


def refusal(made: Made, folder: Path, kind: type[OutriderError] = DrafterMismatch, target: Any = None) -> str:
    """The one line in which it is refused."""
    with pytest.raises(kind) as caught:
        load(made, folder, target)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def stored(tensor: str) -> str:
    return tensor.removeprefix("model.")


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_drafters_load_and_say_their_method(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    drafter = load(made, tmp_path).drafter
    assert drafter is not None
    assert drafter.taps == (made.target().config.num_layers,)
    assert method_of(read_checkpoint(str(tmp_path))) == "gemma4_mtp"
    resolved = registry.resolve(
        SpeculativeConfig.parse({"model": str(tmp_path), "num_speculative_tokens": 3}), made.target()
    )
    assert resolved.method == "gemma4_mtp"


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_that_is_missing_or_renamed_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    whole = made.tensors.pop(tensor)
    assert f"lacks {stored(tensor)}" in refusal(made, tmp_path)
    made.tensors["other." + tensor] = whole
    assert f"lacks {stored(tensor)}" in refusal(made, tmp_path)


@pytest.mark.parametrize("spoil", DAMAGES)
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_type_or_shape_is_named(
    name: str, tensor: str, spoil: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    made = VARIANTS[name]()
    made.tensors[tensor] = spoil(made.tensors[tensor])
    assert stored(tensor) in refusal(made, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("name", "tensor"), WEIGHTS)
def test_a_value_that_is_not_finite_is_refused(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.tensors[tensor].view(-1)[-1] = value
    assert f"NaN or infinity in {stored(tensor)}" in refusal(made, tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("dense", "model.layers.0.self_attn.k_proj.weight"),
        ("dense", "model.layers.3.mlp.up_proj.weight"),
        ("dense", "lm_head.weight"),
        ("dense", "masked_embedding.token_ordering"),
        ("reduced", "model.embed_tokens.weight"),
    ],
)
def test_a_part_without_use_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.tensors[tensor] = torch.zeros(2, 2)
    assert f"has {stored(tensor)}" in refusal(made, tmp_path)


@pytest.mark.parametrize("value", [0, -1, tiny.VOCAB])
def test_an_order_that_does_not_name_every_token_once_is_refused(value: int, tmp_path: Path) -> None:
    made = VARIANTS["centroids"]()
    order = made.tensors["masked_embedding.token_ordering"]
    order[int(order[0] == 0)] = value
    assert "masked_embedding.token_ordering" in refusal(made, tmp_path)


def test_a_reduced_vocabulary_that_leads_outside_is_refused(tmp_path: Path) -> None:
    made = VARIANTS["reduced"]()
    made.tensors["d2t"][-1] = tiny.VOCAB
    assert "d2t does not lead to 40 different ids" in refusal(made, tmp_path)


@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_is_widened(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.tensors = {key: t.bfloat16() if t.is_floating_point() else t for key, t in made.tensors.items()}
    assert load(made, tmp_path).drafter is not None


# ---- the target ----


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vocab": 80}, "vocabulary of 64, the target one of 80"),
        ({"hidden_size": 96}, "target width of 64, the target one of 96"),
        ({"num_kv_heads": 4}, "2 key heads of 32 in layer 0, the target's layer 2 has 4 of 32"),
        ({"head_dim": 16}, "2 key heads of 32 in layer 0, the target's layer 2 has 2 of 16"),
        ({"num_layers": 2}, "keys of layer 2, the target has 2"),
    ],
)
def test_another_target_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    shape = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2} | changes
    assert what in refusal(VARIANTS["reduced"](), tmp_path, target=tiny.tiny_model(5, **shape))


def test_the_drafter_of_another_gemma_is_refused(tmp_path: Path) -> None:
    """Of the same width and vocabulary, with other key heads; and of a target that has no layer of a kind."""
    found = refusal(VARIANTS["dense"](), tmp_path, target=gemma_model("gemma4, keys as values"))
    assert "2 key heads of 64 in layer 2, the target's layer 5 has 1 of 64" in found
    assert f"reads a {SLIDING} layer" in refusal(VARIANTS["dense"](), tmp_path, target=tiny.tiny_model())


# ---- config.json ----


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma4_text"),
        ("model_type", None),
        ("backbone_hidden_size", None),
        ("backbone_hidden_size", 32),
        ("backbone_hidden_size", "wide"),
        ("use_ordered_embeddings", "no"),
        ("use_ordered_embeddings", True),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", 100),
        ("draft_vocab_size", 40),
        ("target_kv_layers", [5]),
        ("target_kv_layers", [4, 4, 6]),
        ("target_kv_layers", [4, 4, -1]),
        ("target_kv_layers", [4, 4, "5"]),
        ("target_kv_layers", 5),
        ("text_config", None),
        ("text_config", [1]),
    ],
)
def test_a_config_that_does_not_belong_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    made = VARIANTS["dense"]()
    made.config[key] = value
    refusal(made, tmp_path, OutriderError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("num_hidden_layers", 2),
        ("layer_types", [FULL, FULL, FULL]),
        ("num_attention_heads", 3),
        ("head_dim", 64),
        ("global_head_dim", 32),
        ("num_key_value_heads", 4),
        ("intermediate_size", 96),
        ("vocab_size", 63),
        ("hidden_activation", "silu"),
        ("hidden_size_per_layer_input", 16),
        ("hidden_size_per_layer_input", None),
        ("use_double_wide_mlp", True),
        ("enable_moe_block", True),
        ("rope_parameters", {FULL: {"rope_type": "yarn"}}),
    ],
)
def test_layers_that_do_not_belong_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    made = VARIANTS["dense"]()
    made.config["text_config"][key] = value
    refusal(made, tmp_path, OutriderError)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_centroids", 5, "num_centroids is 5, expected a divisor of vocab_size 64"),
        ("num_centroids", 8, "masked_embedding.centroids.weight"),
        ("centroid_intermediate_top_k", 17, "centroid_intermediate_top_k is 17, expected at most num_centroids 16"),
        ("centroid_intermediate_top_k", 0, "centroid_intermediate_top_k is 0"),
        ("draft_vocab_size", 40, "draft_vocab_size and use_ordered_embeddings are both set"),
    ],
)
def test_groups_that_do_not_belong_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    made = VARIANTS["centroids"]()
    made.config[key] = value
    assert said in refusal(made, tmp_path, OutriderError)


@pytest.mark.parametrize("given", ["3", 3, [3, "4"], {"ids": [3]}])
def test_suppressed_tokens_that_are_no_list_of_ids_are_refused(given: Any, tmp_path: Path) -> None:
    made = VARIANTS["keys as values"]()
    made.generation = {"suppress_tokens": given}
    assert "generation_config.json: suppress_tokens is" in refusal(made, tmp_path, LoadError)


def test_keys_that_leave_the_published_behaviour_say_nothing(tmp_path: Path) -> None:
    """Our two keys, written out, mean what they mean when they are absent."""
    made = VARIANTS["dense"]()
    plain = load(made, tmp_path / "plain").drafter
    made.config |= {"target_kv_layers": [4, 4, 5], "draft_vocab_size": tiny.VOCAB}
    said = load(made, tmp_path / "said").drafter
    assert json.loads((tmp_path / "said" / "config.json").read_text())["target_kv_layers"] == [4, 4, 5]
    for drafter in (plain, said):
        caches = drafter._network._cache  # type: ignore[union-attr]
        memory = drafter._target.memory.cache  # type: ignore[union-attr]
        assert [next(i for i, entry in enumerate(memory) if entry is cache) for cache in caches] == [4, 4, 5]
