"""The file that a corpus is made in: one response a line, on disk as soon as it is there, with its settings beside it.

A run that was stopped goes on where it was: what is in the file is not made again, a half-written last line is dropped,
and other settings than the file was made with are refused. Not here: what the responses are, and who makes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import CapacityError, ConfigError, LoadError

Key = tuple[int, int]
"""Line of the prompt file, from 1, and turn of its conversation, from 0."""


class ResponseFile:
    """A JSONL file to append to; `with` closes it. `written` has every (line, turn) that is in the file.

    `response_ids` has the answers of the lines in `keep`, which later turns build on. Raises ConfigError naming the
    setting that differs from OUT.settings.json, LoadError for a file of another kind, CapacityError if it cannot be
    written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], keep: Collection[int] = ()) -> None:
        self.path = path
        self.written: set[Key] = set()
        self.response_ids: dict[Key, list[int]] = {}
        self._keep = keep
        _agree(path, settings)
        size = self._read() if path.exists() else 0
        try:
            self._file = path.open("ab", buffering=0)
            if size < self._file.seek(0, os.SEEK_END):
                self._file.truncate(size)
        except OSError as error:
            raise self._unwritable(error) from error
        self._size = size

    def __enter__(self) -> ResponseFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one response. Raises CapacityError, with the file as it was before."""
        line = (json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            self._file.truncate(self._size)
            raise self._unwritable(error) from error
        self._size += len(line)
        self._note(record)

    def _note(self, record: Mapping[str, Any]) -> None:
        key = (int(record["line"]), int(record["turn"]))
        self.written.add(key)
        if key[0] in self._keep:
            self.response_ids[key] = list(record["response_ids"])

    def _read(self) -> int:
        """Take in what is there; the length of its whole lines in bytes."""
        size = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        break
                    self._take(line, number)
                    size += len(line)
        except OSError as error:
            raise LoadError(f"{self.path}: cannot be read: {error.strerror}: name another file") from error
        return size

    def _take(self, line: bytes, number: int) -> None:
        try:
            self._note(json.loads(line))
        except (ValueError, LookupError, TypeError) as error:
            raise LoadError(
                f"{self.path}, line {number}: not a response that `outrider data generate` wrote: name another file"
            ) from error

    def _unwritable(self, error: OSError) -> CapacityError:
        return CapacityError(
            f"{self.path}: cannot be written ({error.strerror}); the {len(self.written):,} responses in it are kept:"
            " make room and run the same command again"
        )


def settings_path(path: Path) -> Path:
    """Where the settings of a response file are."""
    return path.with_name(path.name + ".settings.json")


def _agree(path: Path, ours: Mapping[str, Any]) -> None:
    """Write what the file is made with, or hold it against what it was made with."""
    beside = settings_path(path)
    if path.is_file() and path.stat().st_size:
        _compare(path, beside, ours)
        return
    part = beside.with_name(beside.name + ".part")
    try:
        part.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        os.replace(part, beside)
    except OSError as error:
        raise CapacityError(
            f"{beside}: cannot be written ({error.strerror}): make room, or name another file"
        ) from error


def _compare(path: Path, beside: Path, ours: Mapping[str, Any]) -> None:
    try:
        theirs = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is there without {beside.name}, so it cannot be gone on with: name another file", param="out"
        ) from error
    except (OSError, ValueError) as error:
        raise LoadError(f"{beside}: cannot be read: {error}") from error
    for name in [*ours, *(set(theirs) - set(ours) if isinstance(theirs, dict) else ())]:
        made_with = theirs.get(name) if isinstance(theirs, dict) else None
        if made_with != ours.get(name):
            raise ConfigError(
                f"{path} was made with another {name} ({_short(made_with)}, now {_short(ours.get(name))}): name another"
                f" file, or give the same {name}",
                param=name,
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else text[:12] + "…"
