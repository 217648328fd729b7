"""The import contract of pyproject.toml holds, and breaks when a line breaks it.

The second part runs the real contract on a hollow package: the same modules, empty, with one forbidden line written in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.source import PACKAGE, ROOT

BAD_LINES = {
    "upwards": ("errors.py", "from outrider import config"),
    "two rows up": ("types.py", "import outrider.sampling"),
    "strangers": ("models/layers.py", "from outrider.text import tokenizer"),
    "only for types": (
        "sampling.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.llm import LLM",
    ),
    "inside a function": ("config.py", "def f():\n    from outrider.types import Request"),
    "a module without a layer": ("utils.py", ""),
    "an engine module without a layer": ("engine/extra.py", ""),
    "upwards in the engine": ("engine/sequence.py", "from outrider.engine import scheduler"),
    "strangers in the engine": ("engine/runner.py", "from outrider.engine import scheduler"),
    "drafters know each other": ("drafters/ngram.py", "from outrider.drafters import draft_model"),
    "text in the engine": ("engine/engine.py", "from outrider.text import tokenizer"),
}
# One run of the linter judges many lines: each must break a contract of its own copy, so each has its own.
needs_linter = pytest.mark.skipif(
    shutil.which("lint-imports", path=str(Path(sys.executable).parent)) is None, reason="import-linter is not installed"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def hollow(tmp_path: Path) -> Path:
    """The package's modules without their content, under the same contract."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    return tmp_path


@needs_linter
def test_the_contract_holds() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_linter
def test_an_empty_package_is_fine(hollow: Path) -> None:
    done = lint(hollow)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_linter
@pytest.mark.parametrize(("module", "line"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_breaks_it(hollow: Path, module: str, line: str) -> None:
    (hollow / "outrider" / module).write_text(line + "\n")
    done = lint(hollow)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout or "Missing layer" in done.stdout or "not listed" in done.stdout.lower(), done.stdout


def test_every_layer_is_written_down() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    assert {contract["containers"][0] for contract in layered} == {"outrider", "outrider.engine"}
    assert all(contract["exhaustive"] for contract in layered)
