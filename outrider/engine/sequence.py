"""One request's life inside the engine: the only mutable per-request state there is, and its part of a step.

A sequence knows its committed tokens, how many of them the target's cache holds, and its blocks. Roll back is
therefore nothing but `num_computed`: rows beyond it are overwritten. It does not know about scheduling or drafting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.stats import StepTimes
from outrider.metrics import SpeculationCounters
from outrider.models.cache import BlockPool, block_hashes
from outrider.sampling import RowGroup, TokenCounts
from outrider.types import FinishReason, Request, RequestStats


class Sequence:
    """Committed tokens, cache position and end conditions of one request.

    Invariant between steps: `num_computed < num_tokens`, and the blocks cover at least `num_computed` tokens.
    """

    def __init__(self, request: Request, max_len: int, vocab_size: int) -> None:
        self.request = request
        self.slot = -1  # while running: a small number that no other running sequence has
        self.num_prompt = self.num_tokens = len(request.prompt_ids)
        self._tokens = np.empty(self.num_prompt + 64, dtype=np.int64)
        self._tokens[: self.num_prompt] = request.prompt_ids
        self.num_computed = 0
        self.num_cached = 0
        self.blocks: list[int] = []
        self._hashes: list[bytes] = []
        self._num_published = 0
        self.counts = TokenCounts(vocab_size, request.prompt_ids) if request.params.has_penalties else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.drafting_error: str | None = None
        self.counters = SpeculationCounters()
        self.arrived_at = time.perf_counter()
        self.started_at = self.first_token_at = self.last_token_at = 0.0
        self.stages_before = StepTimes(0.0, 0.0, 0.0)  # the engine's, when it started
        self.saved_s: float | None = None
        params = request.params
        # A checkpoint may name ends that its vocabulary does not have.
        eos = frozenset(() if params.ignore_eos else (token for token in request.eos_ids if token < vocab_size))
        self._stop_ids = eos | frozenset(params.stop_token_ids)
        limit = max_len - self.num_prompt
        self.max_output = limit if params.max_tokens is None else min(limit, params.max_tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """All committed ids, prompt first; a view, not to be written."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output(self) -> int:
        """Committed tokens that are not the prompt's."""
        return self.num_tokens - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens that the target's cache does not hold; 1 while decoding (the anchor)."""
        return self.num_tokens - self.num_computed

    def row_group(self, drafts: tuple[int, ...]) -> RowGroup:
        """What sampling must know of this request's next rows."""
        params = self.request.params
        return RowGroup(
            params=params,
            seed=self.request.seed,
            choice_index=self.request.choice_index,
            position=self.num_tokens,
            drafts=drafts,
            num_output=self.num_output,
            counts=self.counts,
            end_ids=tuple(self._stop_ids) if params.min_tokens else (),
        )

    def commit(self, token: int) -> None:
        """Append one token and see whether the sequence ends with it; nothing may be committed after the end."""
        assert self.finish_reason is None, "a finished sequence takes no more tokens"
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(self.num_tokens, dtype=np.int64)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.counts is not None:
            self.counts.append(token)
        self._check_end(token)

    def _check_end(self, token: int) -> None:
        params, sink = self.request.params, self.request.sink
        may_stop = self.num_output > params.min_tokens
        ends = may_stop and token in self._stop_ids
        # The text of a stop token is no part of the answer, unless asked for.
        if sink is not None and (not ends or params.include_stop_str_in_output):
            text = sink.push(token, check_stop=may_stop)
            if text is not None and not ends:
                self.finish_reason, self.stop_reason = "stop", text
                return
        if ends:
            self.finish_reason = "stop"
            self.stop_reason = token if token in params.stop_token_ids else None
        elif self.num_output >= self.max_output:
            self.finish_reason = "length"

    def request_stats(self, stages: StepTimes) -> RequestStats:
        """What this request cost so far, given what the engine's stages took until now."""
        counters, before = self.counters, self.stages_before
        return RequestStats(
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            first_token_s=self.first_token_at - self.arrived_at,
            total_s=self.last_token_at - self.arrived_at,
            num_drafts=counters.num_drafts,
            num_drafted=counters.num_draft_tokens,
            num_accepted=counters.num_accepted_tokens,
            accepted_histogram=tuple(counters.acceptance_histogram),
            num_rejected=counters.num_rejected_tokens,
            num_untested=counters.num_untested_tokens,
            num_trimmed=counters.num_trimmed_tokens,
            num_discarded=counters.num_discarded,
            verified_histogram=tuple(counters.verified_histogram),
            queued_s=self.started_at - self.arrived_at,
            draft_s=stages.draft_s - before.draft_s,
            verify_s=stages.verify_s - before.verify_s,
            other_s=stages.other_s - before.other_s,
            saved_s=self.saved_s,
            workload=self.request.drafting.workload,
            drafting_error=self.drafting_error,
        )

    def start(self) -> None:
        """Note when the request first left the line, and how much of its prompt was there already."""
        if not self.started_at:
            self.started_at, self.num_cached = time.perf_counter(), self.num_computed

    def save(self, seconds: float) -> None:
        """Add what a step's drafts saved this request, below 0 what they cost it."""
        self.saved_s = (self.saved_s or 0.0) + seconds

    def attach_prefix(self, pool: BlockPool) -> None:
        """Take the blocks that others left for this sequence's prefix; at least one token is left to compute."""
        count = (self.num_tokens - 1) // pool.block_size
        self._hashes = block_hashes(self.tokens, pool.block_size, self._hashes, count=max(count, len(self._hashes)))
        self.blocks = pool.match(self._hashes[:count])
        self._num_published = len(self.blocks)
        self.num_computed = len(self.blocks) * pool.block_size

    def publish_blocks(self, pool: BlockPool) -> None:
        """Let others find the blocks that are full of committed, computed tokens."""
        full = self.num_computed // pool.block_size
        if full > self._num_published:
            self._hashes = block_hashes(self.tokens, pool.block_size, self._hashes, count=max(full, len(self._hashes)))
            for index in range(self._num_published, full):
                pool.publish(self.blocks[index], self._hashes[index])
            self._num_published = full

    def drop_blocks(self, pool: BlockPool) -> None:
        """Give everything in the cache back; the committed tokens stay and can be computed again."""
        pool.release(self.blocks)
        self.blocks, self.num_computed, self._num_published = [], 0, 0


@dataclass(frozen=True)
class Entry:
    """One sequence's part of a step: committed rows to compute, and draft tokens that may be verified after them."""

    sequence: Sequence
    num_rows: int
    budget: int
    samples: bool
    """Whether the step reaches the newest committed token, so that a next one can be drawn."""
