"""How much of a drafter's proposals the target accepts: served by the engine itself, greedily, and nothing else.

One road for training (held-out prompts judge checkpoints), for `check --acceptance` (a loaded drafter must reach what
its profile recorded) and for tests. Not here: time, which bench measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.errors import DrafterMismatch
from outrider.llm import LLM
from outrider.types import RequestStats, SamplingParams


@dataclass(frozen=True)
class Acceptance:
    """Over some requests: mean acceptance length as vLLM counts it, and the share of rounds that accepted draft i."""

    mean_acceptance_length: float
    per_position_acceptance: tuple[float, ...]

    @classmethod
    def of(cls, requests: Iterable[RequestStats]) -> Acceptance:
        """Sums first, one division then; 1 and nothing where no round drafted."""
        rounds: list[int] = []
        for stats in requests:
            rounds += [0] * (len(stats.accepted_histogram) - len(rounds))
            for accepted, count in enumerate(stats.accepted_histogram):
                rounds[accepted] += count
        total = max(1, sum(rounds))
        reached = tuple(sum(rounds[place:]) / total for place in range(1, len(rounds)))
        return cls(1 + sum(reached), reached)


def measure(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[RequestStats]:
    """What each greedy answer took, to prompts given as token ids, all served at once.

    Raises DrafterMismatch for the first drafting error, which serving only reports: a drafter that fails has no
    acceptance.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found = []
    for output in llm.generate([list(prompt) for prompt in prompts], params):
        stats = output.outputs[0].stats
        assert stats is not None, "a finished choice has stats"
        if stats.drafting_error is not None:
            raise DrafterMismatch(f"drafting failed: {stats.drafting_error}", param="model")
        found.append(stats)
    return found
