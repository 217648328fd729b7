"""A report's pictures, made with plotly from a summary (summary.py) and from nothing else.

Pictures are small and many, one for each place, so that they stand beside each other on a wide screen and below each
other on a phone. Colours of text and lines are left to the page, which knows light from dark; a method has one colour
throughout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from outrider.bench.grid import PLAIN
from outrider.bench.recommend import times
from outrider.bench.summary import AXES, label_of, place_text, varying

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Cells = list[Mapping[str, Any]]
_COLOURS = ("#3b82c4", "#e07b39", "#2f9e73", "#9a6dd7", "#d1495b", "#1b9aaa", "#a9845b")
_PLAIN_COLOUR = "#8a8f98"
_SCALE = ((0.0, "#c2571a"), (0.5, "#eef0f2"), (1.0, "#1f5fa8"))
_HEIGHT = 330


@dataclass(frozen=True)
class Chart:
    """One picture: whose target it is, what it is of, and plotly's own description of it."""

    target: str
    title: str
    figure: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Pictures that answer one question, and what stands in their place where there are none."""

    title: str
    note: str
    charts: list[Chart]
    absent: str = "The file does not say."


def sections(found: Mapping[str, Any]) -> list[Section]:
    """Every picture of a summary. Needs plotly."""
    cells, colours = found["cells"], _colours(found["cells"])
    best = {_key(cell) for cell in found["best_of_methods"]}
    front = {_key(cell) for cell in found["pareto"]}
    chosen = [cell for cell in cells if _key(cell) in best or _is_plain(cell)]
    alone, axes = _lowest_load(cells), [axis for axis in AXES if axis in varying(found) - {"target"}]
    over_loads = [axis for axis in axes if axis != "concurrency"]
    return [
        Section(
            "Throughput against N",
            "Output tokens a second; bars are 95% intervals of the speedup, the dashed line is plain decoding, "
            "crosses were given up early.",
            _charts(cells, axes, lambda own: _throughput(own, colours)),
        ),
        Section(
            "Speedup",
            "Over plain decoding of the same prompts. ▼ marks what is slower than plain decoding.",
            _charts(cells, [axis for axis in axes if axis != "workload"], _speedups),
        ),
        Section(
            "Acceptance by draft position",
            "Share of rounds that accepted at least so many drafts; a line is one N. At the lowest load.",
            _charts(alone, axes, lambda own: _by_draft(own, colours)),
        ),
        Section(
            "Drafts accepted in a round",
            "Each method at its best N. At the lowest load; the mean counts the target's own token.",
            _charts([cell for cell in alone if _key(cell) in best], axes, lambda own: _accepted(own, colours)),
        ),
        Section(
            "Acceptance by output position",
            "Tokens a round, by how far the output was when the round began, each method at its best N.",
            _charts([cell for cell in alone if _key(cell) in best], axes, lambda own: _by_place(own, colours)),
            absent="The file does not say, or its outputs are shorter than 64 tokens.",
        ),
        Section(
            "Throughput against one reader's speed",
            "Every choice at every load. On the line are those that no other beats in both.",
            _charts(cells, over_loads, lambda own: _front(own, front, colours)),
        ),
        Section(
            "Where the time goes",
            "Milliseconds of wall time for an output token: drafting, the target's forwards, the rest.",
            _charts(chosen, axes, _time),
        ),
    ]


def _charts(cells: Cells, axes: Sequence[str], draw: Callable[[Cells], Figure | None]) -> list[Chart]:
    """A picture for each target and each combination of `axes`; draw gives None where there is nothing to show."""

    places: dict[tuple[Any, ...], Cells] = {}
    for cell in cells:
        where = cell["place"]["target"], *(cell["place"][axis] for axis in axes)
        places.setdefault(where, []).append(cell)
    charts = []
    for (target, *_), own in places.items():
        figure = draw(own)
        if figure is not None:
            title = place_text(own[0]["place"], axes) or "all workloads"
            charts.append(Chart(target, title, json.loads(figure.to_json())))
    return charts


def _throughput(cells: Cells, colours: Mapping[str, str]) -> Figure:
    from plotly import graph_objects as go

    figure = _figure("draft tokens, N", "output tokens/s")
    for method, own in _by_method(cells):
        above, below = zip(*(_reach(cell) for cell in own), strict=True)
        figure.add_trace(
            go.Scatter(
                x=[cell["num_speculative_tokens"] for cell in own],
                y=[cell["tok_s"] for cell in own],
                error_y={"array": above, "arrayminus": below, "thickness": 1, "width": 3},
                mode="lines+markers",
                name=method,
                line={"color": colours[method], "width": 2},
                marker={"symbol": ["x" if cell["stopped"] else "circle" for cell in own], "size": 8},
                customdata=[cell["speedup"]["ratio"] for cell in own],
                hovertemplate="N=%{x}: %{y:.1f} tokens/s, %{customdata:.2f}x",
            )
        )
    figure.add_hline(y=cells[0]["plain_tok_s"], line={"dash": "dash", "color": _PLAIN_COLOUR, "width": 1.5})
    figure.update_xaxes(
        tickmode="array", tickvals=sorted({cell["num_speculative_tokens"] for cell in _drafting(cells)})
    )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _speedups(cells: Cells) -> Figure:
    from plotly import graph_objects as go

    drafting = _drafting(cells)
    choices = list(dict.fromkeys(label_of(cell) for cell in sorted(drafting, key=_choice_order)))
    workloads = list(dict.fromkeys(cell["place"]["workload"] for cell in drafting))
    ratios = {(label_of(cell), cell["place"]["workload"]): cell["speedup"]["ratio"] for cell in drafting}
    table = [[ratios.get((choice, workload)) for workload in workloads] for choice in choices]
    reach = max(0.25, max(abs(ratio - 1) for ratio in ratios.values()))
    figure = _figure("", "", height=50 + 24 * len(choices))
    figure.add_trace(
        go.Heatmap(
            z=table,
            x=workloads,
            y=choices,
            text=[[_marked(ratio) for ratio in row] for row in table],
            texttemplate="%{text}",
            zmin=1 - reach,
            zmax=1 + reach,
            colorscale=_SCALE,
            showscale=False,
            xgap=2,
            ygap=2,
            hovertemplate="%{y}, %{x}: %{z:.2f}x<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    figure.update_xaxes(side="top", showgrid=False)
    figure.update_layout(margin={"t": 34, "b": 8}, showlegend=False)
    return figure


def _by_draft(cells: Cells, colours: Mapping[str, str]) -> Figure:
    from plotly import graph_objects as go

    figure = _figure("draft position", "share of rounds")
    for method, own in _by_method(cells):
        for index, cell in enumerate(own):
            reached = cell["per_position_acceptance"]
            figure.add_trace(
                go.Scatter(
                    x=list(range(1, len(reached) + 1)),
                    y=reached,
                    mode="lines+markers",
                    name=method,
                    legendgroup=method,
                    showlegend=index == len(own) - 1,
                    line={"color": colours[method], "width": 1.5},
                    marker={"size": 5},
                    opacity=0.45 + 0.55 * (index + 1) / len(own),
                    hovertemplate=f"N={cell['num_speculative_tokens']}, draft %{{x}}: %{{y:.0%}}",
                )
            )
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    figure.update_xaxes(dtick=1 if max(len(cell["per_position_acceptance"]) for cell in cells) <= 10 else 2)
    return figure


def _accepted(cells: Cells, colours: Mapping[str, str]) -> Figure:
    from plotly import graph_objects as go

    figure = _figure("drafts accepted", "share of rounds")
    for method, own in _by_method(cells):
        for cell in own:
            figure.add_trace(
                go.Bar(
                    x=list(range(len(cell["acceptance_shares"]))),
                    y=cell["acceptance_shares"],
                    name=f"{label_of(cell)}, mean {cell['mean_acceptance_length']:.2f}",
                    marker={"color": colours[method]},
                    hovertemplate="%{x} accepted: %{y:.0%} of rounds",
                )
            )
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(dtick=1)
    return figure


def _by_place(cells: Cells, colours: Mapping[str, str]) -> Figure | None:
    from plotly import graph_objects as go

    known = [cell for cell in cells if len(cell["by_output_position"] or ()) > 1]
    if not known:
        return None
    figure = _figure("output position of the round", "tokens a round")
    for method, own in _by_method(known):
        for cell in own:
            firsts, counts, lengths = zip(*cell["by_output_position"], strict=True)
            figure.add_trace(
                go.Scatter(
                    x=[f"from {first}" for first in firsts],
                    y=lengths,
                    mode="lines+markers",
                    name=label_of(cell),
                    line={"color": colours[method], "width": 2},
                    customdata=counts,
                    hovertemplate="%{x}: %{y:.2f} tokens in each of %{customdata} rounds",
                )
            )
    figure.update_yaxes(rangemode="tozero")
    return figure


def _front(cells: Cells, front: set[tuple[Any, ...]], colours: Mapping[str, str]) -> Figure | None:
    from plotly import graph_objects as go

    known = [cell for cell in cells if cell["user_tok_s"] is not None]
    if not known:
        return None
    figure = _figure("tokens/s that one reader sees", "output tokens/s of all")
    ahead = sorted((cell for cell in known if _key(cell) in front), key=lambda cell: float(cell["user_tok_s"]))
    figure.add_trace(
        go.Scatter(
            x=[cell["user_tok_s"] for cell in ahead],
            y=[cell["tok_s"] for cell in ahead],
            mode="lines",
            line={"color": _PLAIN_COLOUR, "width": 1.5, "shape": "vh"},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    for method, own in [(PLAIN.method, [cell for cell in known if _is_plain(cell)]), *_by_method(known)]:
        figure.add_trace(
            go.Scatter(
                x=[cell["user_tok_s"] for cell in own],
                y=[cell["tok_s"] for cell in own],
                mode="markers",
                name=method,
                marker={
                    "color": colours[method],
                    "size": [11 if _key(cell) in front else 7 for cell in own],
                    "symbol": ["circle" if _key(cell) in front else "circle-open" for cell in own],
                    "opacity": 1,
                    "line": {"width": 1.5, "color": colours[method]},
                },
                customdata=[f"{label_of(cell)}, {cell['place']['concurrency']} at a time" for cell in own],
                hovertemplate="%{customdata}: %{x:.1f} and %{y:.1f} tokens/s",
            )
        )
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _time(cells: Cells) -> Figure | None:
    from plotly import graph_objects as go

    known = [cell for cell in cells if cell["time"] is not None]
    if not known:
        return None
    ordered = sorted(known, key=lambda cell: (not _is_plain(cell), *_choice_order(cell)))
    figure = _figure("ms an output token", "", height=130 + 28 * len(ordered))
    parts = (("draft_s", "draft", "#e07b39"), ("verify_s", "verify", "#3b82c4"), ("other_s", "rest", _PLAIN_COLOUR))
    for key, name, colour in parts:
        figure.add_trace(
            go.Bar(
                x=[1e3 * cell["time"][key] for cell in ordered],
                y=[label_of(cell) for cell in ordered],
                name=name,
                orientation="h",
                marker={"color": colour},
                hovertemplate="%{y}: %{x:.2f} ms",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    return figure


def _figure(x: str, y: str, *, height: int = _HEIGHT) -> Figure:
    """An empty picture in the page's manner."""
    from plotly import graph_objects as go

    clear = "rgba(0,0,0,0)"
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 12, "t": 14, "b": 44},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        font={"family": "system-ui, sans-serif", "size": 12},
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "traceorder": "normal"},
        showlegend=True,
        hoverlabel={"namelength": -1},
    )
    figure.update_xaxes(title={"text": x, "standoff": 8}, fixedrange=True, zeroline=False, ticks="")
    figure.update_yaxes(title={"text": y, "standoff": 8}, fixedrange=True, zeroline=False, ticks="")
    return figure


