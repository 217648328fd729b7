"""What a benchmark shows: one JSON object for programs, headlines and two tables of 80 columns for people.

Only words and layout here; every number comes from bench/measure.py and every condition from bench/conditions.py.
"""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from outrider.bench.measure import Compared, Numbers, Side, Spread


def as_json(found: Numbers, conditions: dict[str, Any]) -> dict[str, Any]:
    """Plain data. `speculative`, `speedup`, `lossless` and `time` are the first configuration's, `runs` has all."""
    runs = [_run_json(run) for run in found.runs]
    first = {key: value for key, value in runs[0].items() if key != "speculative_config"} if runs else {}
    score = {} if found.plain.num_right is None else {"num_answers": found.num_answers}
    return {
        "plain": _side_json(found.plain),
        **first,
        "runs": runs,
        **score,
        "num_prompts": found.num_items,
        "is_complete": found.is_complete,
        "peak_memory_bytes": found.peak_memory_bytes,
        "conditions": conditions,
    }


def headlines(found: Numbers) -> list[str]:
    """One line for each configuration: speedup with its interval, both speeds, and what the text is."""
    return [
        f"{run.config.method} N={run.config.num_speculative_tokens}: "
        f"{run.speedup.ratio:.2f}x ({run.speedup.low:.2f} to {run.speedup.high:.2f}), "
        f"{found.plain.tok_s:.1f} -> {run.side.tok_s:.1f} tok/s; text: {_verdict(run)}"
        for run in found.runs
    ]


def tables(found: Numbers) -> list[Table]:
    """Two tables of a line for plain decoding and each configuration: what drafts bring, and where the time goes."""
    names = [f"{run.config.method} N={run.config.num_speculative_tokens}" for run in found.runs]
    gains = _table("", "output\ntok/s", "speedup", "mean\nacceptance\nlength", "accepted by\nposition, %", "text")
    gains.add_row("plain", f"{found.plain.tok_s:.1f}")
    for name, run in zip(names, found.runs, strict=True):
        gains.add_row(name, *_gains(run))
    times = _table(
        "",
        "first token\nms p50 / p99",
        "per token\nms p50 / p99",
        "tok/s after\nthe first",
        "draft / verify\n/ other s",
    )
    scored = found.plain.num_right is not None
    if scored:
        times.add_column("exact match")
    for name, side in zip(["plain", *names], [found.plain, *(run.side for run in found.runs)], strict=True):
        times.add_row(name, *_times(side), *([f"{side.num_right}/{found.num_answers}"] if scored else []))
    return [gains, times]


def notes(found: Numbers) -> list[str]:
    """What a reader must not miss, a line each."""
    lines = [f"drafting stopped: {error}" for run in found.runs for error in run.side.drafting_errors]
    lines += [
        f"{run.config.method} drafted nothing: no place in these prompts and texts gave it a proposal"
        for run in found.runs
        if not run.side.counters.num_drafts
    ]
    lines += [f"text not compared: {run.lossless.reason}" for run in found.runs if run.lossless.reason]
    if not found.is_complete:
        lines.append(f"interrupted: {found.num_rounds} rounds over {found.num_items} prompts were measured")
    return lines


def _run_json(run: Compared) -> dict[str, Any]:
    counters, side = run.side.counters, run.side
    return {
        "speculative_config": run.config.as_json(),
        "speculative": _side_json(side)
        | {
            "mean_acceptance_length": counters.mean_acceptance_length,
            "mean_committed_length": counters.mean_committed_length,
            "acceptance_rate": counters.acceptance_rate,
            "per_position_acceptance": counters.per_position_acceptance,
            "acceptance_histogram": counters.acceptance_histogram,
            "num_rounds": counters.num_rounds,
            "num_drafts": counters.num_drafts,
            "num_draft_tokens": counters.num_draft_tokens,
            "num_accepted_tokens": counters.num_accepted_tokens,
            "drafting_errors": list(side.drafting_errors),
        },
        "speedup": {"ratio": run.speedup.ratio, "low": run.speedup.low, "high": run.speedup.high},
        "lossless": run.lossless.as_json(),
        "time": {"draft_s": side.draft_s, "verify_s": side.verify_s, "other_s": side.other_s},
    }


def _side_json(side: Side) -> dict[str, Any]:
    score = {} if side.num_right is None else {"num_right": side.num_right}
    return {
        "tok_s": side.tok_s,
        "decode_tok_s": _number(side.decode_tok_s),
        "num_tokens": side.num_tokens,
        "seconds": side.seconds,
        "ttft_s": {"p50": _number(side.ttft_s.p50), "p99": _number(side.ttft_s.p99)},
        "tpot_s": {"p50": _number(side.tpot_s.p50), "p99": _number(side.tpot_s.p99)},
        "time": {"draft_s": side.draft_s, "verify_s": side.verify_s, "other_s": side.other_s},
        **score,
    }


def _verdict(run: Compared) -> str:
    found = run.lossless
    if found.verdict == "near-tie":
        return f"near-tie, margin at most {found.max_margin:.4f}"
    if found.verdict == "divergence":
        first = found.divergences[0]
        return f"DIVERGENCE at prompt {first.prompt_index}, token {first.position}, margin {first.margin:.4f}"
    return found.verdict


def _milliseconds(spread: Spread) -> str:
    return f"{spread.p50 * 1e3:.1f} / {spread.p99 * 1e3:.1f}"


def _table(*headers: str) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        shown.add_column(header, vertical="bottom", no_wrap="position" not in header)
    return shown


def _gains(run: Compared) -> list[str]:
    speedup, counters = run.speedup, run.side.counters
    return [
        f"{run.side.tok_s:.1f}",
        f"{speedup.ratio:.2f} ({speedup.low:.2f} to {speedup.high:.2f})",
        f"{counters.mean_acceptance_length:.2f}",
        " ".join(f"{100 * share:.0f}" for share in counters.per_position_acceptance),
        run.lossless.verdict,
    ]


def _times(side: Side) -> list[str]:
    return [
        _milliseconds(side.ttft_s),
        _milliseconds(side.tpot_s),
        f"{side.decode_tok_s:.1f}",
        f"{side.draft_s:.2f} / {side.verify_s:.2f} / {side.other_s:.2f}",
    ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
