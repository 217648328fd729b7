"""A run's log as a picture: loss and agreement over response tokens, and the acceptance that the engine measured.

Needs matplotlib, from the extra `train`; the log itself is complete without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVE = "curve.png"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(entries: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write the picture of a log's entries."""
    from matplotlib.figure import Figure

    steps = [entry for entry in entries if "loss" in entry]
    measured = [entry for entry in entries if "mean_acceptance_length" in entry]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = [entry["response_tokens"] for entry in steps]
    left.plot(seen, _smooth([entry["loss"] for entry in steps]), color="tab:gray")
    left.set(title=f"{title}: loss", xlabel="response tokens")
    depth = max((len(entry["agreement"]) for entry in steps), default=0)
    for place in range(depth):
        shares = [entry["agreement"][place] if place < len(entry["agreement"]) else None for entry in steps]
        known = [(x, share) for x, share in zip(seen, shares, strict=True) if share is not None]
        right.plot([x for x, _ in known], _smooth([y for _, y in known]), alpha=0.6, label=f"draft {place + 1}")
    right.set(title="agreement in training, acceptance served", xlabel="response tokens", ylim=(0, 1))
    right.legend(loc="lower right", fontsize="small")
    lengths = right.twinx()
    xs = [entry["response_tokens"] for entry in measured]
    lengths.plot(xs, [entry["mean_acceptance_length"] for entry in measured], "ko-", label="mean acceptance length")
    lengths.set_ylabel("mean acceptance length (black)")
    lengths.set_ylim(bottom=1)
    figure.savefig(path, dpi=120)


def _smooth(values: Sequence[float], share: float = 0.9) -> list[float]:
    """A running mean that forgets."""
    smoothed, level = [], values[0] if values else 0.0
    for value in values:
        level = share * level + (1 - share) * value
        smoothed.append(level)
    return smoothed
