"""The laws that hold for every engine, whatever it ran: nothing leaks, every token and every draft is accounted for.

Checks look into the engine on purpose: a leak is by nature invisible from outside until it is too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.engine.engine import Engine
from outrider.metrics import SpeculationCounters
from outrider.types import Request, RequestStats

if TYPE_CHECKING:
    from tests.kit.tiny import Result

ON_PURPOSE = "the script says so"
"""What a drafter that is meant to fail says."""


def check_between_steps(engine: Engine) -> None:
    """Cache lengths, blocks and slots of every unfinished request."""
    pool, scheduler = engine.pool, engine.scheduler
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(set(slots) | set(engine._free_slots)) == engine.config.max_num_seqs
    assert len(slots) + len(engine._free_slots) == engine.config.max_num_seqs
    for sequence in scheduler.running:
        assert sequence.num_computed < sequence.num_tokens
        assert sequence.num_output == 0 or sequence.num_computed <= sequence.num_tokens - 1
        assert len(sequence.blocks) * pool.block_size >= sequence.num_computed
        assert sequence.num_output < sequence.max_output
    for sequence in scheduler.waiting:
        assert (sequence.blocks, sequence.num_computed, sequence.slot) == ([], 0, -1)
    users: dict[int, int] = {}
    for sequence in scheduler.running:
        for block in sequence.blocks:
            users[block] = users.get(block, 0) + 1
    assert pool.num_free == pool.num_blocks - len(users)


def check_at_rest(engine: Engine) -> None:
    """Nothing is held when nothing runs, and the counters' identities hold."""
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks
    assert sorted(engine._free_slots) == list(range(engine.config.max_num_seqs))
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.stats.speculation.broken_identities() == []


def check_result(request: Request, result: Result, max_len: int) -> None:
    """One request's statistics against its tokens."""
    stats = result.stats
    assert stats is not None
    assert result.finish in ("stop", "length")
    # A drafter's failure does not fail a request, so the assertions inside scripted drafters would go unseen.
    assert stats.drafting_error is None or ON_PURPOSE in stats.drafting_error, stats.drafting_error
    assert stats.num_output_tokens == len(result.tokens)
    assert stats.num_prompt_tokens == len(request.prompt_ids)
    assert 0 <= stats.num_cached_tokens < stats.num_prompt_tokens
    assert len(request.prompt_ids) + len(result.tokens) <= max_len
    if request.params.max_tokens is not None:
        assert len(result.tokens) <= request.params.max_tokens
    assert sum(stats.accepted_histogram) == stats.num_drafts
    assert sum(a * count for a, count in enumerate(stats.accepted_histogram)) == stats.num_accepted
    assert stats.num_accepted <= stats.num_drafted
    assert 0 <= stats.first_token_s <= stats.total_s
    if request.params.logprobs is not None:
        assert [entry.token_id for entry in result.logprobs] == result.tokens
    else:
        assert result.logprobs == []


def check_sums(before: SpeculationCounters, after: SpeculationCounters, stats: Sequence[RequestStats]) -> None:
    """What the engine counted is the sum of what its requests say, none of which was aborted."""
    assert after.num_committed - before.num_committed == sum(item.num_output_tokens for item in stats)
    assert after.num_drafts - before.num_drafts == sum(item.num_drafts for item in stats)
    assert after.num_draft_tokens - before.num_draft_tokens == sum(item.num_drafted for item in stats)
    assert after.num_accepted_tokens - before.num_accepted_tokens == sum(item.num_accepted for item in stats)
    longest = max(len(after.acceptance_histogram), *(len(item.accepted_histogram) for item in stats), 0)
    histograms = [after.acceptance_histogram, before.acceptance_histogram, *(item.accepted_histogram for item in stats)]
    whole, old, *parts = ([*histogram, *[0] * (longest - len(histogram))] for histogram in histograms)
    assert [new - past for new, past in zip(whole, old, strict=True)] == [
        sum(column) for column in zip(*parts, strict=True)
    ]
