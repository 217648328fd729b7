"""What a block drafter's checkpoint must be: every tensor and key that is wrong is refused by name before a draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafting.checkpoint import method_of, read_checkpoint
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DrafterMismatch, LoadError
from outrider.models.llama import LlamaModel
from tests.kit import block_checkpoints, tiny
from tests.kit.block_checkpoints import VARIANTS, Made
from tests.kit.damage import DAMAGES

WHOLE = {
    "dflash": VARIANTS["dflash zlab"],
    "dflash speculators": VARIANTS["dflash speculators"],
    "dspark": VARIANTS["dspark deepspec"],
    "dspark speculators": VARIANTS["dspark speculators"],
    "dspark gated": VARIANTS["dspark gated"],
    "dspark rnn": VARIANTS["dspark rnn"],
}
# Without these the target's own are used, where they fit; t2d is for training only.
SHARED = {"embed_tokens.weight", "lm_head.weight"}
UNREAD = {"t2d"}
# Each tensor once, in the first of these that has it.
FIRST_WITH = {tensor: name for name, make in reversed(WHOLE.items()) for tensor in make().tensors}
EVERY_TENSOR = [(name, tensor) for tensor, name in FIRST_WITH.items()]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(5, **block_checkpoints.TARGET)


def load(model: LlamaModel, made: Made, folder: Path, **settings: Any) -> Engine:
    return tiny.make_engine(model, speculative={"num_speculative_tokens": 5} | made.save(folder) | settings)


def is_reduced(made: Made) -> bool:
    return "d2t" in made.tensors


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_checkpoints_load_and_say_their_method(name: str, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    drafter = load(model, made, tmp_path).drafter
    assert drafter is not None
    assert drafter.taps == made.meaning.taps
    assert method_of(read_checkpoint(str(tmp_path))) == ("dflash" if name == "dspark no markov" else made.method)


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_missing_tensor_is_named(name: str, tensor: str, model: LlamaModel, tmp_path: Path) -> None:
    made = WHOLE[name]()
    del made.tensors[tensor]
    shared = {"embed_tokens.weight"} if is_reduced(made) else SHARED
    if tensor in shared | UNREAD:
        assert load(model, made, tmp_path).drafter is not None
        return
    with pytest.raises(DrafterMismatch, match=tensor.replace(".", r"\.")):
        load(model, made, tmp_path)


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_name_is_named(name: str, tensor: str, model: LlamaModel, tmp_path: Path) -> None:
    made = WHOLE[name]()
    made.tensors["other." + tensor] = made.tensors.pop(tensor)
    with pytest.raises(DrafterMismatch, match=tensor.replace(".", r"\.")):
        load(model, made, tmp_path)


@pytest.mark.parametrize("spoil", DAMAGES)
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_tensor_of_another_type_or_shape_is_named(
    name: str, tensor: str, spoil: Callable[[Tensor], Tensor], model: LlamaModel, tmp_path: Path
) -> None:
    made = WHOLE[name]()
    made.tensors[tensor] = spoil(made.tensors[tensor])
    with pytest.raises(DrafterMismatch, match=tensor.replace(".", r"\.")):
        load(model, made, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_a_value_that_is_not_finite_is_refused(
    name: str, tensor: str, value: float, model: LlamaModel, tmp_path: Path
) -> None:
    made = WHOLE[name]()
    if not made.tensors[tensor].is_floating_point():
        return
    made.tensors[tensor].view(-1)[-1] = value
    with pytest.raises(DrafterMismatch, match="NaN or infinity in " + tensor.replace(".", r"\.")):
        load(model, made, tmp_path)


@pytest.mark.parametrize("name", WHOLE)
def test_half_precision_is_widened(name: str, model: LlamaModel, tmp_path: Path) -> None:
    made = WHOLE[name]()
    made.tensors = {key: t.bfloat16() if t.is_floating_point() else t for key, t in made.tensors.items()}
    assert load(model, made, tmp_path).drafter is not None


# ---- the target ----


@pytest.mark.parametrize("name", ["dflash zlab", "dspark speculators"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [({"vocab": 80}, "vocabulary"), ({"hidden_size": 96}, "width"), ({"num_layers": 2}, "layer")],
)
def test_another_target_is_refused(name: str, changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    other = tiny.tiny_model(5, **(block_checkpoints.TARGET | changes))
    with pytest.raises(DrafterMismatch, match=what):
        load(other, VARIANTS[name](), tmp_path)


def test_a_narrow_drafter_needs_ends_of_its_own(model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["dflash wide"]()
    del made.tensors["embed_tokens.weight"]
    with pytest.raises(DrafterMismatch, match="embed_tokens"):
        load(model, made, tmp_path)


@pytest.mark.parametrize("offset", [-tiny.VOCAB, tiny.VOCAB, 1])
def test_a_map_of_ids_leads_to_different_ids_of_the_target(offset: int, model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["dflash speculators"]()
    ids = made.tensors["d2t"] + torch.arange(len(made.tensors["d2t"]))
    # Past the ends of the vocabulary, or onto the neighbour's id.
    made.tensors["d2t"][0] = ids[1] if offset == 1 else offset
    with pytest.raises(DrafterMismatch, match="d2t"):
        load(model, made, tmp_path)


# ---- settings ----


def _edit(made: Made, path: str, value: Any) -> Made:
    table, key = made.config, path
    if "." in path:
        outer, _, key = path.partition(".")
        table = made.config[outer]
    if value is None:
        del table[key]
    else:
        table[key] = value
    return made


BAD_KEYS: list[tuple[str, str, Any]] = [
    ("dflash zlab", "dflash_config.mask_token_id", None),
    ("dflash zlab", "dflash_config.mask_token_id", -1),
    ("dflash zlab", "dflash_config.mask_token_id", tiny.VOCAB),
    ("dflash zlab", "dflash_config.target_layer_ids", None),
    ("dflash zlab", "dflash_config.target_layer_ids", []),
    ("dflash zlab", "dflash_config.target_layer_ids", [3, 1, 0]),
    ("dflash zlab", "dflash_config.target_layer_ids", [0, 1, 1]),
    ("dflash zlab", "dflash_config.target_layer_ids", [0, 1, 4]),
    ("dflash zlab", "dflash_config.target_layer_ids", [-2, 1, 2]),
    ("dflash zlab", "dflash_config.target_layer_ids", [0, 1]),
    ("dflash zlab", "num_target_layers", 5),
    ("dflash zlab", "layer_types", ["full_attention"]),
    ("dflash zlab", "layer_types", ["linear_attention"] * 3),
    ("dflash zlab", "layer_types", ["sliding_attention"] * 3),
    ("dflash zlab", "block_size", 0),
    ("dflash zlab", "is_causal", "yes"),
    ("dflash zlab", "hidden_act", "gelu"),
    ("dflash zlab", "model_type", "gemma4_text"),
    ("dflash zlab", "is_neox_style", False),
    ("dflash zlab", "attention_value_scale", 0.5),
    ("dflash zlab", "num_hidden_layers", 2),
    ("dflash zlab", "num_hidden_layers", 4),
    ("dflash zlab", "head_dim", 64),
    ("dflash zlab", "hidden_size", None),
    ("dflash speculators", "draft_vocab_size", tiny.VOCAB),
    ("dflash speculators", "draft_vocab_size", tiny.VOCAB + 1),
    ("dflash speculators", "aux_hidden_state_layer_ids", [0, 2, 5]),
    ("dflash speculators", "mask_token_id", None),
    ("dspark deepspec", "markov_rank", 9),
    ("dspark deepspec", "markov_rank", -1),
    ("dspark deepspec", "markov_head_type", "gated"),
    ("dspark deepspec", "markov_head_type", "sparse"),
    ("dspark deepspec", "confidence_head_with_markov", False),
    ("dspark deepspec", "enable_confidence_head", "often"),
    ("dspark gated", "markov_head_type", "vanilla"),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD_KEYS)
def test_a_config_that_does_not_belong_is_refused(
    name: str, key: str, value: Any, model: LlamaModel, tmp_path: Path
) -> None:
    made = _edit(VARIANTS[name](), key, value)
    with pytest.raises((DrafterMismatch, LoadError)) as caught:
        load(model, made, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "beyond"), [("dflash zlab", 32), ("dflash deepspec", 14), ("dspark deepspec", 14)])
def test_a_block_drafter_drafts_beyond_its_block(name: str, beyond: int, model: LlamaModel, tmp_path: Path) -> None:
    """Twice what it was trained for; the contract suite holds the text against plain decoding."""
    engine = load(model, VARIANTS[name](), tmp_path, num_speculative_tokens=beyond)
    request = tiny.make_request("0", tiny.random_prompt(0, 9), max_tokens=2 * beyond)
    assert tiny.tokens_of(engine, [request]) == tiny.tokens_of(tiny.make_engine(model), [request])
    assert engine.stats.speculation.num_draft_tokens >= beyond


def test_topk_is_dsparks_and_at_most_its_vocabulary(model: LlamaModel, tmp_path: Path) -> None:
    made = VARIANTS["dspark speculators"]()
    assert load(model, made, tmp_path, dspark_draft_topk=block_checkpoints.REDUCED).drafter is not None
    with pytest.raises(ConfigError, match="41, expected at most the 40"):
        load(model, made, tmp_path, dspark_draft_topk=block_checkpoints.REDUCED + 1)
    with pytest.raises(ConfigError, match="dspark_draft_topk"):
        load(model, VARIANTS["dflash zlab"](), tmp_path, dspark_draft_topk=3)


def test_a_dspark_checkpoint_is_no_dflash_drafter(model: LlamaModel, tmp_path: Path) -> None:
    settings = VARIANTS["dspark deepspec"]().save(tmp_path) | {"method": "dflash", "num_speculative_tokens": 5}
    with pytest.raises(LoadError, match="method dspark"):
        tiny.make_engine(model, speculative=settings)


def test_a_pickled_mask_vector_is_not_overlooked(model: LlamaModel, tmp_path: Path) -> None:
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(DrafterMismatch, match="mask_embedding"):
        load(model, VARIANTS["dflash zlab"](), tmp_path)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_drafter_needs_a_model(method: str, model: LlamaModel) -> None:
    with pytest.raises(DrafterMismatch, match=method) as caught:
        tiny.make_engine(model, speculative={"method": method, "num_speculative_tokens": 3})
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["DFlashDraftModel"]}, "eagle3"),
        ({"speculators_model_type": "peagle"}, "eagle3"),
        ({"speculators_model_type": "medusa"}, "medusa"),
        ({"model_type": "gemma4_unified_assistant"}, "gemma4_mtp"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dflash"),
        ({}, "dflash"),
    ],
)
def test_a_checkpoint_says_its_method(config: dict[str, Any], method: str | None, tmp_path: Path) -> None:
    """Of itself first, by its tensors last; never by the folder's name."""
    folder = tmp_path / "dspark-eagle3"
    VARIANTS["dflash zlab"]().save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert method_of(read_checkpoint(str(folder))) == method
