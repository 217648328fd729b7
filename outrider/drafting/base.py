"""What a drafter is: a plug with three verbs and a few declarations, and the one record that it drafts from.

A drafter proposes; it never verifies, commits, or asks who the target is beyond `TargetInfo`. What it keeps per token
(a cache of its own) is paged under the target's own block tables and filled when it is asked to propose: a drafter that
was off, was preempted, or meets a prefix that another request filled, catches up in one packed pass, and a step without
drafts costs it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outrider.config import DraftSampleMethod
from outrider.models.cache import BlockPool
from outrider.models.memory import TargetMemory
from outrider.models.target import Target
from outrider.sampling import Purpose, RowGroup
from outrider.types import Proposal


@dataclass(frozen=True)
class TargetInfo:
    """The target as a drafter may know it: its model, block pool and memory (to read only), and the longest sequence.

    `memory.taps` holds the drafter's declared taps from before the first round on.
    """

    model: Target
    pool: BlockPool
    memory: TargetMemory
    max_len: int


class Pace(Protocol):
    """Says how far to draft, to drafters that make one draft after the other; the others draft their budgets."""

    def goes_on(self, place: int, slots: Sequence[int], top_probs: Sequence[float]) -> list[bool]:
        """Which requests want the draft after the one at `place` (from 0), just made; [A], A of them at least 1.

        `top_probs`: what the drafter gave to its likeliest token there. To be asked once for each place, in order.
        """


@dataclass(frozen=True)
class DraftContext:
    """What one round of drafting knows, request by request (B of them, those with a budget above 0).

    slots: small stable numbers of the running requests. histories: all committed ids (1-D int64 views; the last one is
    the anchor, which the target's cache does not hold yet). blocks: their block tables, with room for anchor and
    drafts. budgets: most drafts wanted. groups: sampling parameters and random keys of the next token. `purpose` says
    which noise a drafter that samples must use under the verification in force. `pace`: where lengths adapt, whom to
    ask how far to go; then the proposal also has confidences or top_probs where the drafter can say them.
    """

    slots: tuple[int, ...]
    histories: tuple[npt.NDArray[np.int64], ...]
    blocks: tuple[Sequence[int], ...]
    budgets: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    sample_method: DraftSampleMethod
    purpose: Purpose
    pace: Pace | None = None

    def only(self, index: int) -> DraftContext:
        """The same round for one of its requests."""
        part = slice(index, index + 1)
        return DraftContext(
            self.slots[part],
            self.histories[part],
            self.blocks[part],
            self.budgets[part],
            self.groups[part],
            self.sample_method,
            self.purpose,
            self.pace,
        )


class Drafter(Protocol):
    """Three verbs. `taps`: target layers whose hidden states it reads."""

    taps: tuple[int, ...]

    def begin(self, slot: int) -> None:
        """A request starts (or starts again after preemption) in this slot."""

    def propose(self, context: DraftContext) -> Proposal:
        """Up to `budgets[b]` draft tokens for each request b of the context, in its order."""

    def end(self, slot: int) -> None:
        """The request in this slot has finished, was aborted, or was preempted."""
