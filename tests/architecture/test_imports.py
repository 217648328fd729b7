"""The import contract of pyproject.toml is kept, and the contract can be seen to refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINTER = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the linter on the package in `folder`, with the contract of this repository."""
    command = [str(LINTER), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def skeleton(folder: Path) -> Path:
    """A copy of the package's module tree with empty files, to break one rule at a time in."""
    for path in (ROOT / "outrider").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("")
    return folder


def test_every_import_goes_downwards() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


def test_the_contract_accepts_a_tree_without_imports(tmp_path: Path) -> None:
    result = lint(skeleton(tmp_path))
    assert result.returncode == 0, result.stdout


def test_an_upward_import_is_refused_even_for_types_alone(tmp_path: Path) -> None:
    upward = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from outrider.llm import LLM\n"
    (skeleton(tmp_path) / "outrider/sampling.py").write_text(upward)
    result = lint(tmp_path)
    assert result.returncode == 1 and "outrider.sampling -> outrider.llm" in result.stdout


def test_a_module_without_a_layer_is_refused(tmp_path: Path) -> None:
    (skeleton(tmp_path) / "outrider/misc.py").write_text("")
    result = lint(tmp_path)
    assert result.returncode == 1 and "misc" in result.stdout


def test_text_below_the_facade_is_refused(tmp_path: Path) -> None:
    (skeleton(tmp_path) / "outrider/engine/engine.py").write_text("import outrider.text.tokenizer\n")
    result = lint(tmp_path)
    assert result.returncode == 1 and "outrider.engine.engine -> outrider.text.tokenizer" in result.stdout


def test_a_drafter_that_knows_another_is_refused(tmp_path: Path) -> None:
    (skeleton(tmp_path) / "outrider/drafters/ngram.py").write_text("import outrider.drafters.draft_model\n")
    result = lint(tmp_path)
    assert result.returncode == 1 and "outrider.drafters.ngram -> outrider.drafters.draft_model" in result.stdout
