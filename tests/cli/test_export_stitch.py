"""`outrider export --stitch`: a target with its module inside, or one line that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.command import Here, apart
from tests.kit.mtp import VARIANTS, Made


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """A module's folder and its target's, which has none."""
    made = VARIANTS["qwen"]()
    target = Made(made.config, made.target, {}, made.meaning).save(tmp_path / "target")
    return str(made.save_delta(tmp_path / "module")), str(target)


def test_a_module_is_stitched_and_found_again(folders: tuple[str, str], tmp_path: Path, here: Here) -> None:
    module, target = folders
    out = tmp_path / "out"
    ended = apart("export", module, "--stitch", "--target", target, "--output", str(out))
    assert (ended.code, ended.out.strip()) == (0, str(out)), ended.err
    found = json.loads(here("models", "inspect", str(out), "--json").out)
    assert found["mtp_module"]["num_modules"] == 1
    assert "MTP module inside" in here("models", "inspect", str(out)).out
    ended = here("export", module, "--stitch", "--target", target, "--output", str(out))
    assert ended.code == 2 and "is there already" in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--format is missing"),
        (["--stitch", "--format", "eagle"], "--format does not go with --stitch"),
        (["--stitch", "--dtype", "float32"], "--dtype does not go with --stitch"),
        (["--stitch", "--output", "no/such/folder/out"], "there is no folder"),
    ],
)
def test_a_refusal_is_one_line(
    here: Here, folders: tuple[str, str], tmp_path: Path, words: list[str], said: str
) -> None:
    module, target = folders
    ended = here("export", module, "--target", target, "--output", str(tmp_path / "out"), *words)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith("outrider: error: ") and said in line
    assert ended.out == "" and not (tmp_path / "out").exists()


def test_what_is_no_module_is_one_line(here: Here, folders: tuple[str, str], tmp_path: Path) -> None:
    _, target = folders
    ended = here("export", target, "--stitch", "--target", target, "--output", str(tmp_path / "out"))
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and "holds no multi-token prediction module" in line
