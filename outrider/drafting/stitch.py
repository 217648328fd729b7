"""Puts a multi-token prediction module into a copy of its target's checkpoint, where `"method": "mtp"` finds it.

Tensors are copied as bytes, whatever their type, so that nothing is rounded and nothing large is held in memory. A
module in the Speculators format gets the names that targets use; one in a folder of its own has them already. Not here:
the output folder and its appearing at once (train/export.py). Sources of the names: vLLM Speculators'
`scripts/stitch_mtp.py`; vLLM 0.32 `qwen3_5_mtp.py` and `mimo_mtp.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from outrider.drafting.checkpoint import MODULE_KEYS, module_names, plain_name
from outrider.drafting.profile import PROFILE
from outrider.errors import DrafterMismatch, LoadError
from outrider.models.arch import FAMILIES, ConfigReader, ModelConfig, parse_config, read_json
from outrider.models.download import Progress
from outrider.models.headers import INDEX, Stored, header_bytes, read_headers
from outrider.models.quantisation import refuse_quantised

_SPECULATORS_PREFIX = "mtp_layers.0."
# What begins with the first is renamed to begin with the second; the first pair that fits counts.
_RENAMED = {
    "mtp_layers.0.input_proj.": "mtp.fc.",
    "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "mtp_layers.0.final_layernorm.": "mtp.norm.",
    _SPECULATORS_PREFIX: "mtp.layers.0.",
}
_FROZEN = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tables that a module in the Speculators format may carry; the target has them."""
_FUSIONS = (".fc.weight", ".input_proj.weight", ".eh_proj.weight")
# The key that counts modules, by what their tensors' names begin with, where neither config has any.
_KEYS = {"mtp": "mtp_num_hidden_layers"}
_OWN_HEAD = "mtp.lm_head.weight"
_QWEN_LAYOUT = _OWN_HEAD.partition(".")[0]
_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_LEFT_OUT = (INDEX, "config.json", "outrider.json", PROFILE)
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Plan:
    """A checkpoint to be: config.json, the tensors of each shard by name, and files that are copied as they are."""

    config: dict[str, Any]
    shards: list[dict[str, Stored]]
    files: list[Path]

    @property
    def num_bytes(self) -> int:
        """What it takes on disk, but for headers."""
        tensors = sum(tensor.num_bytes for shard in self.shards for tensor in shard.values())
        return tensors + sum(file.stat().st_size for file in self.files)


def plan_stitch(drafter: Path, target: Path) -> Plan:
    """What the module in one folder and the target in the other make together; a module that the target has gives way.

    Raises DrafterMismatch naming what does not fit, LoadError for a folder that cannot be read. Cost: headers are read.
    """
    ours, theirs = read_json(drafter / "config.json"), read_json(target / "config.json")
    for folder, config in ((drafter, ours), (target, theirs)):
        refuse_quantised(folder, config)
    base = read_headers(target)
    module = _module(drafter, ours, base)
    _check_target(drafter, ours, theirs, module)
    new = set(map(plain_name, module))
    kept = {name: tensor for name, tensor in base.items() if plain_name(name) not in new}
    if module_names([plain_name(name) for name in kept]) and _layouts(kept) != _layouts(module):
        raise _mismatch(drafter, "has a module in another layout than the target's own one: use its own target")
    files = dict.fromkeys(tensor.file for tensor in kept.values())
    shards = [{name: tensor for name, tensor in kept.items() if tensor.file == file} for file in files]
    copied = [path for path in sorted(target.iterdir()) if path.is_file() and _is_copied(path.name)]
    copied += [drafter / PROFILE] if (drafter / PROFILE).is_file() else []
    return Plan(_config(ours, theirs, module), [*shards, module], copied)


