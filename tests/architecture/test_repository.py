"""Tracked files speak of the project alone: no registry hostnames, no paths of one machine, no word on who wrote it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.kit.source import ROOT

# Written in two parts, so that this file may be tracked too.
FORBIDDEN = (
    "pypi" + ".org",
    "files.python" + "hosted.org",
    "registry.npm" + "js.org",
    "deb.debian" + ".org",
    "/wor" + "k/",
    "sub" + "agent",
)


def forbidden_words(text: str) -> Iterator[str]:
    """Forbidden words in a file's text, with their lines."""
    for number, line in enumerate(text.lower().splitlines(), start=1):
        yield from (f"line {number} says {word}" for word in FORBIDDEN if word in line)


def tracked_files() -> list[str]:
    """What git tracks or would track: a new file must not slip through until it is committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in output.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_a_forbidden_word_is_seen(word: str) -> None:
    assert list(forbidden_words(f"fine\nsee HTTPS://{word.upper()}simple\n")) == [f"line 2 says {word}"]


def test_ordinary_text_passes() -> None:
    assert list(forbidden_words("see /home/work and https://example.org/network/")) == []


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="not a git checkout: nothing says what is tracked",
)
def test_no_tracked_file_has_one() -> None:
    names = tracked_files()
    assert "pyproject.toml" in names
    texts = {name: (ROOT / name).read_bytes().decode("utf-8", errors="replace") for name in names}
    assert [f"{name}: {fault}" for name, text in texts.items() for fault in forbidden_words(text)] == []
