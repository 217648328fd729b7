"""What safetensors files say of their tensors before any of them is read: name, type, shape, and where the bytes lie.

Headers only, so that a look at a large checkpoint costs milliseconds, and so that tensors can be copied as bytes,
whatever their type. A file that is cut short, or whose header does not cover it, is refused. Not here: tensors
(models/loading.py). Source: the safetensors format. Imports no torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import LoadError
from outrider.models.arch import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_BITS |= {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "F4": 4}
_BITS |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it. `dtype` as the format spells it (BF16, F32, I64, …); `start` in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder by name, from model.safetensors or the shards that its index names.

    Raises LoadError in one line for a file that is missing, cut short or foreign. Cost: the headers are read.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise LoadError(f"{folder} has neither {SINGLE} nor {INDEX}; it holds {_content(folder)}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{folder / INDEX} has no weight_map, expected tensor names with their files; fetch it again")
    found: dict[str, Stored] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise LoadError(f"{folder / INDEX} names {name!r}, expected a file of its own folder")
        if not (folder / name).is_file():
            raise LoadError(f"{folder / name} is missing, but {INDEX} lists it; fetch the shard")
        found |= read_header(folder / name)
    if absent := sorted(weight_map.keys() - found.keys()):
        raise LoadError(f"{folder} lacks {absent[0]}, which {INDEX} lists; fetch it again")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of one file by name, in the order of the file. Raises LoadError in one line."""
    size = path.stat().st_size
    try:
        with path.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8))[0]
            if length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"its header would take {length} bytes of {size}")
            table = json.loads(opened.read(length))
        found = {name: _stored(path, 8 + length, entry) for name, entry in table.items() if name != "__metadata__"}
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LoadError(f"{path} is not a whole safetensors file ({reason}); fetch it again") from error
    end = max((tensor.start + tensor.num_bytes for tensor in found.values()), default=8 + length)
    if end != size:
        raise LoadError(f"{path} has {size} bytes, its header says {end}: it is cut short or damaged; fetch it again")
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def _stored(path: Path, base: int, entry: Mapping[str, Any]) -> Stored:
    start, end = entry["data_offsets"]
    made = Stored(entry["dtype"], tuple(entry["shape"]), path, base + start, end - start)
    if 8 * made.num_bytes != made.num_elements * _BITS[made.dtype]:
        raise ValueError(f"{made.dtype} of shape {list(made.shape)} in {made.num_bytes} bytes")
    return made


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The beginning of a file that holds these tensors (name, type, shape, bytes) one after the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _content(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"