def _by_method(cells: Cells) -> Iterator[tuple[str, Cells]]:
    """Drafting cells by method, by N within it."""
    ordered = sorted(_drafting(cells), key=_choice_order)
    for method, own in groupby(ordered, key=lambda cell: str(cell["method"])):
        yield method, list(own)


def _lowest_load(cells: Cells) -> Cells:
    """Cells of the lowest concurrency that their place was measured at."""
    lowest: dict[tuple[Any, ...], int] = {}

    def where(cell: Mapping[str, Any]) -> tuple[Any, ...]:
        place = cell["place"]
        return place["target"], place["workload"], place["temperature"], place["context_len"]

    for cell in cells:
        load = cell["place"]["concurrency"] or 0
        lowest[where(cell)] = min(lowest.get(where(cell), load), load)
    return [
        cell for cell in cells if (cell["place"]["concurrency"] or 0) == lowest[where(cell)] and not _is_plain(cell)
    ]


def _colours(cells: Cells) -> dict[str, str]:
    methods = sorted({str(cell["method"]) for cell in _drafting(cells)})
    return {PLAIN.method: _PLAIN_COLOUR} | {
        method: _COLOURS[index % len(_COLOURS)] for index, method in enumerate(methods)
    }


def _reach(cell: Mapping[str, Any]) -> tuple[float, float]:
    """How far throughput's interval goes above and below it; 0 where none is known."""
    found, plain = cell["speedup"], cell["plain_tok_s"]
    if found["low"] is None:
        return 0.0, 0.0
    return (found["high"] - found["ratio"]) * plain, (found["ratio"] - found["low"]) * plain


def _marked(ratio: float | None) -> str:
    return "" if ratio is None else f"▼ {times(ratio)}" if ratio < 1 else times(ratio)


def _drafting(cells: Cells) -> Cells:
    return [cell for cell in cells if not _is_plain(cell)]


def _is_plain(cell: Mapping[str, Any]) -> bool:
    return not cell["num_speculative_tokens"]


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return *cell["place"].values(), cell["method"], cell["num_speculative_tokens"]


def _choice_order(cell: Mapping[str, Any]) -> tuple[str, int]:
    return cell["method"], cell["num_speculative_tokens"]
