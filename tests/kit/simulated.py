"""A machine and a drafter made of numbers: step costs and acceptance are given, time is counted, nothing is computed.

`Lengths` is asked and told exactly as the engine does, so what a guard gains or loses can be seen over thousands of
steps in a second, with any noise, without noise from this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.engine.costs import StepCosts
from outrider.engine.lengths import Lengths
from outrider.engine.sequence import Entry
from outrider.engine.sequence import Sequence as Running
from outrider.engine.stats import StepTimes
from outrider.types import DraftParams, Proposal, Verdict
from tests.kit import tiny

PROMPT_LEN = 40


@dataclass
class Machine:
    """What steps take: `verify` by rows, `draft` by requests and length, `fill_s` by row; noise in each step."""

    verify: Callable[[float], float]
    draft: Callable[[int, int], float]
    fill_s: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def costs(self, num_tokens: int, error: float = 0.0) -> StepCosts:
        """Tables as a start-up would measure them, each number wrong by about that share."""
        rows, requests = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192], [1, 2, 4, 8, 16, 32]
        wrong = np.random.default_rng(self.seed + 1)
        verify = [self.verify(row) * (1 + error * wrong.standard_normal()) for row in rows]
        draft = [[self.draft(count, n) for n in range(1, num_tokens + 1)] for count in requests]
        return StepCosts(rows, verify, requests, draft, self.fill_s)

    def noisy(self, seconds: float) -> float:
        """With noise; now and then something else runs."""
        slow = 1.8 if self.noise and self.random.random() < 0.02 else 1.0
        return seconds * slow * float(np.exp(self.noise * self.random.standard_normal()))


@dataclass
class Drafts:
    """How a drafter fares: acceptance of a draft given those before it is drawn around `mean`; it says what it knows.

    `insight`: 1 says it exactly, 0 says nothing of use. `head`: as confidences, else as top probabilities; None says
    nothing at all. `asks`: it asks how far to go.
    """

    mean: float
    insight: float = 0.7
    head: bool | None = False
    asks: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def chances(self, length: int) -> np.ndarray:
        """The chance of each draft of a chain."""
        if self.mean in (0.0, 1.0):
            return np.full(length, self.mean)
        return self.random.beta(2 * self.mean, 2 * (1 - self.mean), size=length)

    def said(self, chances: np.ndarray) -> tuple[float, ...]:
        """What it says of them."""
        return tuple((self.insight * chances + (1 - self.insight) * 0.7).tolist())


@dataclass
class Run:
    """Seconds with and without drafts for the same tokens, drafts made and verified, each step's longest chain made and
    verified.
    """

    seconds: float = 0.0
    plain_s: float = 0.0
    num_drafted: int = 0
    num_verified: int = 0
    drafted: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    drafted_steps: int = 0

    @property
    def speedup(self) -> float:
        return self.plain_s / self.seconds


class World:
    """Requests that decode on a machine, under `lengths`; `load(n)` keeps n of them running."""

    def __init__(self, machine: Machine, drafts: Drafts, lengths: Lengths, *, workload: str = "") -> None:
        self.machine, self.drafts, self.lengths = machine, drafts, lengths
        self.drafting = DraftParams(workload=workload)
        self.running: list[Running] = []
        self.filled: dict[int, int] = {}
        self.plain = Run()

    def load(self, count: int) -> None:
        """End the last requests or start new ones until so many run."""
        while len(self.running) > count:
            self.running.pop()
        while len(self.running) < count:
            self._start(min(set(range(64)) - {sequence.slot for sequence in self.running}))

    def _start(self, slot: int) -> None:
        request = replace(tiny.make_request("x", (1,) * PROMPT_LEN, max_tokens=None), drafting=self.drafting)
        sequence = Running(request, 10**6, tiny.VOCAB)
        sequence.slot = slot
        self.filled[slot] = 0
        self.running.append(sequence)
        self.lengths.begin(sequence)

    def step(self, run: Run) -> None:
        """One step; a request that is 128 tokens long is replaced by a new one."""
        budgets = self.lengths.budgets(self.running, 0)
        entries = [
            Entry(sequence, 1, budget, samples=True) for sequence, budget in zip(self.running, budgets, strict=True)
        ]
        chances = [self.drafts.chances(budget) for budget in budgets]
        lengths = self._drafted(budgets, chances)
        proposal = self._proposal(lengths, chances)
        kept = self.lengths.keep(entries, proposal)
        verdicts = [self._verdict(len(kept.tokens[i]), chances[i]) for i in range(len(entries))]
        rows, count = len(entries) + sum(map(len, kept.tokens)), sum(length > 0 for length in lengths)
        behind = [s.num_tokens - self.filled[s.slot] for s, n in zip(self.running, lengths, strict=True) if n]
        for sequence, length in zip(self.running, lengths, strict=True):
            self.filled[sequence.slot] = sequence.num_tokens if length else self.filled[sequence.slot]
        draft_s = (
            self.machine.draft(count, max(lengths)) + self.machine.fill_s * sum(max(0, b - 3) for b in behind)
            if count
            else 0.0
        )
        noise = self.machine.noisy(1.0)
        times = StepTimes(draft_s * noise, self.machine.verify(rows) * noise, 0.0)
        self.lengths.observe(entries, verdicts, times)
        run.seconds += times.total_s
        # The mean over all draws of acceptance: the same as what was committed, with less chance in it.
        hoped = [np.cumprod(chances[i])[: len(kept.tokens[i])].sum() + 1 for i in range(len(entries))]
        run.plain_s += float(np.mean(hoped)) * self.machine.verify(len(entries)) * noise
        run.num_drafted += sum(lengths)
        run.drafted.append(max(lengths))
        run.num_verified += sum(map(len, kept.tokens))
        run.chosen.append(max(map(len, kept.tokens)))
        run.drafted_steps += count > 0
        self._commit(verdicts)

    def _drafted(self, budgets: Sequence[int], chances: Sequence[np.ndarray]) -> list[int]:
        """How long the chains get, of a drafter that asks."""
        pace, lengths = self.lengths.pace, list(budgets)
        if not self.drafts.asks or pace is None:
            return lengths
        for place in range(max(budgets) - 1):
            active = [i for i, length in enumerate(lengths) if length > place + 1]
            if not active:
                break
            slots = [self.running[i].slot for i in active]
            said = [self.drafts.said(chances[i])[place] for i in active]
            for i, more in zip(active, pace.goes_on(place, slots, said), strict=True):
                lengths[i] = lengths[i] if more else place + 1
        return lengths

    def _proposal(self, lengths: Sequence[int], chances: Sequence[np.ndarray]) -> Proposal:
        tokens = tuple((0,) * length for length in lengths)
        said = tuple(self.drafts.said(chance[:length]) for chance, length in zip(chances, lengths, strict=True))
        if self.drafts.head is None:
            return Proposal(tokens)
        return Proposal(tokens, confidence=said) if self.drafts.head else Proposal(tokens, top_probs=said)

    def _verdict(self, length: int, chances: np.ndarray) -> Verdict:
        hits = self.drafts.random.random(length) < chances[:length]
        return Verdict(int(np.cumprod(hits).sum()), 0)

    def _commit(self, verdicts: Sequence[Verdict]) -> None:
        for sequence, verdict in zip(list(self.running), verdicts, strict=True):
            for _ in range(verdict.num_accepted + 1):
                sequence.commit(1)
            if sequence.num_output >= 128:
                self.running.remove(sequence)
                self._start(sequence.slot)

    def run(self, num_steps: int) -> Run:
        """So many steps at the load there is."""
        run = Run()
        for _ in range(num_steps):
            self.step(run)
        return run
