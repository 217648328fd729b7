"""Taking drafts from logits as they come, position by position, for drafters whose next draft depends on the last.

Each step has one row for each request that still drafts; what was drawn from is kept and given back request by request.
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
    """The choices of one round."""

    def __init__(self, context: DraftContext, vocabulary: DraftVocabulary) -> None:
        self._context, self._vocabulary = context, vocabulary
        self._drawn: list[Distributions] = []

    def choose(self, logits: Tensor, step: int, requests: Sequence[int]) -> Tensor:
        """One draft from each row of logits [A, Vd], the likeliest or a drawn one: target ids [A]."""
        if self._context.sample_method == "greedy":
            return self._vocabulary.to_target(greedy(logits))
        groups = [draft_group(self._context.groups[index], step) for index in requests]
        self._drawn.append(distributions(self._vocabulary.widen(logits), groups))
        return torch.tensor(draw(self._drawn[-1], groups, self._context.purpose), device=logits.device)

    def drawn_from(self, order: npt.NDArray[np.int64]) -> Distributions | None:
        """What the drafts were drawn from, all steps' rows in this order; None if they were not drawn."""
        if not self._drawn:
            return None
        by_step = concatenate(self._drawn)
        entries, starts = entries_of(by_step.starts.numpy(), order)
        chosen = torch.from_numpy(entries)
        return Distributions(by_step.ids[chosen], by_step.probs[chosen], torch.from_numpy(starts))
