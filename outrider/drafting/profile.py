"""What a drafter's folder says of its use: for which target it was trained, by which method, and how far to draft.

It lies beside config.json as speculation_profile.json and may hold more (how it was measured, on what), which is
nobody's business here. config.json says what the network is; this file, what it is good for. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import LoadError
from outrider.models.arch import read_json

PROFILE = "speculation_profile.json"
"""The file's name."""


@dataclass(frozen=True)
class Profile:
    """The part that is read: the target's name for people and its fingerprint, the method, and the best N."""

    target: str
    fingerprint: str
    method: str
    num_speculative_tokens: int


def read_profile(folder: Path) -> Profile | None:
    """The profile of a drafter's folder, None where it has none. Raises LoadError naming the file and the key."""
    path = folder / PROFILE
    if not path.is_file():
        return None
    raw = read_json(path)
    target = raw.get("target")
    if not isinstance(target, Mapping):
        raise LoadError(f"{path}: target is {target!r}, expected an object with name and fingerprint")
    length = raw.get("num_speculative_tokens")
    if type(length) is not int or length < 1:
        raise LoadError(f"{path}: num_speculative_tokens is {length!r}, expected a whole number of at least 1")
    return Profile(
        target=_text(path, target, "name"),
        fingerprint=_text(path, target, "fingerprint"),
        method=_text(path, raw, "method"),
        num_speculative_tokens=length,
    )


def read_acceptance(folder: Path) -> dict[str, float]:
    """Mean acceptance length by workload as the drafter's makers recorded it, empty where they did not.

    Raises LoadError naming the file and the workload.
    """
    path = folder / PROFILE
    recorded = read_json(path).get("acceptance") or {}
    if not isinstance(recorded, Mapping):
        raise LoadError(f"{path}: acceptance is {recorded!r:.60}, expected an object by workload")
    found = {}
    for name, entry in recorded.items():
        length = entry.get("mean_acceptance_length") if isinstance(entry, Mapping) else None
        if isinstance(length, bool) or not isinstance(length, int | float):
            raise LoadError(f"{path}: mean_acceptance_length of {name} is {length!r}, expected a number")
        found[name] = float(length)
    return found


def _text(path: Path, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise LoadError(f"{path}: {key} is {value!r}, expected a text")
    return value
