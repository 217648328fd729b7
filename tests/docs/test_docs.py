"""README.md and docs/: commands parse, settings exist, links resolve, snippets compile, and every verb is there.

Nothing is run: a command is parsed as the command line would parse it, and its drafting settings are read.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from outrider.config import EngineConfig, SpeculativeConfig, apply_overrides
from outrider.drafting.train_config import TrainConfig
from outrider.errors import OutriderError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]
SHELL = ("sh", "bash", "shell", "console")
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_DESCRIPTOR = re.compile(r"\b[012](?=[<>])")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(match[2].lower(), match[3]) for match in _FENCE.finditer(page)]


def commands(page: str) -> Iterator[list[str]]:
    """The words after `outrider` of every command line in the page's shell blocks."""
    for block in blocks(page):
        if block.language not in SHELL:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from _commands_of(line.strip().removeprefix("$ "))


def _commands_of(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(_DESCRIPTOR.sub("", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    current: list[str] | None = None
    for word in lexer:
        if word and set(word) <= set("|&;<>()"):
            if current is not None:
                yield current
            current = None
        elif current is not None:
            current.append(word)
        elif Path(word).name == "outrider":
            current = []
    if current is not None:
        yield current


def command_fault(words: list[str]) -> str | None:
    """Why the command line would refuse these words; None if it takes them."""
    from outrider.cli.main import app

    command, rest = typer.main.get_command(app), [word for word in words if word != "--help"]
    while (verbs := getattr(command, "commands", None)) is not None:
        if not rest:
            return None if "--help" in words else "no verb"
        if rest[0] not in verbs:
            return f"no verb {rest[0]}"
        command, rest = verbs[rest[0]], rest[1:]
    if "--help" in words:
        return None
    try:
        values = command.make_context("outrider", rest).params
        if values.get("speculative_config") is not None:
            SpeculativeConfig.parse(values["speculative_config"])
        settings = values.get("set") or []
        TrainConfig().with_overrides([text for text in settings if text.startswith("train.")])
        apply_overrides(EngineConfig(), [text for text in settings if not text.startswith("train.")])
    except OutriderError as error:
        return str(error)
    except Exception as error:  # the parser's own errors, whichever copy of click it uses
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None


def link_faults(page: str, folder: Path) -> Iterator[str]:
    """Relative links whose file, or heading in it, is not there."""
    for target in _LINK.findall(_FENCE.sub("", page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, heading = target.partition("#")
        path = folder / name
        if name and not path.exists():
            yield f"{target}: no such file"
        elif heading and heading not in headings(path.read_text(encoding="utf-8") if name else page):
            yield f"{target}: no such heading"


def headings(page: str) -> set[str]:
    """Anchors that a page's headings get."""
    lines = re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def snippet_faults(page: str) -> Iterator[str]:
    """Python that does not compile or imports what this package does not have, and JSON that is none."""
    for block in blocks(page):
        try:
            if block.language in ("python", "py"):
                yield from _missing_names(ast.parse(block.text))
            elif block.language == "json":
                json.loads(block.text)
        except ValueError as error:
            yield f"JSON: {error}"
        except SyntaxError as error:
            yield f"Python: {error}"


def _missing_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
            try:
                module = importlib.import_module(node.module or "")
            except ModuleNotFoundError:
                yield f"no module {node.module}"
                continue
            yield from (f"{node.module} has no {item.name}" for item in node.names if not hasattr(module, item.name))


def placeholders(page: str) -> list[str]:
    """Marks such as @TABLE@ that wait for a text."""
    return re.findall(r"@[A-Z_]+@", page)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


FENCED = "text\n```sh\n{}\n```\n"


def test_commands_are_found_among_other_words() -> None:
    lines = (
        "make demo  # not ours: outrider nothing",
        "$ A=1 .venv/bin/outrider chat m --set a=1 \\\n  --seed 2 2> log | head",
        "outrider generate m 'a; b' > out.txt && outrider --help",
    )
    expected = [["chat", "m", "--set", "a=1", "--seed", "2"], ["generate", "m", "a; b"], ["--help"]]
    assert list(commands(FENCED.format("\n".join(lines)))) == expected
    assert list(commands("```python\noutrider chat\n```")) == []


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    "line, fault",
    [
        ("generate smollm2 hello --spec-method ngram --spec-tokens 4", None),
        (f"generate smollm2 hello --speculative-config '{NGRAM}' --set engine.block_size=32", None),
        ("chat smollm2 --help", None),
        ("--help", None),
        ("models list --json", None),
        ("", "no verb"),
        ("fly smollm2", "no verb fly"),
        ("models fly", "no verb fly"),
        ("generate smollm2 hello --gamma 4", "--gamma"),
        ("generate smollm2 hello --max-tokens many", "--max-tokens"),
        ("chat", "model"),
        ("chat smollm2 --speculative-config '{}'", "method"),
        ("chat smollm2 --set engine.blok_size=32", "blok_size"),
    ],
)
def test_a_command_that_would_be_refused_is_seen(line: str, fault: str | None) -> None:
    found = command_fault(shlex.split(line))
    assert found is None if fault is None else found is not None and fault in found


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The other page\n```sh\n# no heading\n```\n", encoding="utf-8")
    good = "## Here it is\n[a](other.md) [b](other.md#the-other-page) [c](#here-it-is) [d](https://example.org/x.md)"
    assert list(link_faults(good, tmp_path)) == []
    bad = "[a](none.md) ![b](img/none.png) [c](other.md#no-heading) [d](#nowhere)"
    assert len(list(link_faults(bad, tmp_path))) == 4


def test_a_bad_snippet_is_seen() -> None:
    good = "```python\nfrom outrider import LLM\n```\n```json\n{}\n```\n```text\n(\n```"
    assert list(snippet_faults(good)) == []
    for bad in (
        "```python\nfor x in\n```",
        "```python\nfrom outrider import Llm\n```",
        "```py\nfrom outrider.engine.motor import Engine\n```",
        "```json\n{'a': 1}\n```",
    ):
        assert len(list(snippet_faults(bad))) == 1, bad


def test_a_placeholder_is_seen() -> None:
    assert placeholders("as **@HEADLINE@** says, write to a@B.example") == ["@HEADLINE@"]


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_command_would_be_taken(path: Path) -> None:
    faults = {" ".join(words): command_fault(words) for words in commands(read(path))}
    assert {command: fault for command, fault in faults.items() if fault is not None} == {}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_link_resolves(path: Path) -> None:
    assert list(link_faults(read(path), path.parent)) == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_snippet_compiles(path: Path) -> None:
    assert list(snippet_faults(read(path))) == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_nothing_waits_to_be_filled_in(path: Path) -> None:
    assert placeholders(read(path)) == []


@pytest.mark.skipif(not PAGES, reason="there are no pages yet")
def test_every_verb_is_on_some_page() -> None:
    from outrider.cli.main import app

    verbs = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typer's own type does not say so
    text = "\n".join(read(path) for path in PAGES)
    assert [verb for verb in verbs if not re.search(rf"\boutrider {verb}\b", text)] == []
