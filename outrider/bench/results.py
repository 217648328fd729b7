"""A sweep's results as one JSON Lines file: a header, then a row for every measurement, safe against any interruption.

Every record is written whole and reaches the disk before the next measurement begins. A file that was cut is read up to
its last whole record. A file belongs to one target and one grid: going on with other settings is refused by their
names. Not here: what rows mean together (pairs.py, cells.py), and the same as Parquet (parquet.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.backends import Measured
from outrider.bench.grid import Choice, Setting
from outrider.errors import ConfigError, LoadError

FORMAT = 1
_HEADER_START = b'{"kind":"header"'


@dataclass(frozen=True, kw_only=True)
class Header:
    """What must not change while a file grows, and the conditions that it began under.

    target: its name; identity: which weights these are; grid and engine: settings; prompts: a sha256 of each
    workload's texts; methods: each method's settings as completed for this target.
    """

    target: str
    identity: str
    grid: dict[str, Any]
    engine: dict[str, Any]
    prompts: dict[str, str]
    methods: dict[str, Any]
    conditions: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One group of prompts under one choice, once. Anchor rows only tell sittings apart and count nowhere else."""

    sitting: int
    is_anchor: bool
    setting: Setting
    choice: Choice
    repeat: int
    group: int
    measured: Measured

    def as_json(self) -> dict[str, Any]:
        """Plain data without nesting but for lists."""
        place = {"sitting": self.sitting, "is_anchor": self.is_anchor} | asdict(self.setting) | asdict(self.choice)
        return place | {"repeat": self.repeat, "group": self.group} | self.measured.as_json()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """The same record again. Raises KeyError, TypeError or ValueError for what is missing or of another shape."""
        return cls(
            setting=Setting(*(values[name] for name in Setting.__dataclass_fields__)),
            choice=Choice(*(values[name] for name in Choice.__dataclass_fields__)),
            measured=Measured.from_json(values),
            **{name: values[name] for name in ("sitting", "is_anchor", "repeat", "group")},
        )


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A choice that is not measured any further in a setting, and why."""

    setting: Setting
    choice: Choice
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self.setting) | asdict(self.choice) | {"reason": self.reason}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Stopped:
        """The same record again."""
        return cls(
            setting=Setting(*(values[name] for name in Setting.__dataclass_fields__)),
            choice=Choice(*(values[name] for name in Choice.__dataclass_fields__)),
            reason=str(values["reason"]),
        )


@dataclass(kw_only=True)
class Results:
    """What a file holds. `sittings` has the conditions of each, from the first on; `is_cut` says that its last record
    was not whole.
    """

    header: Header
    sittings: list[dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    is_cut: bool = False


class ResultsFile:
    """A results file that grows. `results` is what it holds at any time."""

    def __init__(self, path: Path, results: Results) -> None:
        self.path, self.results = path, results

    @classmethod
    def open(cls, path: Path, header: Header) -> ResultsFile:
        """A new file, or the next sitting of one that is there, after the rest of a cut record was removed.

        Raises ConfigError naming what differs from the file's header, LoadError for a file that is no such results.
        """
        if not path.exists() or _is_without_header(path):
            path.write_bytes(b"")
            made = cls(path, Results(header=header, sittings=[header.conditions]))
            made._append("header", {"format": FORMAT} | asdict(header))
            return made
        results = read(path)
        check_same(results.header, header, path)
        if results.is_cut:
            _remove_cut(path)
        made = cls(path, results)
        made._append("sitting", {"conditions": header.conditions})
        results.sittings.append(header.conditions)
        return made

    def add_row(self, row: Row) -> None:
        """Keep a measurement."""
        self._append("row", row.as_json())
        self.results.rows.append(row)

    def add_stopped(self, stopped: Stopped) -> None:
        """Keep that a choice is given up in a setting."""
        self._append("stopped", stopped.as_json())
        self.results.stopped.append(stopped)

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, **record}, separators=(",", ":")) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> Results:
    """Everything up to the last whole record. Raises LoadError naming the line that is none, or a missing header."""
    if not path.read_bytes().startswith(_HEADER_START):
        raise LoadError(f"{path}: no header of a sweep's results in its first line, and no published table either")
    records = _records(path)
    _, first = next(records)
    if first is None or first.get("format") != FORMAT:
        raise LoadError(f"{path}: no header of format {FORMAT} in its first line")
    results = Results(header=_header(first, path), sittings=[first["conditions"]])
    for number, record in records:
        if record is None:
            results.is_cut = True
            break
        try:
            _take(results, record)
        except (KeyError, TypeError, ValueError) as error:
            raise LoadError(f"{path}, line {number}: no record of a sweep's results ({error!r})") from error
    return results


def check_same(kept: Header, asked: Header, path: Path) -> None:
    """Raise ConfigError naming the target or the first setting that is not the file's."""
    if kept.identity != asked.identity:
        raise ConfigError(
            f"{path} has results of another target ({kept.target}), not of {asked.target}: name another file",
            param="out",
        )
    before, now = _settings(kept), _settings(asked)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{path} was begun with {name} {_short(before.get(name))}, not {_short(now.get(name))}: "
                "repeat its settings or name another file",
                param=name,
            )


def _take(results: Results, record: Mapping[str, Any]) -> None:
    match record["kind"]:
        case "row":
            results.rows.append(Row.from_json(record))
        case "stopped":
            results.stopped.append(Stopped.from_json(record))
        case "sitting":
            results.sittings.append(record["conditions"])
        case kind:
            raise ValueError(f"kind {kind!r}")


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Line numbers and records; None for a last line that is not whole. Raises LoadError."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise LoadError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise LoadError(f"{path}, line {number}: got a {type(record).__name__}, expected an object")
        yield number, record
    if lines[-1]:
        yield len(lines), None


def _header(record: Mapping[str, Any], path: Path) -> Header:
    try:
        return Header(**{name: record[name] for name in Header.__dataclass_fields__})
    except KeyError as error:
        raise LoadError(f"{path}: the header has no {error}") from error


def _is_without_header(path: Path) -> bool:
    """Whether the file is empty, or a header whose writing was cut off."""
    begun = path.read_bytes()
    return b"\n" not in begun and _HEADER_START.startswith(begun[: len(_HEADER_START)])


def _remove_cut(path: Path) -> None:
    """Take what follows the last line end off the file."""
    whole = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())


def _settings(header: Header) -> dict[str, Any]:
    """What must stay the same, by name, as it reads after having been written."""
    engine = {f"engine.{name}": value for name, value in header.engine.items()}
    values: dict[str, Any] = json.loads(json.dumps(header.grid | engine | {"prompts": header.prompts}))
    return values


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
