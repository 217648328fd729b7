"""Taking drafts from logits as they come, position by position, for drafters whose next draft depends on the last.

Each step has one row for each request that still drafts; what was drawn from, and how sure the drafter was, is kept and
given back request by request.
Not here: keyed randomness and distributions (sampling). Legend: A rows of a step, Vd drafted vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.drafting.base import DraftContext
from outrider.drafting.vocabulary import DraftVocabulary
from outrider.sampling import concatenate, distributions, draft_group, draw, entries_of, greedy
from outrider.types import Distributions


class Drawing:
    """The choices of one round. `is_sure`: the drafter says by other means how sure it is, so that is not noted."""

    def __init__(self, context: DraftContext, vocabulary: DraftVocabulary, *, is_sure: bool = False) -> None:
        self._context, self._vocabulary = context, vocabulary
        self._notes = context.pace is not None and not is_sure
        self._drawn: list[Distributions] = []
        self._top_probs: list[npt.NDArray[np.float64]] = []

    def choose(self, logits: Tensor, step: int, requests: Sequence[int]) -> Tensor:
        """One draft from each row of logits [A, Vd], the likeliest or a drawn one: target ids [A].

        Where lengths adapt, also notes how likely the drafter found its likeliest token.
        """
        if self._context.sample_method == "greedy":
            chosen = greedy(logits)
            if self._notes:
                self._top_probs.append(top_probs(logits, chosen))
            return self._vocabulary.to_target(chosen)
        groups = [draft_group(self._context.groups[index], step) for index in requests]
        self._drawn.append(distributions(self._vocabulary.widen(logits), groups))
        if self._notes:
            self._top_probs.append(top_probs_of(self._drawn[-1]))
        return torch.tensor(draw(self._drawn[-1], groups, self._context.purpose), device=logits.device)

    def goes_on(self, step: int, requests: Sequence[int]) -> list[bool]:
        """Which of these requests, those of the last step, want another draft; all of them where lengths are fixed."""
        pace = self._context.pace
        if pace is None:
            return [True] * len(requests)
        return pace.goes_on(step, [self._context.slots[index] for index in requests], self._top_probs[-1].tolist())

    def top_probs(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        """What was noted, all steps' rows in this order; None where lengths are fixed."""
        return np.concatenate(self._top_probs)[order] if self._top_probs else None

    def drawn_from(self, order: npt.NDArray[np.int64]) -> Distributions | None:
        """What the drafts were drawn from, all steps' rows in this order; None if they were not drawn."""
        if not self._drawn:
            return None
        by_step = concatenate(self._drawn)
        entries, starts = entries_of(by_step.starts.numpy(), order)
        chosen = torch.from_numpy(entries)
        return Distributions(by_step.ids[chosen], by_step.probs[chosen], torch.from_numpy(starts))


def top_probs(logits: Tensor, chosen: Tensor) -> npt.NDArray[np.float64]:
    """The probability that each row of logits [A, Vd] gives to its likeliest token `chosen` [A]."""
    if logits.device.type != "cpu":
        best = logits.gather(1, chosen[:, None])
        return 1 / (logits - best).exp().sum(dim=1).cpu().double().numpy()
    # NumPy, because torch would wake threads that get in the way of the kernels' own (docs/benchmarks.md).
    parts = [part.float().numpy() for part in torch.split(logits.detach(), 8)]
    sums = [np.exp(part - part.max(axis=1, keepdims=True)).sum(axis=1) for part in parts]
    return 1 / np.concatenate(sums).astype(np.float64)


def top_probs_of(drawn: Distributions) -> npt.NDArray[np.float64]:
    """The largest probability in each row."""
    return np.maximum.reduceat(drawn.probs.numpy(), drawn.starts.numpy()[:-1]).astype(np.float64)
