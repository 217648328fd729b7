"""From a model's name to a running target: the one place that knows which class runs which family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.config import Dtype
from outrider.errors import ConfigError, LoadError
from outrider.models.arch import FAMILIES, read_files
from outrider.models.gemma import GemmaModel, text_names
from outrider.models.gemma_config import GEMMA_FAMILIES, GemmaConfig
from outrider.models.hf import load_hf
from outrider.models.llama import LlamaModel
from outrider.models.loading import check_tensors, load_tensors, parse_any
from outrider.models.store import resolve
from outrider.models.target import Target
from outrider.models.unknown_keys import target_keys, warn_of_unknown_keys
from outrider.native import library

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None) -> Target:
    """Load a built-in name, folder, GGUF file or hub name. Raises LoadError or ConfigError in one line.

    `max_len` is the longest sequence it must take (the rotary tables' length); None takes the model's own.
    """
    folder = resolve(name)
    raw, generation = read_files(folder)
    warn_of_unknown_keys(raw, target_keys(raw), source=str(folder), effect="its text may be another than intended")
    if not runs_here(raw):
        return load_hf(folder, dtype=dtype, device=device)
    config, tensors = parse_any(raw, generation, source=str(folder / "config.json")), load_tensors(folder)
    if isinstance(config, GemmaConfig):
        tensors = text_names(tensors)
    # What the target itself does not run may be a drafter's module, which reads the folder again.
    left = set(check_tensors(tensors, config, source=str(folder)))
    on_device = {key: tensor.to(device=device, dtype=dtype) for key, tensor in tensors.items() if key not in left}
    max_len = max_len or config.max_position_embeddings
    if isinstance(config, GemmaConfig):
        return GemmaModel(config, on_device, max_len=max_len, folder=folder)
    return LlamaModel(config, on_device, max_len=max_len, folder=folder)


def runs_here(raw: Mapping[str, Any]) -> bool:
    """Whether code of our own runs this config; transformers has the other families, and Gemma 4's experts."""
    family, text = raw.get("model_type"), raw.get("text_config") or raw
    return family in FAMILIES or (family in GEMMA_FAMILIES and not text.get("enable_moe_block"))


def pick_device(name: str) -> torch.device:
    """The torch device of a setting; auto takes an accelerator if there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", param="device") from error
    return device


def pick_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """The torch type of a setting; auto is bfloat16 on an accelerator and where the C kernels run, else float32."""
    if name != "auto":
        return _DTYPES[name]
    return torch.bfloat16 if device.type != "cpu" or library() is not None else torch.float32


__all__ = ["LoadError", "load_model", "pick_device", "pick_dtype"]
