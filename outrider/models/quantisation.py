"""Whether a checkpoint's weights are quantised, and by which scheme, from what its files say of themselves.

No scheme can be read yet but GGUF's, which models/gguf.py turns into bfloat16 once: everything else is refused by the
scheme's name, before its packed tensors are taken for weights. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import LoadError
from outrider.models.arch import read_json

EXPECTED = "expected bf16, fp16 or fp32, or a GGUF"
_TABLES = ("quantization_config", "compression_config")
_INNER = ("text_config", "transformer_layer_config")
_MODELOPT = "hf_quant_config.json"
_FORM_KEYS = ("format", "fmt", "quant_algo")
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".qzeros", ".absmax")
_PLAIN = {"BF16", "F16", "F32", "F64", "I64", "BOOL"}


def stated_scheme(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """The scheme that a folder's config files state, such as "fp8" or "compressed-tensors, pack-quantized"."""
    inner = [raw[key] for key in _INNER if isinstance(raw.get(key), Mapping)]
    tables = [table[key] for table in (raw, *inner) for key in _TABLES if table.get(key)]
    if (folder / _MODELOPT).is_file():
        tables.append({"quant_method": "modelopt"} | read_json(folder / _MODELOPT).get("quantization", {}))
    if not tables:
        return None
    table = tables[0]
    if not isinstance(table, Mapping):
        return str(table)
    form = next((f", {table[key]}" for key in _FORM_KEYS if key in table), None)
    bits = f", {table['bits']} bit" if "bits" in table else ""
    return f"{table.get('quant_method', 'unnamed')}{bits if form is None else form}"


def seen_scheme(tensors: Iterable[tuple[str, str]]) -> str | None:
    """What the tensors (names, and types as safetensors spells them) show where the files state nothing."""
    for name, dtype in tensors:
        if dtype not in _PLAIN or packed_name([name]):
            return f"not stated, {name} is {dtype}"
    return None


def packed_name(names: Iterable[str]) -> str | None:
    """The first of some tensors' names that only a quantised weight has."""
    return next((name for name in names if name.endswith(_PACKED)), None)


def refuse_quantised(folder: Path, raw: Mapping[str, Any], tensors: Iterable[tuple[str, str]] = ()) -> None:
    """Raise LoadError naming the scheme that a folder's files state or, of tensors given as in `seen_scheme`, show."""
    if (scheme := stated_scheme(folder, raw) or seen_scheme(tensors)) is not None:
        raise unreadable(str(folder), scheme)


def unreadable(source: str, scheme: str) -> LoadError:
    """The error for weights in that scheme."""
    return LoadError(f"{source}: the weights are quantised ({scheme}), which cannot be read: {EXPECTED}")
