"""A report as one page: tables and pictures of a summary, with plotly's script inside, so that it opens from a disk.

The page's look and its few lines of script are in page.html beside this file; every number is the summary's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from outrider.bench.figures import Section, sections
from outrider.bench.pairs import Ratio
from outrider.bench.recommend import interval, times
from outrider.bench.summary import label_of, place_text, varying
from outrider.errors import ConfigError

_TEMPLATE = Path(__file__).with_name("page.html")


def check_plotly() -> None:
    """Raise ConfigError where plotly, which pages are drawn with, is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ConfigError("a page is drawn with plotly: pip install 'outrider[report]'", param="html")


def page(found: Mapping[str, Any]) -> str:
    """The whole page. Needs plotly. Cost: a second, and five megabytes, most of it plotly's script."""
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    axes = varying(found)
    filters = {"label": label_of, "interval": _interval, "times": times, "speed": _speed}
    environment.filters.update(filters, place=lambda place: place_text(place, axes))
    drawn = sections(found)
    figures = [chart.figure for section in drawn for chart in section.charts]
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        found=found,
        best=_best_table(found),
        sections=_numbered(drawn),
        conditions=_conditions(found),
        figures=Markup(json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs()),
    )


def _interval(ratio: Mapping[str, Any]) -> str:
    return interval(Ratio(**ratio))


def _speed(tok_s: float) -> str:
    """Tokens a second for people: three digits or more."""
    return f"{tok_s:.0f}" if tok_s >= 100 else f"{tok_s:.1f}"


def _numbered(drawn: list[Section]) -> list[dict[str, Any]]:
    """Sections with their pictures by target, each with its number among all pictures."""
    number, found = 0, []
    for section in drawn:
        targets = []
        for target, charts in groupby(section.charts, key=lambda chart: chart.target):
            placed = []
            for chart in charts:
                height = chart.figure["layout"]["height"]
                placed.append({"number": number, "title": chart.title, "height": height})
                number += 1
            targets.append({"target": target, "charts": placed})
        found.append({"title": section.title, "note": section.note, "absent": section.absent, "targets": targets})
    return found


def _best_table(found: Mapping[str, Any]) -> dict[str, Any]:
    """Each method's best N: a row for each method and place but for the workload, a column for each workload."""
    cells = found["best_of_methods"]
    workloads = list(dict.fromkeys(cell["place"]["workload"] for cell in cells))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    axes = varying(found) - {"workload"}
    for cell in cells:
        where = place_text(cell["place"], axes)
        rows.setdefault((where, cell["method"]), {})[cell["place"]["workload"]] = cell
    return {"workloads": workloads, "rows": list(rows.items())}


def _conditions(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Every condition by name, with one value for each sitting."""
    stated = [_flat(sitting["conditions"]) for sitting in found.get("sittings", [])]
    names = dict.fromkeys(name for one in stated for name in one)
    return [(name, [one.get(name, "") for one in stated]) for name in names]


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        elif value is not None:
            flat[before + name] = str(value)
    return flat
