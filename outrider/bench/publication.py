"""A published table of measurements, as cells: the CSV of a sweep over targets, methods, data sets and N.

Its numbers are taken as they were published: speedups are not divided again from rounded throughputs. Such a table
says nothing of repeats, load or temperature, so its cells have no intervals. The columns are those under which the
measurements of "Exploring Speculative Decoding in vLLM on AMD GPUs" (vLLM blog, 2026-08-23) were collected.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from outrider.bench.cells import Cell, Place, shares
from outrider.bench.grid import PLAIN
from outrider.bench.pairs import Ratio
from outrider.errors import LoadError

COLUMNS = (
    "model",
    "method",
    "dataset",
    "baseline_tok_s",
    "N",
    "speedup",
    "tok_s",
    "MAL",
    "AR_pct",
    "per_position_pct",
)


def is_publication(path: Path) -> bool:
    """Whether the file's first line has the columns of such a table."""
    with path.open("rb") as file:
        first = file.readline(4096).decode("utf-8-sig", errors="replace")
    return set(COLUMNS) <= {name.strip() for name in first.split(",")}


def read_publication(path: Path) -> list[Cell]:
    """Every line as a cell, place by place in the order in which the file comes to them, plain decoding's cell first.

    Raises LoadError naming the line that is none.
    """
    places: dict[Place, list[Cell]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, record in enumerate(csv.DictReader(file, skipinitialspace=True), start=2):
                cell = _cell(record, f"{path}, line {number}")
                places.setdefault(cell.place, [_plain(cell)]).append(cell)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"{path}: cannot be read as a table ({error})") from error
    if not places:
        raise LoadError(f"{path}: a table without lines")
    return [cell for cells in places.values() for cell in cells]


def _cell(record: Mapping[str, str | None], where: str) -> Cell:
    try:
        rates = tuple(float(word) / 100 for word in (record["per_position_pct"] or "").split())
        values = {name: float(record[name] or "") for name in ("baseline_tok_s", "speedup", "tok_s", "MAL", "AR_pct")}
        length = int(record["N"] or "")
    except (KeyError, ValueError) as error:
        raise LoadError(f"{where}: {error}; expected numbers in {', '.join(COLUMNS[3:])}") from error
    names = [record[name] or "" for name in ("model", "dataset", "method")]
    if not all(names) or length < 1 or min(values.values()) < 0:
        raise LoadError(f"{where}: expected a model, a method, a dataset, N of at least 1 and nothing below 0")
    return Cell(
        place=Place(names[0], names[1]),
        method=names[2],
        num_speculative_tokens=length,
        plain_tok_s=values["baseline_tok_s"],
        tok_s=values["tok_s"],
        speedup=Ratio(values["speedup"]),
        mean_acceptance_length=values["MAL"],
        acceptance_rate=values["AR_pct"] / 100,
        per_position_acceptance=rates,
        acceptance_shares=shares(rates),
    )


def _plain(cell: Cell) -> Cell:
    return Cell(
        place=cell.place,
        method=PLAIN.method,
        num_speculative_tokens=0,
        plain_tok_s=cell.plain_tok_s,
        tok_s=cell.plain_tok_s,
        speedup=Ratio(1.0),
        mean_acceptance_length=1.0,
        acceptance_rate=0.0,
        per_position_acceptance=(),
        acceptance_shares=(),
    )
