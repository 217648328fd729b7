"""The budgets that keep the code readable: lengths of files and functions, parameters, docstrings, names of modules."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.drafting import registry

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "outrider").rglob("*.py"))
MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 12
MAX_PARAMETERS = 6
CATCH_ALL_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[ast.Module], Iterator[str]]


def functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def num_lines(function: Function) -> int:
    """Lines of a function from its `def` to its end, without its docstring."""
    length = function.end_lineno - function.lineno + 1  # type: ignore[operator]
    first = function.body[0]
    if ast.get_docstring(function) is not None and len(function.body) > 1:
        length -= first.end_lineno - first.lineno + 1  # type: ignore[operator]
    return length


def long_functions(tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if num_lines(function) > MAX_FUNCTION_LINES:
            yield f"line {function.lineno}: {function.name} has {num_lines(function)} lines, at most {MAX_FUNCTION_LINES}"


def crowded_functions(tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        arguments = function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        names += [item.arg for item in (arguments.vararg, arguments.kwarg) if item is not None]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            yield f"line {function.lineno}: {function.name} takes {count} parameters, at most {MAX_PARAMETERS}"


def without_prose(tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "line 1: the file does not open with prose"


def without_docstring(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Public functions, classes and methods (dunder methods excepted) that say nothing about themselves."""
    for item in node.body:
        if not isinstance(item, (Function, ast.ClassDef)) or item.name.startswith("_"):
            continue
        overloaded = any("overload" in ast.unparse(decorator) for decorator in item.decorator_list)
        if not ast.get_docstring(item) and not overloaded:
            yield f"line {item.lineno}: {item.name} has no docstring"
        if isinstance(item, ast.ClassDef):
            yield from without_docstring(item)


RULES: list[Rule] = [long_functions, crowded_functions, without_prose, without_docstring]
LONG_BODY = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
BAD: dict[Rule, list[str]] = {
    long_functions: [f"def f():\n{LONG_BODY}", f"class C:\n async def f(self):\n  def g():\n{LONG_BODY}"],
    crowded_functions: [
        "def f(a, b, c, d, e, f, g): ...",
        "def f(a, b, c, *, d, e, f, g): ...",
        "class C:\n    def f(self, a, b, c, d, e, *f, **g): ...",
    ],
    without_prose: ["import torch\n'too late'", "# only a comment"],
    without_docstring: [
        "def f(): ...",
        "class C: ...",
        "class C:\n    'said'\n    def f(self): ...",
        "async def f(): ...",
    ],
}
GOOD: dict[Rule, str] = {
    long_functions: f"def f():\n    '''One.\n\n    Two.'''\n{LONG_BODY[: LONG_BODY.rindex(chr(10))]}",
    crowded_functions: "class C:\n    def f(self, a, b, c, d, e, f): ...\n    @classmethod\n    def g(cls, a, b, c, d, e, f): ...",
    without_prose: "'''What it is.'''\nimport torch",
    without_docstring: "def _f(): ...\nclass C:\n    'said'\n    def __init__(self): ...\n    def f(self):\n        'said'",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_sees_what_is_bad_and_passes_what_is_good(rule: Rule) -> None:
    for snippet in BAD[rule]:
        assert list(rule(ast.parse(snippet))), snippet
    assert not list(rule(ast.parse(GOOD[rule])))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    assert len(FILES) > 20
    faults = [f"{path.relative_to(ROOT)}, {fault}" for path in FILES for fault in rule(ast.parse(path.read_text()))]
    assert not faults, "\n".join(faults)


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_the_median_function_is_short() -> None:
    lengths = [num_lines(function) for path in FILES for function in functions(ast.parse(path.read_text()))]
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES


def test_no_module_is_a_drawer_for_everything() -> None:
    assert not [path for path in FILES if CATCH_ALL_NAMES & {path.stem, *path.relative_to(ROOT).parts}]


def test_every_registered_method_has_its_file_and_every_file_its_method() -> None:
    leaves = {path.stem for path in (ROOT / "outrider/drafters").glob("*.py")} - {"__init__"}
    assert leaves == set(registry.names())
