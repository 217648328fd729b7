"""The package's own source for tests of how it is written: its files, and their syntax trees.

Checkers that use it take trees and give findings in words, so that each can be shown a bad snippet first.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outrider"
Checker = Callable[[ast.Module], Iterator[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """The path as a finding shows it."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every Python file of the package with its tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 20, f"only {len(paths)} files under {PACKAGE}: the tests would look at nothing"
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def findings(check: Checker, *, under: str = "", besides: tuple[str, ...] = ()) -> list[str]:
    """What a checker finds in the package, or in one folder of it, besides the files named."""
    return [
        f"{name_of(path)}: {finding}"
        for path, tree in trees().items()
        if path.is_relative_to(PACKAGE / under) and path.relative_to(PACKAGE).as_posix() not in besides
        for finding in check(tree)
    ]


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(node: Function) -> int:
    """Lines from `def` to the end, docstring and all, decorators not."""
    return (node.end_lineno or node.lineno) - node.lineno + 1
