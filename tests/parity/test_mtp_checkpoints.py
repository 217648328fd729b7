"""What a prediction module must be: every tensor and key that is wrong is refused by name before a draft."""

from __future__ import annotations

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
from outrider.errors import ConfigError, DrafterMismatch, LoadError, OutriderError
from outrider.models.llama import LlamaModel
from tests.kit import tiny
from tests.kit.damage import DAMAGES
from tests.kit.mtp import VARIANTS, Made

WHOLE = ("mimo", "mimo of two", "qwen", "qwen3", "qwen of three")
# Each tensor once, in the first of these that has it.
FIRST_WITH = {tensor: name for name in reversed(WHOLE) for tensor in VARIANTS[name]().module}
EVERY_TENSOR = [(name, tensor) for tensor, name in FIRST_WITH.items()]


def load(made: Made, folder: Path, *, apart: bool = False, num_tokens: int = 6) -> Engine:
    """The target with its module inside, or `apart` from it."""
    settings = {"method": "mtp", "num_speculative_tokens": num_tokens}
    if apart:
        settings["model"] = str(made.save_delta(folder / "delta"))
    return tiny.make_engine(made.load(folder / "target", whole=not apart), speculative=settings)


def refusal(made: Made, folder: Path, kind: type[OutriderError] = DrafterMismatch, **how: Any) -> str:
    """The one line in which it is refused."""
    with pytest.raises(kind) as caught:
        load(made, folder, **how)
    message = str(caught.value)
    assert "\n" not in message
    return message


