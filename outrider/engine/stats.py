"""What the engine counts while it runs: steps, rows, time by stage, and drafting. Sums only; whoever reads divides."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.metrics import AcceptanceDrift, SpeculationCounters

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTimes:
    """Wall seconds of one step: drafting, the target's forward, and everything else."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.draft_s + self.verify_s + self.other_s


@dataclass
class EngineStats:
    """Totals since the engine started.

    workloads: drafting of finished and aborted requests by their class. num_breaches: requests whose counts do not add
    up, which is a fault of ours. saved_s: seconds that drafts saved all requests together, below 0 what they cost them;
    0 where costs are not measured.
    """

    num_steps: int = 0
    num_rows: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    saved_s: float = 0.0
    num_breaches: int = 0
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    workloads: dict[str, SpeculationCounters] = field(default_factory=dict)
    drift: AcceptanceDrift = field(default_factory=AcceptanceDrift)

    @property
    def stages(self) -> StepTimes:
        """The three stages' seconds so far."""
        return StepTimes(self.draft_s, self.verify_s, self.other_s)

    def observe_step(self, times: StepTimes, num_rows: int) -> None:
        """Add one step."""
        self.num_steps += 1
        self.num_rows += num_rows
        self.draft_s += times.draft_s
        self.verify_s += times.verify_s
        self.other_s += times.other_s

    def observe_end(self, counters: SpeculationCounters, workload: str, num_output: int) -> None:
        """Add a request that has ended, with what it counted and committed."""
        broken = counters.broken_identities()
        if counters.num_committed != num_output:
            broken.append("committed = output tokens")
        if broken:
            self.num_breaches += 1
            _log.error("counts of a request do not add up: %s", "; ".join(broken))
        by_workload = self.workloads.setdefault(workload, SpeculationCounters())
        by_workload.merge(counters)
        for sums in (self.speculation, by_workload):
            sums.observe_request(counters)
        self.drift.observe(counters)
