"""What tests of exported drafters share: the tiny checkpoints to export, the export itself, and what is in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from outrider.models.llama import LlamaModel
from outrider.train.export import export
from tests.kit import block_checkpoints, eagle3

Make = Callable[[], Any]
VARIANTS: dict[str, Make] = {f"eagle3 {name}": make for name, make in eagle3.VARIANTS.items()}
VARIANTS |= block_checkpoints.VARIANTS
Find = Callable[[str], tuple[str, LlamaModel]]


def convert(source: Path, kind: str, output: Path, target: str, dtype: str = "float32") -> Path:
    return export(str(source), target=target, format_name=kind, output=output, dtype=dtype)


def content(folder: Path) -> tuple[Any, dict[str, Any]]:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}
