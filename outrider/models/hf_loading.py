"""From a checkpoint's files to a transformers model of its text part, weights in place, or one line that says why not.

transformers brings the architecture, and the rules from published tensor names to its own (experts stored one by one,
old spellings); files are read by models/loading.py, from the folder alone. Code that comes with a checkpoint is never
run: a family that transformers does not know by itself is refused. Source: transformers 5.24, `modeling_utils.py`,
`conversion_mapping.py`.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import LoadError
from outrider.models.arch import ALIASES, TargetConfig, read_ends
from outrider.models.gemma import text_names
from outrider.models.hf_attention import NAME, attention

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_LAYER_KINDS = {
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "attention",
    "mamba",
    "mamba2",
    "conv",
    "minimax_m3_sparse",
}


def read_hf(raw: Mapping[str, Any], source: str) -> Any:
    """transformers' config of the text part of what config.json says. Raises LoadError in one line.

    Refused: a family that transformers does not know, and positions or layers that depend on more than a row's own
    text.
    """
    transformers = _transformers(source)
    family = ALIASES.get(str(raw.get("model_type")), raw.get("model_type"))
    if family not in transformers.CONFIG_MAPPING:
        raise LoadError(
            f"{source}: model_type {raw.get('model_type')!r} is not known here or to transformers" + _code(raw)
        )
    try:
        whole = transformers.CONFIG_MAPPING[family].from_dict(dict(raw) | {"model_type": family})
    except Exception as error:
        raise LoadError(f"{source} is not a {family} that transformers reads: {_one_line(error)}") from error
    text = whole.get_text_config(decoder=True)
    if text is not whole:
        inner = raw.get("text_config") or {}
        text.tie_word_embeddings = inner.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)) or (
            "tie_word_embeddings" not in {**raw, **inner} and text.tie_word_embeddings
        )
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise LoadError(f"{source}: transformers has no causal language model for model_type {text.model_type!r}")
    _refuse_dependence(text, source)
    return text


def target_config(text: Any, raw: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> TargetConfig:
    """What everybody may know of the target."""
    inner = raw.get("text_config") or {}
    given = {**inner, **{key: value for key, value in raw.items() if value is not None}}
    return TargetConfig(
        model_type=str(raw["model_type"]),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        **read_ends(generation, given, source),
        dtype=next((name for key in ("dtype", "torch_dtype") if isinstance(name := given.get(key), str)), None),
    )


def build_hf(text: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, source: str) -> Any:
    """The causal language model with these weights, in evaluation mode on the device.

    Raises LoadError naming the first tensors that are missing, of another shape, or not finite. Tensors that the model
    has no use for are left: they may be a drafter's module.
    """
    transformers = _transformers(source)
    transformers.AttentionInterface.register(NAME, attention)
    tensors = text_names(tensors)
    if "lm_head.weight" in tensors:
        text.tie_word_embeddings = False
    family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    try:
        with _names_of_the_whole(text):
            model, info = family.from_pretrained(
                None,
                config=text,
                state_dict=dict(tensors),
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{source} cannot be loaded as a {text.model_type}: {_one_line(error)}") from error
    _check(model, info, text, source)
    return model.eval().requires_grad_(False).to(device)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and reports off the terminal: what matters of them is raised."""
    theirs = importlib.import_module("transformers.utils.logging")
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def build_layer(model: Any, like: Any, tensors: Mapping[str, Tensor], source: str) -> Any:
    """One more decoder layer of a model's own kind, that of `like`, with these weights.

    `tensors` are named as in a published file, without what stands before a layer's own names. Raises LoadError naming
    what is missing, of another shape, or left over.
    """
    loading = importlib.import_module("transformers.modeling_utils")
    with _names_of_the_whole(model.config):
        rules = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    index = next(m.layer_idx for m in like.modules() if isinstance(getattr(m, "layer_idx", None), int))
    with torch.device("meta"):
        layer = type(like)(model.config, index)
    weight = model.get_input_embeddings().weight
    # A shell of the model that has this one layer, under the number of the one that it is like.
    shell, base = copy.copy(model), copy.copy(model.base_model)
    base._modules = {"layers": nn.ModuleDict({str(index): layer})}
    shell._modules = {model.base_model_prefix: base}
    plan = model._get_dtype_plan(weight.dtype)
    how = loading.LoadStateDictConfig(dtype=weight.dtype, dtype_plan=plan, weight_mapping=rules)
    named = {f"{model.base_model_prefix}.layers.{index}.{name}": tensor for name, tensor in tensors.items()}
    try:
        info, _ = loading.convert_and_load_state_dict_in_model(shell, named, how)
    except Exception as error:
        raise LoadError(f"{source} cannot be loaded as a layer: {_one_line(error)}") from error
    if left := sorted(info.unexpected_keys):
        raise LoadError(f"{source} has {_some(left)}, which a layer of {model.config.model_type} has no use for")
    _check(layer, vars(info), model.config, source)
    return layer.eval().requires_grad_(False).to(weight.device)


def _transformers(source: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise LoadError(
            f"{source}: this family runs on transformers, which is missing: pip install outrider[hf]"
        ) from error


def _code(raw: Mapping[str, Any]) -> str:
    return "; it comes with code of its own (auto_map), which is never run: trust_remote_code is off" * (
        "auto_map" in raw
    )


def _refuse_dependence(text: Any, source: str) -> None:
    rope = getattr(text, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    for kind in {table.get("rope_type") for table in tables} & set(_LENGTH_DEPENDENT):
        raise LoadError(f"{source}: rope_type {kind!r} turns rows by the longest text beside them, expected another")
    if unknown := set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS:
        raise LoadError(f"{source}: layer_types has {min(unknown)!r}, which is not implemented")


@contextmanager
def _names_of_the_whole(text: Any) -> Iterator[None]:
    """Let a text part whose tensors are spelt by its larger model's rules be read by them; then all is as before."""
    rules = importlib.import_module("transformers.conversion_mapping")
    ours = text.model_type
    theirs = rules.get_checkpoint_conversion_mapping(ours.removesuffix("_text"))
    if theirs is None or rules.get_checkpoint_conversion_mapping(ours) is not None:
        yield
        return
    rules.register_checkpoint_conversion_mapping(ours, theirs)
    try:
        yield
    finally:
        del rules._checkpoint_conversion_mapping_cache[ours]
        rules.USER_REGISTERED_MAPPINGS.discard(ours)


def _check(model: Any, info: Mapping[str, Any], text: Any, source: str) -> None:
    if missing := sorted(info["missing_keys"]):
        raise LoadError(f"{source} lacks {len(missing)} tensors that a {text.model_type} has ({_some(missing)})")
    if wrong := sorted(info["mismatched_keys"]):
        name, given, expected = wrong[0]
        raise LoadError(f"{source}: {name} is {list(given)}, expected {list(expected)} from config.json")
    for name, tensor in model.named_parameters():
        if not all(torch.isfinite(edge) for edge in torch.aminmax(tensor)):
            raise LoadError(f"{source}: {name} holds NaN or infinity, expected finite weights; fetch the file again")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
