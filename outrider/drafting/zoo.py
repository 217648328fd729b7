"""Drafters that are installed: data packages that bring trained drafters, found by themselves.

A zoo package names its module in the entry point group `outrider.drafters`; in the module's folder lies
<target>/<method>/ for each drafter, with config.json, model.safetensors and speculation_profile.json. The module is
located, never run. A drafter is matched to a target by the target's fingerprint, never by a name. Not here: loading one
(the method's leaf does), and models (models/store.py). Torch-free.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from outrider.drafting.profile import PROFILE, Profile, read_profile
from outrider.errors import ConfigError

GROUP = "outrider.drafters"
"""The entry point group that zoo packages join."""


@dataclass(frozen=True)
class ZooDrafter:
    """One installed drafter: its name in the zoo (<target>/<method>), its folder, and what its profile says."""

    name: str
    path: Path
    profile: Profile

    @property
    def size_bytes(self) -> int:
        """What the folder takes on disk."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


def drafters() -> list[ZooDrafter]:
    """Every installed drafter, by name. Raises LoadError naming a profile that cannot be read. Cost: small files."""
    found = []
    for folder in sorted(set(_folders())):
        for file in sorted(folder.glob(f"*/*/{PROFILE}")):
            profile = read_profile(file.parent)
            assert profile is not None
            found.append(ZooDrafter(file.parent.relative_to(folder).as_posix(), file.parent, profile))
    return sorted(found, key=lambda drafter: drafter.name)


def methods_for(fingerprint: str) -> list[str]:
    """The methods that some installed drafter of this target has."""
    return sorted({drafter.profile.method for drafter in drafters() if drafter.profile.fingerprint == fingerprint})


def find(method: str, fingerprint: str) -> ZooDrafter | None:
    """The installed drafter of a method for the target with that fingerprint, None if there is none.

    Raises ConfigError where there are several, since a choice would be a guess.
    """
    wanted = (method, fingerprint)
    found = [drafter for drafter in drafters() if (drafter.profile.method, drafter.profile.fingerprint) == wanted]
    if len(found) > 1:
        paths = ", ".join(str(drafter.path) for drafter in found)
        raise ConfigError(
            f'{len(found)} installed drafters of method {method} fit this target: say which as "model": {paths}',
            param="model",
        )
    return found[0] if found else None


def _folders() -> Iterator[Path]:
    for entry in entry_points(group=GROUP):
        if (folder := _folder(entry)) is not None:
            yield folder


def _folder(entry: EntryPoint) -> Path | None:
    """Where the entry's module lies; None for a package that is half gone, which offers nothing."""
    try:
        spec = importlib.util.find_spec(entry.module)
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))).resolve() if places else None
