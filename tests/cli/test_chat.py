"""`outrider chat` with lines on stdin: one answer a line, earlier turns from the cache, /new and /quit."""

from __future__ import annotations

import re

import pytest

from tests.kit.command import Ended, apart

pytestmark = pytest.mark.real


def chat(model: str, *lines: str) -> Ended:
    ended = apart("chat", model, "--max-tokens", "24", text="".join(f"{line}\n" for line in lines))
    assert ended.code == 0, ended.err
    return ended


def usage(ended: Ended) -> list[tuple[int, int]]:
    """Prompt tokens and cached ones of each answer, as chat reports them."""
    found = re.findall(r"\[(\d+) prompt tokens, (\d+) from the cache\]", ended.err)
    return [(int(total), int(cached)) for total, cached in found]


def test_the_second_turn_reads_only_what_is_new(smollm2: str) -> None:
    first, second = usage(chat(smollm2, "Name three rivers of Europe.", "Which of them is the longest?"))
    assert first[1] == 0
    assert first[0] // 2 < second[1] < second[0]


def test_new_forgets_the_conversation_and_quit_ends_it(smollm2: str) -> None:
    ended = chat(smollm2, "Name three rivers.", "/new", "", "Name three rivers.", "/quit", "Name three rivers.")
    first, second = usage(ended)
    assert first[0] == second[0]
    answers = ended.out.strip()
    half = len(answers) // 2
    assert answers[:half].strip() == answers[half:].strip() != ""
