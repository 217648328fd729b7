"""N-gram drafting (prompt lookup): proposes what followed the last time the text ended as it does now. No network.

Looks for the longest suffix of between `prompt_lookup_min` and `prompt_lookup_max` tokens that occurs earlier in the
request's own prompt and output, takes its most recent earlier place, and proposes the tokens after it. Nothing is kept
between rounds, and nothing of one request is seen by another. Source: Saxena, "Prompt lookup decoding", 2023; fields as
vLLM's. Where a place is too near the end to give the whole proposal, an earlier one of the same length that does is
taken instead.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.types import Proposal


class NgramDrafter:
    """Drafts by looking up the end of each request's own text in itself."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max

    def begin(self, slot: int) -> None:
        """Nothing to prepare: the text is in the context."""

    def propose(self, context: DraftContext) -> Proposal:
        """The continuation of each text's longest repeated suffix. Cost: a few passes over the text's ids."""
        pairs = zip(context.histories, context.budgets, strict=True)
        return Proposal(tuple(self._continuation(history, budget) for history, budget in pairs))

    def end(self, slot: int) -> None:
        """Nothing to release."""

    def _continuation(self, history: npt.NDArray[np.int64], budget: int) -> tuple[int, ...]:
        longest = min(self._longest, len(history) - 1)
        # Places where the last token occurred before, then narrowed one earlier token at a time.
        ends = np.flatnonzero(history[:-1] == history[-1])
        best: npt.NDArray[np.int64] | None = None
        for length in range(1, longest + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[history[ends - length + 1] == history[-length]]
            if not len(ends):
                break
            if length >= self._shortest:
                best = ends
        if best is None:
            return ()
        whole = best[best + budget < len(history)]
        start = int(whole[-1] if len(whole) else best[0]) + 1
        return tuple(history[start : start + budget].tolist())
