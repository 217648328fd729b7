"""The budgets that keep the code readable: lengths of files and functions, parameters, docstrings, names of modules."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

import pytest

from outrider.drafting import registry
from tests.kit.source import PACKAGE, Checker, Function, findings, functions, name_of, num_lines, trees

MAX_FILE_LINES = 399
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 12
MAX_PARAMETERS = 6
CATCH_ALL_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


def long_functions(tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if num_lines(function) > MAX_FUNCTION_LINES:
            yield f"line {function.lineno}: {function.name} has {num_lines(function)} lines"


def crowded_functions(tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        arguments = function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        names += [item.arg for item in (arguments.vararg, arguments.kwarg) if item is not None]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            yield f"line {function.lineno}: {function.name} takes {count} parameters"


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


def catch_all_names(path: str) -> set[str]:
    """Parts of a module's path that would be a drawer for everything."""
    return CATCH_ALL_NAMES & set(path.removesuffix(".py").split("/"))


RULES: list[Checker] = [long_functions, crowded_functions, without_prose, without_docstring]
LONG_BODY = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES))
JUST_SHORT_ENOUGH = LONG_BODY.removesuffix("\n    x = 1")
BAD: dict[Checker, list[str]] = {
    long_functions: [f"def f():\n{LONG_BODY}", f"class C:\n async def f(self):\n  def g():\n{LONG_BODY}"],
    crowded_functions: [
        "def f(a, b, c, d, e, f, g): ...",
        "def f(a, b, c, *, d, e, f, g): ...",
        "class C:\n    def f(self, a, b, c, d, e, *f, **g): ...",
    ],
    without_prose: ["import torch\n'too late'", "# only a comment"],
    without_docstring: ["def f(): ...", "class C: ...", "class C:\n 'said'\n def f(self): ...", "async def f(): ..."],
}
GOOD: dict[Checker, str] = {
    long_functions: f"def f():\n{JUST_SHORT_ENOUGH}",
    crowded_functions: "class C:\n @classmethod\n def g(cls, a, b, c, d, e, f): ...\ndef h(*, a, b, c, d, e, f): ...",
    without_prose: "'''What it is.'''\nimport torch",
    without_docstring: "def _f(): ...\nclass C:\n 'said'\n def __init__(self): ...\n def f(self):\n  'said'",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_sees_what_is_bad_and_passes_what_is_good(rule: Checker) -> None:
    for snippet in BAD[rule]:
        assert list(rule(ast.parse(snippet))), snippet
    assert not list(rule(ast.parse(GOOD[rule])))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Checker) -> None:
    assert findings(rule) == []


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in trees()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_the_median_function_is_short() -> None:
    lengths = [num_lines(function) for tree in trees().values() for function in functions(tree)]
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES


def test_no_module_is_a_drawer_for_everything() -> None:
    assert catch_all_names("outrider/engine/utils.py") and catch_all_names("outrider/common/shapes.py")
    assert [name_of(path) for path in trees() if catch_all_names(name_of(path))] == []


def test_every_registered_method_has_its_file_and_every_file_its_method() -> None:
    leaves = {path.stem for path in (PACKAGE / "drafters").glob("*.py")} - {"__init__"}
    assert leaves == set(registry.names())
