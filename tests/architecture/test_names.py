"""One word for each thing (the glossary), and no question after a drafter's name outside the registry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from outrider.drafting import registry
from tests.kit.source import Checker, findings

# Forbidden as a part of any identifier, and what to say in its place.
WORDS = {
    "gamma": "num_speculative_tokens",
    "lookahead": "num_speculative_tokens",
    "verifier": "target",
    "proposer": "drafter",
    "tau": "mean_acceptance_length",
    "assistant": "drafter",
}
# Forbidden as whole identifiers.
NAMES = {
    "num_spec_tokens": "num_speculative_tokens",
    "accept_len": "mean_acceptance_length",
    "accept_length": "mean_acceptance_length",
    "accept_rate": "acceptance_rate",
}
# The registry knows methods by name; a checkpoint's format says which method it is for.
MAY_NAME_METHODS = ("drafting/registry.py", "drafting/checkpoint.py")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def wrong_words(tree: ast.Module) -> Iterator[str]:
    for name in _identifiers(tree):
        if name.lower() in NAMES:
            yield f"{name}: say {NAMES[name.lower()]}"
        for part in _PART.findall(name):
            if part.lower() in WORDS:
                yield f"{name}: say {WORDS[part.lower()]}"


def _identifiers(tree: ast.Module) -> Iterator[str]:
    """Every name that the file gives or uses; texts and comments may say what they like."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield name


def asks_for_a_drafter(tree: ast.Module) -> Iterator[str]:
    """Branches on which drafter or method it is: isinstance, comparison, `match`, or a lookup by the name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                asked = any(_is_drafter_class(part) for part in ast.walk(kinds))
            case ast.Compare(left=left, comparators=others):
                asked = any(_is_method(part) or _is_drafter_class(part) for part in (left, *others))
            case ast.Match(subject=subject) | ast.Subscript(slice=subject):
                asked = _is_method(subject)
            case _:
                continue
        if asked:
            yield f"line {node.lineno} asks which drafter it is: {ast.unparse(node).splitlines()[0]}"


def _is_method(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "method"


def _is_drafter_class(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name != "Drafter" and name.endswith("Drafter") and name[0].isupper()


def compares_with_a_method(tree: ast.Module) -> Iterator[str]:
    """Comparisons and `match` cases with the name of a registered method, whatever stands on the other side."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                parts: list[ast.AST] = [left, *others]
            case ast.MatchValue(value=value):
                parts = [value]
            case _:
                continue
        words = {item.value for part in parts for item in ast.walk(part) if isinstance(item, ast.Constant)}
        if words & set(registry.names()):
            yield f"line {node.lineno} compares with a method's name: {ast.unparse(node)}"


def names_a_drafter(tree: ast.Module) -> Iterator[str]:
    """Imports of a leaf of drafters/, which only the registry's strings may name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (f"imports {name}" for name in modules if name.startswith("outrider.drafters"))


def bare_excepts(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno} catches everything"


def prints(tree: ast.Module) -> Iterator[str]:
    """Calls of print: only the command line talks to a terminal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno} prints"


SNIPPETS: list[tuple[Checker, str, str]] = [
    (wrong_words, "gamma = 4", "text = 'gamma'  # gamma"),
    (wrong_words, "def f(lookahead_len): ...", "def f(ahead): ..."),
    (wrong_words, "self.num_spec_tokens", "self.num_speculative_tokens"),
    (wrong_words, "class EagleProposer: ...", "class EagleDrafter: ..."),
    (wrong_words, "load(verifier=model)", "load(target=model)"),
    (wrong_words, "import tool as Verifier", "import verify"),
    (wrong_words, "async def verifier(): ...", "def verify(): ..."),
    (wrong_words, "MAX_TAU = 1", "restaurant = 1"),
    (asks_for_a_drafter, "isinstance(drafter, NgramDrafter)", "isinstance(config, SpeculativeConfig)"),
    (asks_for_a_drafter, "isinstance(drafter, (int, leaf.MtpDrafter))", "drafter: Drafter = NgramDrafter()"),
    (asks_for_a_drafter, "type(drafter) is NgramDrafter", "drafter is None"),
    (asks_for_a_drafter, "config.method == 'ngram'", "config.rejection_sample_method == 'coupled'"),
    (asks_for_a_drafter, "'mtp' != self.speculative.method", "taken = self.speculative.method"),
    (asks_for_a_drafter, "config.method in ('mtp', 'eagle3')", "drafter.taps in (1, 2)"),
    (asks_for_a_drafter, "match config.method:\n    case 'mtp': pass", "match config.device:\n    case 'cpu': pass"),
    (asks_for_a_drafter, "COSTS[config.method]", "costs[0]"),
    (compares_with_a_method, "kind == 'ngram'", "kind = 'ngram'"),
    (compares_with_a_method, "kind in {'draft_model', 'x'}", "kind in {'gguf', 'safetensors'}"),
    (compares_with_a_method, "match kind:\n    case 'ngram': pass", "match kind:\n    case 'silu': pass"),
    (names_a_drafter, "def f():\n    from outrider.drafters.ngram import NgramDrafter", "import outrider.drafting"),
    (names_a_drafter, "from outrider.drafters import ngram", "from outrider.drafting import registry"),
    (names_a_drafter, "import outrider.drafters.ngram", "import outrider.engine"),
    (prints, "def f(): print('done')", "pprint(1)\nlog.print(1)"),
    (bare_excepts, "try: f()\nexcept: pass", "try: f()\nexcept ValueError: pass"),
]


@pytest.mark.parametrize(("check", "bad", "good"), SNIPPETS)
def test_checker_tells_bad_from_good(check: Checker, bad: str, good: str) -> None:
    assert len(list(check(ast.parse(bad)))) == 1
    assert list(check(ast.parse(good))) == []


@pytest.mark.parametrize("check", [wrong_words, names_a_drafter, bare_excepts])
def test_package_keeps_to_it(check: Checker) -> None:
    assert findings(check) == []


def test_only_the_registry_asks_which_drafter_it_is() -> None:
    assert findings(asks_for_a_drafter, besides=MAY_NAME_METHODS) == []
    assert findings(asks_for_a_drafter, under="drafting"), "the registry asks, so the check must see it"


@pytest.mark.parametrize("folder", ["engine", "drafting", "drafters", "models"])
def test_no_comparison_with_the_name_of_a_method(folder: str) -> None:
    assert findings(compares_with_a_method, under=folder, besides=MAY_NAME_METHODS) == []


def test_only_the_command_line_prints() -> None:
    assert [finding for finding in findings(prints) if not finding.startswith("outrider/cli/")] == []
    assert findings(prints, under="cli"), "the command line prints, so the check must see it"