def write_plan(plan: Plan, folder: Path, progress: Progress) -> None:
    """Write the checkpoint into an empty folder, in shards with an index."""
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(plan.shards, start=1):
        progress("copying weights", index - 1, len(plan.shards))
        name = f"model-{index:05}-of-{len(plan.shards):05}.safetensors"
        _write_shard(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    progress("copying weights", len(plan.shards), len(plan.shards))
    total = sum(tensor.num_bytes for shard in plan.shards for tensor in shard.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(folder / "config.json", plan.config)
    for file in plan.files:
        shutil.copyfile(file, folder / file.name)


def _module(drafter: Path, config: Mapping[str, Any], base: Mapping[str, Stored]) -> dict[str, Stored]:
    """The module's tensors under the names that the target's checkpoint is to have."""
    tensors = read_headers(drafter)
    names = module_names([plain_name(name) for name in tensors])
    found = {name: tensor for name, tensor in tensors.items() if plain_name(name) in names}
    is_speculators = "speculators_model_type" in config
    if not found:
        raise _mismatch(drafter, "holds no multi-token prediction module: no tensor mtp.* or mtp_layers.*")
    left = sorted(tensors.keys() - found.keys() - set(_FROZEN if is_speculators else ()))
    if left:
        raise _mismatch(drafter, f"has {left[0]} beside its module: expected a module apart from its target")
    if not is_speculators:
        return found
    renamed = {_renamed(plain_name(name)): tensor for name, tensor in found.items()}
    if any(_EXPERTS.fullmatch(name) for name in base):
        return renamed
    return dict(pair for name, tensor in renamed.items() for pair in _one_by_one(name, tensor))


def _renamed(name: str) -> str:
    old, new = next(((old, new) for old, new in _RENAMED.items() if name.startswith(old)), ("", ""))
    return new + name.removeprefix(old)


def _one_by_one(name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
    """A stack of experts' matrices as the single ones, which are runs of its bytes; anything else as it is."""
    match = _EXPERTS.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    prefix, kind = match.groups()
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    count, rows, columns = tensor.shape
    size = tensor.num_bytes // (count * len(parts))
    for index in range(count * len(parts)):
        single = replace(tensor, shape=(rows // len(parts), columns), start=tensor.start + index * size, num_bytes=size)
        yield f"{prefix}.{index // len(parts)}.{parts[index % len(parts)]}.weight", single


def _check_target(
    drafter: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any], module: Mapping[str, Stored]
) -> None:
    """Raise DrafterMismatch where the module was made for another target, or would be read differently inside it."""
    inner = ours.get("transformer_layer_config")
    stated, text = inner if isinstance(inner, Mapping) else ours, theirs.get("text_config") or theirs
    for key in ("hidden_size", "vocab_size"):
        if stated.get(key) is not None and stated[key] != text.get(key):
            raise _mismatch(drafter, f"has {key} {stated[key]}, the target {text.get(key)}: use its own target")
    width = ConfigReader(text, str(drafter)).count("hidden_size")
    fusion = next((name for name in module if name.endswith(_FUSIONS)), None)
    if fusion is None or module[fusion].shape != (width, 2 * width):
        has = "lacks mtp.fc.weight" if fusion is None else f"has {fusion} of shape {list(module[fusion].shape)}"
        raise _mismatch(drafter, f"{has}, expected {[width, 2 * width]} for a target {width} wide")
    if stated is ours and {ours.get("model_type"), theirs.get("model_type")} <= set(FAMILIES):
        alike, other = (_comparable(config, source) for config, source in ((ours, drafter), (theirs, "the target")))
        if differs := [key for key in alike if alike[key] != other[key]]:
            key = differs[0]
            raise _mismatch(drafter, f"has {key} {alike[key]}, the target {other[key]}: use its own target")


def _comparable(config: Mapping[str, Any], source: object) -> dict[str, Any]:
    """What a module's layer depends on."""
    says_nothing = {"dtype", "eos_token_ids", "bos_token_id", "tie_word_embeddings", "max_position_embeddings"}
    found: ModelConfig = parse_config(config, {}, source=str(source))
    return {key: value for key, value in asdict(found).items() if key not in says_nothing}


def _config(ours: Mapping[str, Any], theirs: Mapping[str, Any], module: Mapping[str, Stored]) -> dict[str, Any]:
    """The target's config with the number of modules, and the size of the drafted vocabulary if it is the module's."""
    config, inner = dict(theirs), theirs.get("text_config") or {}
    stated = next((key for key in MODULE_KEYS if ours.get(key)), None)
    by_layout = MODULE_KEYS[1] if _QWEN_LAYOUT in _layouts(module) else MODULE_KEYS[0]
    key = next((key for key in MODULE_KEYS if key in inner or key in theirs), stated or by_layout)
    count = max(inner.get(key) or theirs.get(key) or 0, ours[stated] if stated else 1)
    if key in inner:
        config["text_config"] = {**inner, key: count}
    else:
        config[key] = count
    if _OWN_HEAD in module and "draft_vocab_size" in ours:
        config["draft_vocab_size"] = ours["draft_vocab_size"]
    return config


def _layouts(names: Iterable[str]) -> set[str]:
    """What the names of module tensors begin with: one word a layout."""
    plain = [plain_name(name) for name in names]
    return {name.partition(".")[0] for name in module_names(plain)}


def _is_copied(name: str) -> bool:
    return not name.startswith(".") and name not in _LEFT_OUT and not name.endswith(_OTHER_WEIGHTS)


def _write_shard(path: Path, tensors: Mapping[str, Stored]) -> None:
    with path.open("wb") as out:
        out.write(header_bytes((name, t.dtype, t.shape, t.num_bytes) for name, t in tensors.items()))
        for tensor in tensors.values():
            with tensor.file.open("rb") as source:
                source.seek(tensor.start)
                _copy(source, out, tensor.num_bytes)
        out.flush()
        os.fsync(out.fileno())


def _copy(source: IO[bytes], out: IO[bytes], num_bytes: int) -> None:
    while num_bytes:
        chunk = source.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise LoadError(f"{source.name} ended early: it changed while it was read")
        out.write(chunk)
        num_bytes -= len(chunk)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _mismatch(drafter: Path, what: str) -> DrafterMismatch:
    return DrafterMismatch(f"drafter {drafter} {what}", param="model")
