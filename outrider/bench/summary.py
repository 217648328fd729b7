"""A file of measurements to everything a report says, as plain data; page and printed lines are made of nothing else.

So the JSON says all that the page shows. Reads a sweep's results (JSON Lines or Parquet) and a published table (CSV).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from outrider.bench.cells import Cell, Place, cells_of, place_of
from outrider.bench.grid import PLAIN, Grid
from outrider.bench.pairs import Ranking, Ratio, in_pairs, rank
from outrider.bench.parquet import is_parquet, read_parquet
from outrider.bench.publication import is_publication, read_publication
from outrider.bench.recommend import best_of_methods, fixed_choices, interval, label, of_place, pareto
from outrider.bench.results import Results, Row, read
from outrider.bench.sweep import missing
from outrider.errors import LoadError

AXES = ("target", "workload", "concurrency", "temperature", "context_len")


@dataclass(frozen=True)
class _Source:
    """What was read: cells, rankings by place, and what only a sweep has."""

    kind: str
    cells: list[Cell]
    rankings: Mapping[Place, Ranking | None]
    sweep: Results | None = None


def summarize(path: Path) -> dict[str, Any]:
    """Everything that can be said of a file. Raises LoadError for one that holds no measurements."""
    source = _read(path)
    cells = source.cells
    places = [list(group) for _, group in groupby(cells, key=lambda cell: cell.place)]
    able = [cell for cell in cells if cell.choice != PLAIN]
    return {
        "file": path.name,
        "kind": source.kind,
        "targets": list(dict.fromkeys(cell.place.target for cell in cells)),
        "num_cells": len(able),
        "recommendations": [asdict(of_place(own, source.rankings.get(own[0].place))) for own in places],
        "caveats": _caveats(source),
        "fixed_choices": [asdict(choice) for choice in fixed_choices(cells)],
        "best_of_methods": [asdict(cell) for cell in best_of_methods(cells)],
        "below_plain": [asdict(cell) for cell in able if cell.speedup.ratio < 1],
        "pareto": [asdict(cell) for front in _fronts(cells) for cell in front],
        "cells": [asdict(cell) for cell in cells],
        **(_of_sweep(source.sweep) if source.sweep is not None else {}),
    }


def sweep_of(path: Path) -> Results:
    """A sweep's results. Raises LoadError also for a published table, which does not say which weights it is of."""
    if (found := _read(path).sweep) is None:
        raise LoadError(f"{path} is a published table: a policy needs a sweep's results, which know their target")
    return found


def lines(found: Mapping[str, Any]) -> list[str]:
    """The recommendations, a line each, and what a reader must not miss."""
    said, axes = [], varying(found)
    for item in found["recommendations"]:
        taken = label_of(item)
        gain = f" {interval(Ratio(**item['speedup']))}" if item["num_speculative_tokens"] else ""
        said.append(f"{place_text(item['place'], axes)}: {taken}{gain}; {item['reasons'][-1 if gain else 0]}")
    for item in found["fixed_choices"]:
        said.append(
            f"one choice for all of {item['target']}: {label_of(item)}, {item['mean_speedup']:.2f}x on average, "
            f"{item['mean_loss']:.1%} below each place's best, at worst {item['worst_speedup']:.2f}x"
        )
    if below := len(found["below_plain"]):
        said.append(f"{below} of {found['num_cells']} choices are slower than plain decoding")
    return said + list(found.get("notes", []))


def label_of(item: Mapping[str, Any]) -> str:
    """The choice that a piece of a summary is about."""
    length = item["num_speculative_tokens"]
    return f"{item['method']} N={length}" if length else str(item["method"])


def varying(found: Mapping[str, Any]) -> set[str]:
    """What a place must say to be told from the file's others; its workload in any case."""
    places = [cell["place"] for cell in found["cells"]]
    return {"workload"} | {axis for axis in AXES if len({place[axis] for place in places}) > 1}


def place_text(place: Mapping[str, Any], axes: Collection[str] = AXES) -> str:
    """Those axes of a place in a few words, leaving out what its source does not say."""
    said = {
        "target": str(place["target"]),
        "workload": str(place["workload"]),
        "concurrency": f"{place['concurrency']} at a time",
        "temperature": f"temperature {place['temperature']:g}" if place["temperature"] is not None else "",
        "context_len": f"context {place['context_len']}" if place["context_len"] else "prompts as they are",
    }
    return ", ".join(said[axis] for axis in AXES if axis in axes and place[axis] is not None)


def _read(path: Path) -> _Source:
    if not path.is_file():
        raise LoadError(f"{path}: there is no such file")
    if is_publication(path):
        return _Source("publication", read_publication(path), {})
    results = read_parquet(path) if is_parquet(path) else read(path)
    cells = cells_of(results)
    if not cells:
        raise LoadError(f"{path}: no choice was measured beside plain decoding yet")
    rankings = {}
    for setting, own in groupby(sorted(in_pairs(results.rows).items(), key=lambda item: item[0]), lambda i: i[0][0]):
        stopped = {item.choice for item in results.stopped if item.setting == setting}
        pairs = {choice: found for (_, choice), found in own if choice not in stopped}
        rankings[place_of(results.header.target, setting)] = rank(pairs)
    return _Source("sweep", cells, rankings, results)


def _caveats(source: _Source) -> list[str]:
    """What holds for every recommendation."""
    caveats = ["A choice that was picked as the best of several looks a little better than it is."]
    if source.sweep is None:
        return ["The source gives no repeats, so nothing here has an interval.", *caveats]
    return [
        "Intervals (95%) and shares come from resampling groups of prompts: they speak of prompts like these, on this "
        "machine.",
        *caveats,
    ]


def _fronts(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The front of every place, all loads of it together."""
    places: dict[Place, list[Cell]] = {}
    for cell in cells:
        places.setdefault(replace(cell.place, concurrency=None), []).append(cell)
    return [pareto(own) for own in places.values()]


def _of_sweep(results: Results) -> dict[str, Any]:
    header = results.header
    return {
        "grid": header.grid,
        "methods": header.methods,
        "prompts": header.prompts,
        "identity": header.identity,
        "sittings": [_sitting(results, number) for number in range(1, len(results.sittings) + 1)],
        "stopped": [item.as_json() for item in results.stopped],
        "notes": _notes(results),
    }


def _sitting(results: Results, number: int) -> dict[str, Any]:
    """Its conditions, how much it measured, and its anchor: a choice that every sitting measures beside plain."""
    rows = [row for row in results.rows if row.sitting == number]
    return {
        "sitting": number,
        "num_rows": sum(not row.is_anchor for row in rows),
        "anchor": _anchor([row for row in rows if row.is_anchor]),
        "conditions": results.sittings[number - 1],
    }


def _anchor(rows: Sequence[Row]) -> dict[str, Any] | None:
    if {row.choice == PLAIN for row in rows} != {True, False}:
        return None
    plain, chosen = sorted(rows, key=lambda row: row.choice != PLAIN)[:2]
    return {
        "choice": label(chosen.choice),
        "plain_tok_s": plain.measured.num_tokens / plain.measured.seconds,
        "tok_s": chosen.measured.num_tokens / chosen.measured.seconds,
    }


def _notes(results: Results) -> list[str]:
    notes = []
    if results.is_cut:
        notes.append("the file is cut: it was read up to its last whole record")
    if left := sum(len(item.choices) for item in missing(Grid(**results.header.grid), results)):
        notes.append(f"the sweep is not finished: {left} measurements are missing")
    if results.stopped:
        notes.append(f"given up early: {len(results.stopped)} of the choices, each with its reason")
    return notes
