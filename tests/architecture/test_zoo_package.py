"""The zoo in this repository: whole drafters under the names of their methods, small, and all of it in the wheel."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outrider.drafting import registry
from outrider.drafting.profile import PROFILE, read_profile
from outrider.drafting.zoo import GROUP
from tests.kit.source import ROOT
from tests.kit.zoo import profile, put_profile

ZOO = ROOT / "zoo"
MAX_BYTES = 30_000_000
REQUIRED = {"config.json", "model.safetensors", PROFILE}


def faults(module: Path, packed: Sequence[str]) -> Iterator[str]:
    """What is wrong with the drafters in a module's folder, of which the wheel takes the patterns `packed`."""
    taken = {file for pattern in packed for file in module.glob(pattern)}
    for folder in (path for path in sorted(module.glob("*/*")) if path.is_dir() and path.parent.name != "__pycache__"):
        name, files = folder.relative_to(module).as_posix(), {file for file in folder.rglob("*") if file.is_file()}
        if lacking := REQUIRED - {file.name for file in files}:
            yield f"{name} lacks {sorted(lacking)}"
            continue
        found = read_profile(folder)
        if found is None or found.method != folder.name or found.method not in registry.names():
            yield f"{name} is not named after a method that its profile has"
        if sum(file.stat().st_size for file in files) > MAX_BYTES:
            yield f"{name} is too large"
        if left := files - taken:
            yield f"{name}: the wheel leaves out {sorted(file.name for file in left)}"


def packed_patterns() -> list[str]:
    settings = tomllib.loads((ZOO / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["entry-points"][GROUP] == {"zoo": "outrider_zoo"}
    return list(settings["tool"]["setuptools"]["package-data"]["outrider_zoo"])


def put_drafter(module: Path, method: str = "dspark", **files: int) -> Path:
    folder = put_profile(module / "tiny" / method, profile("aa"))
    for name, size in ({"config.json": 2, "model.safetensors": 1000} | files).items():
        (folder / name).write_bytes(bytes(size))
    return folder


@pytest.mark.parametrize(
    ("method", "files", "fault"),
    [
        ("dspark", {}, None),
        ("dflash", {}, "is not named after a method"),
        ("dspark", {"model.safetensors": MAX_BYTES}, "is too large"),
        ("dspark", {"optimizer.pt": 1}, r"leaves out \['optimizer.pt'\]"),
    ],
)
def test_a_bad_drafter_is_seen(method: str, files: dict[str, int], fault: str | None, tmp_path: Path) -> None:
    put_drafter(tmp_path, method, **files)
    found = list(faults(tmp_path, packed_patterns()))
    assert found == [] if fault is None else len(found) == 1 and re.search(fault, found[0])


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_drafter_that_is_not_whole_is_seen(name: str, tmp_path: Path) -> None:
    (put_drafter(tmp_path) / name).unlink()
    assert list(faults(tmp_path, packed_patterns())) == [f"tiny/dspark lacks ['{name}']"]


def test_our_zoo_is_in_order() -> None:
    assert (ZOO / "outrider_zoo" / "__init__.py").is_file()
    assert list(faults(ZOO / "outrider_zoo", packed_patterns())) == []
