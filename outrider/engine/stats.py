"""What the engine counts while it runs: steps, rows, time by stage, and drafting. Sums only; whoever reads divides."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.metrics import SpeculationCounters


@dataclass
class EngineStats:
    """Totals since the engine started. Seconds are wall time: drafting, the target's forward, and everything else."""

    num_steps: int = 0
    num_rows: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)

    def observe_step(self, stages: tuple[float, float, float, float, float], num_rows: int) -> None:
        """Add one step, given when it began, was scheduled, had its drafts, had its logits, and was committed."""
        began, scheduled, drafted, computed, committed = stages
        self.num_steps += 1
        self.num_rows += num_rows
        self.draft_s += drafted - scheduled
        self.verify_s += computed - drafted
        self.other_s += (scheduled - began) + (committed - computed)
