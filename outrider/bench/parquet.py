"""A sweep's results as a Parquet file: one table of rows, everything else as JSON in the table's metadata.

Parquet cannot grow by a row, so a sweep keeps its rows in a JSON Lines file beside it until all are there. Needs
pyarrow, from the extra `parquet`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.results import FORMAT, Header, Results, Row, Stopped
from outrider.errors import ConfigError, LoadError

SUFFIX = ".parquet"
_KEY = b"outrider"
_MAGIC = b"PAR1"


def is_parquet(path: Path) -> bool:
    """Whether the file begins as a Parquet file does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_pyarrow() -> None:
    """Raise ConfigError where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{SUFFIX} files need pyarrow: pip install 'outrider[parquet]'", param="out")


def write_parquet(path: Path, results: Results) -> None:
    """Write results whole, or leave what was there. Raises ConfigError without pyarrow."""
    check_pyarrow()
    import pyarrow
    import pyarrow.parquet

    about = {
        "format": FORMAT,
        "header": asdict(results.header),
        "sittings": results.sittings,
        "stopped": [item.as_json() for item in results.stopped],
    }
    table = pyarrow.Table.from_pylist([row.as_json() for row in results.rows])
    part = path.with_name(f"{path.name}.new")
    pyarrow.parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(about).encode()}), part)
    os.replace(part, path)


def read_parquet(path: Path) -> Results:
    """The same results again. Raises LoadError for a file that holds none, ConfigError without pyarrow."""
    check_pyarrow()
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        about: dict[str, Any] = json.loads((table.schema.metadata or {})[_KEY])
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}")
        return Results(
            header=Header(**about["header"]),
            sittings=about["sittings"],
            rows=[Row.from_json(values) for values in table.to_pylist()],
            stopped=[Stopped.from_json(values) for values in about["stopped"]],
        )
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path}: no Parquet file of a sweep's results ({error!r})") from error
