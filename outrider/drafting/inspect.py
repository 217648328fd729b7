"""What a folder, GGUF file, zoo drafter or model name is, told from headers alone: target or drafter, and what runs it.

The answer is plain data, in the order in which people read it; the command line prints it as a table or as JSON. No
weight is read and nothing is loaded, so a drafter that looks whole may still be refused by its method's own checks. Not
here: targets' own facts (models/inspect.py), and what the keys mean to a drafter (the leaves).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.drafting import registry, zoo
from outrider.drafting.block_config import MASK_KEYS, NESTED, TAP_KEYS
from outrider.drafting.checkpoint import MODULE_KEYS, method_by_marks, module_names, plain_name
from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.profile import read_profile
from outrider.errors import LoadError
from outrider.models.arch import read_json
from outrider.models.download import Progress, silent
from outrider.models.headers import Stored, read_headers
from outrider.models.inspect import TargetFacts, Weights, inspect_folder, inspect_gguf
from outrider.models.quantisation import seen_scheme, stated_scheme
from outrider.models.store import resolve
from outrider.models.unknown_keys import UnknownKey, target_keys, unknown_keys

Tensors = Mapping[str, Stored]
_MODULE_METHOD = "mtp"
# Marks of the published formats in the names of classes; the first that fits counts.
_FORMATS = {
    "DFlashDraftModel": "z-lab",
    "DSparkDraftModel": "SpecForge",
    "DSparkModel": "DeepSpec",
    "Eagle3Model": "DeepSpec",
    "Assistant": "Gemma 4 assistant",
    "Eagle3": "EAGLE",
}
# Marks of the layouts of modules in their tensors' names; the first that fits counts.
_MODULE_LAYOUTS = {
    "mtp_layers.": "mtp_layers.* (MiMo's names)",
    "transformer_layer.": "mtp.layers.* (MiniMax's names)",
    "mtp.": "mtp.* (Qwen's names)",
    "": "layers numbered on (DeepSeek's names)",
}
_NOT_HERE = {
    "mtp": "a module in the Speculators format has to be put into its target first (outrider export … --stitch)",
    "peagle": "it drafts in parallel (P-EAGLE), which is not implemented",
}


def inspect(name: str, progress: Progress = silent) -> dict[str, Any]:
    """What there is to know of a zoo drafter's name, a model's name, a folder or a GGUF file.

    Raises LoadError in one line for what is missing, damaged, or of no known kind. Cost: headers are read; a model's
    name that is not in the cache folder is fetched first.
    """
    file = Path(name).expanduser()
    if file.suffix.lower() == ".gguf" and file.is_file():
        return _target(str(file), inspect_gguf(file), [])
    drafter = next((drafter for drafter in zoo.drafters() if drafter.name == name), None)
    folder = drafter.path if drafter is not None else resolve(name, progress)
    if not (folder / "config.json").is_file():
        raise LoadError(f"{folder} is neither a model nor a drafter: it has no config.json")
    raw, tensors = read_json(folder / "config.json"), read_headers(folder)
    inner = {plain_name(key): tensor for key, tensor in tensors.items()}
    method = method_by_marks(raw, {key: tensor.shape for key, tensor in inner.items()})
    if method is None or _has_module_inside(raw, inner):
        return _inspect_target(name, folder, raw, inner)
    return _drafter(folder, raw, inner, method)


def _has_module_inside(raw: Mapping[str, Any], tensors: Tensors) -> bool:
    """Whether it is a target with a module, not a module apart from its target."""
    module = module_names(tensors)
    has_table = any(name.endswith("embed_tokens.weight") for name in tensors.keys() - module)
    return has_table and bool(module) and "speculators_model_type" not in raw


def _inspect_target(name: str, folder: Path, raw: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    facts = inspect_folder(folder)
    if facts.runs_on == "nothing" and not target_keys(raw):
        raise LoadError(f"{folder} is neither a drafter nor a model that is known here: {facts.why_not}")
    configs = []
    module = [tensors[key] for key in module_names(tensors)]
    depth = _depth(raw)
    if module:
        configs.append({"method": _MODULE_METHOD, "num_speculative_tokens": depth or 1})
    configs += [{"method": drafter.profile.method} for drafter in zoo.drafters() if drafter.profile.target == name]
    found = _target(str(folder), facts, configs)
    if module:
        found["mtp_module"] = {"num_modules": depth or 1, "num_parameters": Weights.of(module).num_parameters}
    return found


def _depth(raw: Mapping[str, Any]) -> int | None:
    """How many modules the config states."""
    inner = raw.get("text_config")
    tables = (raw, inner if isinstance(inner, Mapping) else {})
    return next((table[key] for table in tables for key in MODULE_KEYS if type(table.get(key)) is int), None)


def _target(path: str, facts: TargetFacts, configs: list[dict[str, Any]]) -> dict[str, Any]:
    if facts.runs_on != "nothing" and not configs:
        configs = [{"method": "ngram", "num_speculative_tokens": 4}]
    return {
        "path": path,
        "kind": "target",
        "family": facts.family,
        "runs_on": facts.runs_on,
        "why_not": facts.why_not,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "num_heads": facts.num_heads,
        "num_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "sliding_window": facts.sliding_window,
        "num_recurrent_layers": facts.num_states,
        "num_experts": facts.num_experts,
        "mtp_module": None,
        **_weights(facts.weights, facts.quantisation),
        "remote_code": facts.has_code,
        "unknown_keys": _said(facts.unknown, "the text"),
        "speculative_configs": configs if facts.runs_on != "nothing" else [],
    }


def _weights(weights: Weights, scheme: str | None) -> dict[str, Any]:
    return {
        "dtypes": list(weights.dtypes),
        "num_parameters": weights.num_parameters,
        "num_bytes": weights.num_bytes,
        "quantisation": scheme,
    }


def _said(found: tuple[UnknownKey, ...], what: str) -> list[dict[str, Any]]:
    """Unknown keys with what they may change."""
    return [{"key": item.key, "value": item.value, "may_change": None if item.is_off else what} for item in found]


def _drafter(folder: Path, raw: Mapping[str, Any], tensors: Tensors, method: str) -> dict[str, Any]:
    keys = ConfigKeys(_flattened(raw), str(folder), NESTED)
    scheme = stated_scheme(folder, raw) or seen_scheme((name, tensor.dtype) for name, tensor in tensors.items())
    why_not = _why_not(folder, raw, method, scheme)
    length = registry.length_for(method, folder) if method in registry.names() else None
    known = registry.known_keys(method, raw)
    unknown = tuple(unknown_keys(raw, known)) if known else ()
    return {
        "path": str(folder),
        "kind": "drafter",
        "method": method,
        "format": _format(raw, keys, tensors),
        "layout": list(_layout(keys, tensors)),
        "runs_on": "nothing" if why_not else "own code",
        "why_not": why_not,
        "target": _needs(folder, raw, keys, tensors),
        "num_layers": _num_layers(tensors),
        "hidden_size": keys.get("hidden_size"),
        "draft_vocab_size": keys.get("draft_vocab_size") or keys.get("vocab_size"),
        "taps": _taps(keys),
        "mask_token_id": next((keys.get(key) for key in MASK_KEYS if keys.get(key) is not None), None),
        "block_size": keys.get("block_size") or keys.get("dspark_block_size"),
        "num_speculative_tokens": length,
        **_weights(Weights.of(tensors.values()), scheme),
        "remote_code": "auto_map" in raw,
        "unknown_keys": _said(unknown, "the drafts"),
        "speculative_configs": [] if why_not else [_config(folder, keys, method, length)],
    }


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the keys of an inner text model beside the others."""
    inner = raw.get("text_config")
    return {**inner, **raw} if isinstance(inner, Mapping) else dict(raw)


