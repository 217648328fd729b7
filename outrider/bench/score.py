r"""Exact match of an answer at the end of a text: the last \boxed{...}, else the last number.

For comparing plain with speculative decoding on the same prompts, not for ranking models: no equivalence of formulas is
looked for beyond the spelling of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BOX = "\\boxed{"


def num_right(answered: Iterable[tuple[str | None, str]]) -> int:
    """How many texts end on their known answer, of (answer, text); those without an answer do not count."""
    return sum(answer is not None and is_right(answer, text) for answer, text in answered)


def is_right(answer: str, text: str) -> bool:
    """Whether the text's final answer is the known one."""
    found = final_answer(text)
    return found is not None and _normal(found) == _normal(answer)


def final_answer(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...}, else the last number, else None."""
    start = text.rfind(_BOX)
    while start >= 0:
        inside = _in_braces(text[start + len(_BOX) :])
        if inside is not None:
            return inside
        start = text.rfind(_BOX, 0, start)
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _in_braces(text: str) -> str | None:
    """The text up to the brace that closes the one before it; None if it never comes."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return text[:index]
    return None


def _normal(answer: str) -> str:
    """One spelling of a number; other answers without spaces, dollar signs and a full stop at the end."""
    plain = re.sub(r"\\[!,;: ]|\\?\$|\s", "", answer).rstrip(".").removeprefix("\\text{").removesuffix("\\%")
    if not _NUMBER.fullmatch(plain):
        return plain
    whole, _, decimals = plain.replace(",", "").partition(".")
    return f"{int(whole)}.{decimals.rstrip('0')}".rstrip(".")
