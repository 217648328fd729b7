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

ROWS = "A module imports only from the rows below its own"
ENGINE = "Inside the engine"
STRANGERS = "Drafters are strangers to each other"
NO_TEXT = "Below the facade there are only token ids, no text"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.llm import LLM"
# What is wrong: the module, the line written into it, and the contract that must break.
BAD_LINES = {
    "upwards": ("errors.py", "from outrider import config", ROWS),
    "two rows up": ("types.py", "import outrider.sampling", ROWS),
    "strangers": ("text/tokenizer.py", "from outrider.models import layers", ROWS),
    "only for types": ("sampling.py", FOR_TYPES, ROWS),
    "inside a function": ("config.py", "def f():\n    from outrider.verify import verify", ROWS),
    "a module without a layer": ("utils.py", "", ROWS),
    "an engine module without a layer": ("engine/extra.py", "", ENGINE),
    "upwards in the engine": ("engine/sequence.py", "from outrider.engine import scheduler", ENGINE),
    "strangers in the engine": ("engine/runner.py", "from outrider.engine import scheduler", ENGINE),
    "drafters know each other": ("drafters/ngram.py", "from outrider.drafters import draft_model", STRANGERS),
    "text in the engine": ("engine/engine.py", "from outrider.text import tokenizer", NO_TEXT),
    "text in a model": ("models/layers.py", "from outrider.text import tokenizer", NO_TEXT),
}
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
@pytest.mark.parametrize(("module", "line", "contract"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_breaks_its_contract(hollow: Path, module: str, line: str, contract: str) -> None:
    (hollow / "outrider" / module).write_text(line + "\n")
    done = lint(hollow)
    assert done.returncode == 1
    # An unlisted module is told of under the contract's title, every other fault by the contract's verdict.
    assert f"{contract} BROKEN" in done.stdout or (
        f"{contract}\n" in done.stdout and "not listed as layers" in done.stdout
    )


def test_every_layer_is_written_down() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    assert {contract["containers"][0] for contract in layered} == {"outrider", "outrider.engine"}
    assert all(contract["exhaustive"] for contract in layered)