def stored(tensor: str) -> str:
    return tensor.removeprefix("model.")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_modules_load_and_say_their_method(name: str, apart: bool, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    drafter = load(made, tmp_path, apart=apart).drafter
    assert drafter is not None
    assert drafter.taps == (3,)
    assert method_of(read_checkpoint(str(tmp_path / ("delta" if apart else "target")))) == "mtp"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_that_is_missing_or_renamed_is_named(name: str, tensor: str, apart: bool, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    whole = made.module.pop(tensor)
    assert f"lacks {stored(tensor)}" in refusal(made, tmp_path, apart=apart)
    made.module["other." + tensor] = whole
    assert f"lacks {stored(tensor)}" in refusal(made, tmp_path, apart=apart)


@pytest.mark.parametrize("spoil", DAMAGES)
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_type_or_shape_is_named(
    name: str, tensor: str, spoil: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    made = VARIANTS[name]()
    made.module[tensor] = spoil(made.module[tensor])
    assert stored(tensor) in refusal(made, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_value_that_is_not_finite_is_refused(name: str, tensor: str, value: float, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.module[tensor].view(-1)[-1] = value
    assert f"NaN or infinity in {stored(tensor)}" in refusal(made, tmp_path)


@pytest.mark.parametrize("tensor", ["mtp.layers.1.mlp.up_proj.weight", "mtp.embed_tokens.weight"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_part_without_use_is_named(apart: bool, tensor: str, tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    made.module[tensor] = torch.zeros(2, 2)
    assert f"has {tensor}" in refusal(made, tmp_path, apart=apart)


def test_an_output_matrix_of_its_own_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    made.module["lm_head.weight"] = torch.zeros(tiny.VOCAB, 64)
    assert "has lm_head.weight" in refusal(made, tmp_path, apart=True)


@pytest.mark.parametrize("name", WHOLE)
def test_half_precision_is_widened(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    made.module = {key: tensor.bfloat16() for key, tensor in made.module.items()}
    assert load(made, tmp_path).drafter is not None


# ---- the target ----


@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 3}])
def test_a_target_without_a_module_is_refused(more: dict[str, int], tmp_path: Path) -> None:
    config = SpeculativeConfig.parse({"method": "mtp"} | more)
    for target in (tiny.tiny_model(), VARIANTS["mimo"]().load(tmp_path / "bare", whole=False)):
        with pytest.raises(DrafterMismatch, match=r"no multi-token prediction module .*\"model\"$") as caught:
            registry.resolve(config, target)
        assert caught.value.param == "model" and "\n" not in str(caught.value)
    assert str(tmp_path / "bare") in str(caught.value)
    assert "no multi-token prediction module" in refusal(_bare("qwen"), tmp_path)


def _bare(name: str) -> Made:
    made = VARIANTS[name]()
    made.module = {}
    return made


def test_a_folder_without_a_module_is_refused(tmp_path: Path) -> None:
    other = str(tiny.save_tiny(tmp_path / "other"))
    with pytest.raises(DrafterMismatch, match=f"{other} holds no multi-token prediction module"):
        tiny.make_engine(tiny.tiny_model(), speculative={"method": "mtp", "num_speculative_tokens": 2, "model": other})


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"vocab": 80}, "vocabulary"), ({"hidden_size": 96}, "width"), ({"num_layers": 4}, "layer")],
)
def test_another_target_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    other = tiny.tiny_model(5, **({"num_layers": 3} | changes))
    settings = {"method": "mtp", "num_speculative_tokens": 2, "model": str(made.save_delta(tmp_path))}
    with pytest.raises(DrafterMismatch, match=what):
        tiny.make_engine(other, speculative=settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mtp_num_hidden_layers", 2),
        ("mtp_num_hidden_layers", "one"),
        ("mtp_num_hidden_layers", 0),
        ("model_type", "gemma3_text"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("intermediate_size", 64),
        ("attention_bias", True),
        ("num_attention_heads", 2),
        ("num_key_value_heads", None),
        ("speculators_model_type", "mtp"),
        ("transformer_layer_config", {}),
    ],
)
def test_a_config_that_does_not_belong_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    made = VARIANTS["qwen"]()
    model = made.load(tmp_path / "target", whole=False)
    made.config[key] = value
    settings = {"method": "mtp", "num_speculative_tokens": 2, "model": str(made.save_delta(tmp_path / "delta"))}
    with pytest.raises((DrafterMismatch, LoadError)) as caught:
        tiny.make_engine(model, speculative=settings)
    assert str(tmp_path / "delta") in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- N ----


def resolved(target: LlamaModel, **settings: Any) -> SpeculativeConfig:
    return registry.resolve(SpeculativeConfig.parse({"method": "mtp"} | settings), target)


@pytest.mark.parametrize(("name", "depth"), [("mimo", 1), ("mimo of two", 2), ("qwen of three", 3)])
def test_n_is_what_the_target_was_trained_for(name: str, depth: int, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    model = made.load(tmp_path / "whole")
    found = resolved(model)
    assert (found.num_speculative_tokens, found.model) == (depth, str(tmp_path / "whole"))
    assert tiny.make_engine(model, speculative=found).drafter is not None
    apart = str(made.save_delta(tmp_path / "delta"))
    assert resolved(model, model=apart).num_speculative_tokens == depth
    assert resolved(model, num_speculative_tokens=12).num_speculative_tokens == 12


def test_a_config_that_does_not_say_n_is_named(tmp_path: Path) -> None:
    model = VARIANTS["qwen3"]().load(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} does not say it") as caught:
        resolved(model)
    assert caught.value.param == "num_speculative_tokens"


@pytest.mark.parametrize("num_tokens", range(1, 10))
@pytest.mark.parametrize(("name", "depth"), [("mimo", 1), ("mimo of two", 2), ("qwen of three", 3)])
def test_a_longer_n_is_a_multiple_of_the_depth(name: str, depth: int, num_tokens: int, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    if num_tokens <= depth or num_tokens % depth == 0:
        assert load(made, tmp_path, num_tokens=num_tokens).drafter is not None
        return
    message = refusal(made, tmp_path, ConfigError, num_tokens=num_tokens)
    assert f"num_speculative_tokens is {num_tokens}, expected a multiple of {depth}" in message


def test_the_target_named_as_the_drafter_is_the_same(tmp_path: Path) -> None:
    made = VARIANTS["mimo"]()
    model = made.load(tmp_path / "target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    settings = {"method": "mtp", "num_speculative_tokens": 3, "model": str(tmp_path / "link")}
    assert tiny.make_engine(model, speculative=settings).drafter is not None
    assert registry.resolve(SpeculativeConfig.parse({"model": str(tmp_path / "link")}), model).method == "mtp"