def _why_not(folder: Path, raw: Mapping[str, Any], method: str, scheme: str | None) -> str | None:
    if scheme is not None:
        return f"its weights are quantised ({scheme})"
    if (reason := _NOT_HERE.get(str(raw.get("speculators_model_type")))) is not None:
        return reason
    if method not in registry.names():
        return f"there is no method {method} here"
    if (folder / "mask_embedding.pt").exists():
        return "it brings mask_embedding.pt, a pickle, which is never opened"
    return None


def _format(raw: Mapping[str, Any], keys: ConfigKeys, tensors: Tensors) -> str:
    if "speculators_model_type" in raw or keys.is_speculators:
        return "Speculators"
    if _is_module(tensors):
        return "a module apart from its target"
    names = " ".join(keys.architectures)
    return next((kind for mark, kind in _FORMATS.items() if mark in names), "flat")


def _is_module(tensors: Tensors) -> bool:
    """Whether there is nothing in it but a prediction module."""
    return module_names(tensors) == tensors.keys()


def _layout(keys: ConfigKeys, tensors: Tensors) -> Iterator[str]:
    """What sets this checkpoint apart from others of its method, each in a few words."""
    if any(name.startswith("midlayer.") for name in tensors):
        yield "first layer named midlayer"
    if "mask_hidden" in tensors:
        yield "drafts in parallel (P-EAGLE)"
    if keys.get("fc_norm") and keys.get("norm_output"):
        yield "EAGLE-3.1 (fc_norm, norm_output)"
    if keys.get("kv_lora_rank"):
        yield "latent attention"
    if keys.get("block_size") or keys.get("dspark_block_size"):
        yield (
            "anchor layout: every row drafts"
            if _from_anchor(keys, tensors)
            else "fill-in layout: rows after the anchor draft"
        )
    if any(name.startswith("markov_head.") for name in tensors):
        yield f"{keys.get('markov_head_type') or 'vanilla'} Markov head of rank {keys.get('markov_rank')}"
    if any(name.startswith("confidence_head.") for name in tensors):
        yield "confidence head"
    if keys.get("use_ordered_embeddings"):
        yield f"{keys.get('num_centroids')} centroids, {keys.get('centroid_intermediate_top_k')} scored"
    if module := module_names(tensors):
        yield next(words for mark, words in _MODULE_LAYOUTS.items() if any(mark in name for name in module))


