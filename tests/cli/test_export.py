"""`outrider export`: one folder on stdout, or one line that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import block_checkpoints, tiny
from tests.kit.command import Here, apart


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """A drafter's folder and its target's."""
    block_checkpoints.VARIANTS["dflash zlab"]().save(tmp_path / "drafter")
    target = tiny.save_tiny(tmp_path / "target", 5, **block_checkpoints.TARGET)
    return str(tmp_path / "drafter"), str(target)


def test_a_drafter_is_exported_and_its_folder_printed(here: Here, folders: tuple[str, str], tmp_path: Path) -> None:
    drafter, target = folders
    out = tmp_path / "out"
    ended = here("export", drafter, "--format", "speculators", "--target", target, "--output", str(out))
    assert (ended.code, ended.out.strip(), ended.err) == (0, str(out), "")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == "dflash" and config["torch_dtype"] == "bfloat16"
    # What was written can be exported in turn.
    words = ["--format", "z-lab", "--target", target, "--output", str(tmp_path / "back"), "--dtype", "float32"]
    assert here("export", str(out), *words).code == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["DFlashDraftModel"] and config["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "gguf"], "--format is 'gguf', expected one of speculators, eagle, z-lab, deepspec"),
        (["--format", "eagle"], "--format eagle is not one of dflash's"),
        (["--format", "deepspec"], "sample_from_anchor is False, and --format deepspec holds only True"),
        (["--format", "z-lab", "--dtype", "int4"], "--dtype is 'int4'"),
        (["--format", "z-lab", "--target", "no/where/at/all"], "no model 'no/where/at/all'"),
    ],
)
def test_a_refusal_is_one_line(
    here: Here, folders: tuple[str, str], tmp_path: Path, words: list[str], said: str
) -> None:
    drafter, target = folders
    ended = here("export", drafter, "--target", target, "--output", str(tmp_path / "out"), *words)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith("outrider: error: ") and said in line
    assert ended.out == "" and not (tmp_path / "out").exists()


def test_a_command_of_its_own(folders: tuple[str, str], tmp_path: Path) -> None:
    drafter, target = folders
    out = tmp_path / "out"
    ended = apart("export", drafter, "--format", "z-lab", "--target", target, "--output", str(out))
    assert (ended.code, ended.out.strip()) == (0, str(out)), ended.err
    again = apart("export", drafter, "--format", "z-lab", "--target", target, "--output", str(out))
    assert again.code == 2 and "is there already" in again.err and again.err.count("\n") == 1
