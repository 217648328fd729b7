"""Prompt sets by name: small ones of our own that ship with the package, public ones read from a folder, or any file.

A set is a JSON Lines file, one prompt a line: {"turns": ["..."], "answer": "..."} with the answer optional. Files of
other people may say {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]} instead; of messages, only
the user's turns are taken. Nothing is downloaded here: a public set is the user's to fetch and to put in the folder.
Not here: chat templates, tokens, and any judgement of an answer.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ConfigError, LoadError

OWN = ("math", "code", "chat", "json", "summary", "copy")
MIXED = "mixed"
PUBLIC = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
DATA_VARIABLE = "OUTRIDER_DATA"
LINE_FORM = '{"turns": ["first user turn", ...], "answer": "optional"} or {"prompt": "..."} or {"messages": [...]}'
_PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer: what the user says in each turn, and the known answer if there is one."""

    turns: tuple[str, ...]
    answer: str | None = None


def names() -> tuple[str, ...]:
    """Every set that `load` knows by name: our own, "mixed" (all of our own in turns), and the public ones."""
    return (*OWN, MIXED, *PUBLIC)


def load(
    name_or_path: str,
    *,
    num_prompts: int | None = None,
    turns: Literal["first", "all"] = "first",
    folder: Path | None = None,
) -> list[Prompt]:
    """The prompts of a named set or of a JSON Lines file, in their order, at most `num_prompts` of them.

    `turns` keeps each conversation's first user turn or all of them. Public sets are read from `folder`, else from the
    folder that OUTRIDER_DATA names, else from ./data. Raises ConfigError for a bad argument, LoadError for a set or
    file that is missing or empty and for a line that holds no prompt (naming file and line).
    """
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"num_prompts is {num_prompts}, expected at least 1", param="num_prompts")
    if turns not in ("first", "all"):
        raise ConfigError(f"turns is {turns!r}, expected 'first' or 'all'", param="turns")
    prompts = _mixed() if name_or_path == MIXED else read(_path(name_or_path, folder))
    if turns == "first":
        prompts = [Prompt(prompt.turns[:1], prompt.answer) for prompt in prompts]
    return prompts[:num_prompts]


def read(path: Path) -> list[Prompt]:
    """Every prompt of one JSON Lines file; blank lines are skipped. Raises LoadError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: cannot be read as UTF-8 text ({error}); expected one JSON object a line") from error
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise LoadError(f"{path}: no prompts in the file; expected lines like {LINE_FORM}")
    return prompts


def _mixed() -> list[Prompt]:
    """One prompt of each own set, then the next of each, so that any first few are a fair mix."""
    sets = [read(_PROMPTS / f"{name}.jsonl") for name in OWN]
    longest = max(len(prompts) for prompts in sets)
    return [prompts[row] for row in range(longest) for prompts in sets if row < len(prompts)]


def _path(name: str, folder: Path | None) -> Path:
    """Where a set is; raises LoadError saying where it is looked for."""
    if name in OWN:
        return _PROMPTS / f"{name}.jsonl"
    if name in PUBLIC:
        return _public_path(name, folder)
    if Path(name).is_file():
        return Path(name)
    nearest = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"sets: {', '.join(names())}"
    raise LoadError(f"no prompt set or file {name!r}; {hint}")


def _public_path(name: str, folder: Path | None) -> Path:
    folder = folder or Path(os.environ.get(DATA_VARIABLE) or "data")
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise LoadError(
            f"prompt set {name}: {path} is not there, and sets are not downloaded: put the file there "
            f"(or name another folder with {DATA_VARIABLE}), one prompt a line: {LINE_FORM}"
        )
    return path


def _parse(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise LoadError(f"{where}: not JSON ({error}); expected {LINE_FORM}") from error
    if not isinstance(record, dict):
        raise LoadError(f"{where}: got a {type(record).__name__}, expected an object like {LINE_FORM}")
    turns = tuple(_turns(record, where))
    if not turns:
        raise LoadError(f"{where}: no user turn; expected {LINE_FORM}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise LoadError(f"{where}: a turn is {turn!r:.60}, expected text")
    return Prompt(turns, _answer(record.get("answer"), where))


def _turns(record: dict[str, Any], where: str) -> Iterator[Any]:
    """The user's turns, still unchecked, from whichever of the three keys is there."""
    key = next((key for key in ("turns", "prompt", "messages") if key in record), None)
    if key is None:
        raise LoadError(f"{where}: has neither turns, prompt nor messages; expected {LINE_FORM}")
    value = record[key]
    if key == "prompt":
        yield value
        return
    if not isinstance(value, list):
        raise LoadError(f"{where}: {key} is a {type(value).__name__}, expected a list")
    for item in value:
        if key == "turns":
            yield item
        elif not isinstance(item, dict) or not isinstance(item.get("role"), str):
            raise LoadError(f"{where}: a message is {item!r:.60}, expected an object with role and content")
        elif item["role"] == "user":
            yield item.get("content")


def _answer(value: Any, where: str) -> str | None:
    """Numbers are taken as their text: public sets write them both ways."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise LoadError(f"{where}: answer is a {type(value).__name__}, expected text or a number")
