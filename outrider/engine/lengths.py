"""How far to draft and how much of it to verify, step by step: what scheduler and engine ask, and fixed lengths.

Asked before a step for the budgets of its decoding requests, after drafting for what to keep of the proposal, and told
after the step what came of it. Here everything is as configured; adaptive.py decides by what it costs and brings.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from outrider.config import SpeculativeConfig
from outrider.drafting.base import Pace
from outrider.engine.budget import draft_budget
from outrider.engine.sequence import Entry, Sequence
from outrider.engine.stats import StepTimes
from outrider.types import Proposal, Verdict


@dataclass(frozen=True)
class Price:
    """Of a step with drafts: seconds that a plain step takes at this load, and what this one took more."""

    plain_s: float
    extra_s: float


class Lengths(Protocol):
    """What scheduler and engine ask."""

    pace: Pace | None

    def begin(self, sequence: Sequence) -> None:
        """A sequence starts in its slot."""

    def budgets(self, sequences: Items[Sequence], num_prompt_rows: int) -> list[int]:
        """Draft tokens to make for each of the step's decoding sequences, beside so many rows of prompts."""

    def keep(self, entries: Items[Entry], proposal: Proposal) -> Proposal:
        """The part of a proposal that is to be verified."""

    def observe(self, entries: Items[Entry], verdicts: Items[Verdict | None], times: StepTimes) -> Price | None:
        """Learn from a step, one verdict an entry; what its drafts cost, None if there were none or nobody measures."""


class FixedLengths:
    """Every request drafts as many tokens as the configuration says, and all are verified."""

    pace: Pace | None = None

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self._config = config

    def begin(self, sequence: Sequence) -> None:
        """Nothing to prepare."""

    def budgets(self, sequences: Items[Sequence], num_prompt_rows: int) -> list[int]:
        """The ceilings."""
        if self._config is None:
            return [0] * len(sequences)
        return [draft_budget(sequence, self._config, len(sequences)) for sequence in sequences]

    def keep(self, entries: Items[Entry], proposal: Proposal) -> Proposal:
        """All of it."""
        return proposal

    def observe(self, entries: Items[Entry], verdicts: Items[Verdict | None], times: StepTimes) -> Price | None:
        """Nothing to learn."""
        return None