def _from_anchor(keys: ConfigKeys, tensors: Tensors) -> bool:
    """Whether the block's first row drafts too; flat DSpark files that are silent mean it."""
    silent_means = not keys.is_speculators and any("DSpark" in name for name in keys.architectures)
    return keys.flag("sample_from_anchor", silent_means or any(name.startswith("markov_head.") for name in tensors))


def _needs(folder: Path, raw: Mapping[str, Any], keys: ConfigKeys, tensors: Tensors) -> dict[str, Any]:
    """The target that it was made for, as far as the files say."""
    profile = read_profile(folder)
    table = raw.get("speculators_config")
    stated = table.get("verifier") if isinstance(table, Mapping) else None
    name = stated.get("name_or_path") if isinstance(stated, Mapping) else None
    width = next(filter(None, map(keys.get, ("backbone_hidden_size", "target_hidden_size", "hidden_size"))), None)
    layers = keys.get("num_hidden_layers") if _is_module(tensors) else keys.get("num_target_layers")
    return {
        "name": profile.target if profile is not None else name,
        "vocab_size": keys.get("vocab_size"),
        "hidden_size": width,
        "num_layers": layers,
    }


def _taps(keys: ConfigKeys) -> list[int] | None:
    """Target layers that have run before each tap; None where the file leaves them to the target's depth."""
    for key, offset in TAP_KEYS:
        if isinstance(ids := keys.get(key), list) and all(type(entry) is int for entry in ids):
            return [entry + offset for entry in ids]
    return None


def _num_layers(tensors: Tensors) -> int:
    """Attention layers that it has of its own."""
    return sum(name.endswith("input_layernorm.weight") for name in tensors)


def _config(folder: Path, keys: ConfigKeys, method: str, length: int | None) -> dict[str, Any]:
    """What to draft with: the N that the files say, else the drafts of a block, else a few."""
    size = keys.get("block_size")
    by_block = size - 1 if type(size) is int and size > 1 else None
    return {"method": method, "model": str(folder), "num_speculative_tokens": length or by_block or 3}
