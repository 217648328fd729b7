"""Reads a folder of safetensors into named tensors, and checks them against the model's config before anything runs.

Not the place for other formats: models/gguf.py turns a GGUF into such a folder once, and drafting/checkpoint.py renames
drafter tensors. Names stay as Hugging Face spells them. Pickled weights are never opened: they can run code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import LoadError
from outrider.models.arch import ModelConfig, expected_shapes, parse_config, read_json
from outrider.models.gemma_config import GEMMA_FAMILIES, GemmaConfig, gemma_shapes, parse_gemma
from outrider.models.quantisation import packed_name, unreadable

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_NAMED = 3


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder by name, as stored (mapped from disk, so pages load when they are read).

    Reads model.safetensors, or the shards that model.safetensors.index.json names. Raises LoadError in one line for a
    missing, truncated or foreign file.
    """
    folder = Path(folder)
    if (folder / _SINGLE).is_file():
        return _read_file(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _read_shards(folder, folder / _INDEX)
    found = [name for name in ("pytorch_model.bin", "model.gguf") if (folder / name).exists()]
    also = f"; it holds {found[0]}, convert that to safetensors first" if found else "; check the folder's name"
    raise LoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}{also}")


def check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig | GemmaConfig, *, source: str) -> list[str]:
    """Hold the tensors against the config; gives the names that the config has no use for.

    Raises LoadError naming `source` and the first tensors that are missing, of another shape, not floating point, or
    hold a value that is not finite. Cost: one pass over the expected tensors.
    """
    shapes = tensor_shapes(config)
    if missing := [name for name in shapes if name not in tensors]:
        if (packed := packed_name(tensors)) is not None:
            raise unreadable(source, f"not stated, {packed} is {tensors[packed].dtype}")
        raise LoadError(
            f"{source} lacks {len(missing)} tensors that a {config.model_type} of {config.num_layers} layers has"
            f" ({_some(missing)}); the file is incomplete or config.json is of another model"
        )
    for name, shape in shapes.items():
        _check_tensor(name, tensors[name], shape, source)
    # Some exporters write the tied output matrix a second time; it is the embedding and not left over.
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return sorted(tensors.keys() - shapes.keys() - tied)


def parse_any(raw: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelConfig | GemmaConfig:
    """The config of a family that has code here, from its two files' contents. Raises LoadError."""
    parse = parse_gemma if raw.get("model_type") in GEMMA_FAMILIES else parse_config
    return parse(raw, generation, source=source)


def tensor_shapes(config: ModelConfig | GemmaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config must hold."""
    return gemma_shapes(config) if isinstance(config, GemmaConfig) else expected_shapes(config)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], source: str) -> None:
    if tuple(tensor.shape) != shape:
        raise LoadError(f"{source}: {name} is {list(tensor.shape)}, expected {list(shape)} from config.json")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise LoadError(f"{source}: {name} is {tensor.dtype}, expected bfloat16, float16 or float32")
    # A NaN or an infinity anywhere shows in the extremes, which cost one pass and no copy.
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise LoadError(f"{source}: {name} holds NaN or infinity, expected finite weights; fetch the file again")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"{path} is not a whole safetensors file ({reason}); fetch or convert it again") from error


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index} has no weight_map, expected tensor names with their files; fetch it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted({str(value) for value in weight_map.values()}):
        # The index comes with the download; a path in it must not lead out of the folder.
        if Path(name).name != name:
            raise LoadError(f"{index} names {name!r}, expected a file of its own folder")
        if not (folder / name).is_file():
            raise LoadError(f"{folder / name} is missing, but {index.name} lists it; fetch the shard")
        tensors |= _read_file(folder / name)
    if absent := sorted(weight_map.keys() - tensors.keys()):
        raise LoadError(f"{folder} lacks {len(absent)} tensors of {index.name} ({_some(absent)}); fetch it again")
    return tensors


def _some(names: Sequence[str]) -> str:
    rest = ", ..." if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
