"""From a model's name to a running target: the one place that knows which class runs which family."""

from __future__ import annotations

import torch

from outrider.config import Dtype
from outrider.errors import ConfigError, LoadError
from outrider.models.arch import read_config
from outrider.models.llama import LlamaModel
from outrider.models.loading import check_tensors, load_tensors
from outrider.models.store import resolve
from outrider.models.target import Target
from outrider.native import library

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model(name: str, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None) -> Target:
    """Load a built-in name, folder, GGUF file or hub name. Raises LoadError or ConfigError in one line.

    `max_len` is the longest sequence it must take (the rotary tables' length); None takes the model's own.
    """
    folder = resolve(name)
    config = read_config(folder)
    tensors = load_tensors(folder)
    # What the target itself does not run may be a drafter's module, which reads the folder again.
    left = set(check_tensors(tensors, config, source=str(folder)))
    on_device = {key: tensor.to(device=device, dtype=dtype) for key, tensor in tensors.items() if key not in left}
    return LlamaModel(config, on_device, max_len=max_len or config.max_position_embeddings, folder=folder)


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
