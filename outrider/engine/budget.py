"""How many tokens to draft for a request in a step. One rule for all methods; it never asks a method's name.

Today the length is what the configuration says for the step's number of requests, cut to what can still be used.
Source of the schedule: vLLM 0.32, `v1/spec_decode/dynamic`.
"""

from __future__ import annotations

from outrider.config import SpeculativeConfig
from outrider.engine.sequence import Sequence


def draft_budget(sequence: Sequence, config: SpeculativeConfig, num_requests: int) -> int:
    """Draft tokens that may be verified for this sequence now, 0 and more.

    A round commits its accepted drafts and one token more, so one less than the tokens left is the most of use; beyond
    the drafter's own length limit the request goes on without drafts.
    """
    room = sequence.max_output - sequence.num_output - 1
    if config.max_model_len is not None:
        room = min(room, config.max_model_len - sequence.num_tokens)
    return max(0, min(config.num_tokens_for(num_requests), room))
