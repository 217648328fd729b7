"""How much of a drafter's proposals the target accepts: served by the engine itself, greedily, and nothing else.

One road for training (held-out prompts judge checkpoints), for `check --acceptance` (a loaded drafter must reach what
its profile recorded) and for tests. Not here: time, which bench measures.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import DrafterMismatch
from outrider.llm import LLM
from outrider.metrics import SpeculationCounters
from outrider.types import SamplingParams


def measure(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> SpeculationCounters:
    """Counters of this engine after greedy answers to prompts given as token ids, all at once.

    Raises DrafterMismatch for the first drafting error, which serving only reports: a drafter that fails has no
    acceptance.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    for output in llm.generate([list(prompt) for prompt in prompts], params):
        stats = output.outputs[0].stats
        if stats is not None and stats.drafting_error is not None:
            raise DrafterMismatch(f"drafting failed: {stats.drafting_error}", param="model")
    return llm.engine.stats.speculation
