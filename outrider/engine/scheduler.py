"""Who runs in the next step, with how many rows: continuous batching, chunked prompts, preemption.

There is no prompt phase and no decoding phase: a sequence has committed tokens that the cache does not hold, and the
step takes as many of them as fit. Only a sequence with a single such token (its anchor) may draft. The scheduler gives
and takes blocks; it runs nothing and samples nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from outrider.config import EngineConfig
from outrider.engine.lengths import Lengths
from outrider.engine.sequence import Entry, Sequence
from outrider.models.cache import BlockPool


class Scheduler:
    """Keeps the waiting line and the running set, and plans steps. `on_preempt` hears of each sequence put back."""

    def __init__(
        self,
        config: EngineConfig,
        lengths: Lengths,
        pool: BlockPool,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self.config, self.lengths, self.pool, self._on_preempt = config, lengths, pool, on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and free its blocks, wherever it stands."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.drop_blocks(self.pool)

    def plan(self) -> list[Entry]:
        """The next step's entries: running sequences first, oldest first, then new ones while rows and blocks last."""
        entries: list[Entry] = []
        preemptions = self.num_preemptions
        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        prompts_wait = bool(self.waiting) or len(decoding) < len(self.running)
        # Prompts keep a quarter of the rows, so that long proposals of many requests cannot starve them.
        draft_rows = self.config.max_num_batched_tokens * (3 if prompts_wait else 4) // 4 - len(decoding)
        budgets = self.lengths.budgets(decoding, self._prompt_rows() if prompts_wait else 0)
        for sequence, budget in zip(decoding, budgets, strict=True):
            if sequence in self.running:  # not preempted meanwhile
                entry = self._decode_entry(sequence, min(budget, max(0, draft_rows)))
                if entry is not None:
                    entries.append(entry)
                    draft_rows -= entry.budget
        entries += self._prompt_entries(self._rows_left(entries))
        if self.num_preemptions == preemptions:  # else the blocks just freed would go straight back
            entries += self._new_entries(self._rows_left(entries))
        return [entry for entry in entries if entry.sequence.blocks]

    def _rows_left(self, entries: list[Entry]) -> int:
        return self.config.max_num_batched_tokens - sum(entry.num_rows + entry.budget for entry in entries)

    def _prompt_rows(self) -> int:
        """About how many rows of prompts the step will have."""
        reading = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        starts = len(self.running) < self.config.max_num_seqs
        rows = sum(sequence.num_uncomputed for sequence in [*reading, *(list(self.waiting)[:1] if starts else [])])
        return min(rows, self.config.max_num_batched_tokens - len(self.running) + len(reading))

    def _decode_entry(self, sequence: Sequence, budget: int) -> Entry | None:
        if not self._cover(sequence, sequence.num_tokens + budget):
            budget = 0  # drafts are the first to go when blocks are short
            if not self._cover_or_preempt(sequence, sequence.num_tokens):
                return None
        return Entry(sequence, 1, budget, samples=True)

    def _prompt_entries(self, rows_left: int) -> list[Entry]:
        entries = []
        for sequence in [running for running in self.running if running.num_uncomputed > 1]:
            rows = min(sequence.num_uncomputed, rows_left)
            in_play = sequence in self.running and rows > 0
            if in_play and self._cover_or_preempt(sequence, sequence.num_computed + rows):
                entries.append(Entry(sequence, rows, 0, samples=rows == sequence.num_uncomputed))
                rows_left -= rows
        return entries

    def _new_entries(self, rows_left: int) -> list[Entry]:
        entries = []
        while self.waiting and rows_left > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            rows = min(sequence.num_uncomputed, rows_left)
            entries.append(Entry(sequence, rows, 0, samples=rows == sequence.num_uncomputed))
            rows_left -= rows
        return entries

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if blocks for all its committed tokens are free; nobody is preempted for it."""
        if self.config.enable_prefix_caching:
            sequence.attach_prefix(self.pool)
        if not self._cover(sequence, sequence.num_tokens):
            sequence.drop_blocks(self.pool)
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.start()
        return True

    def _cover(self, sequence: Sequence, num_tokens: int) -> bool:
        """Own blocks for that many tokens, if enough are free."""
        missing = -(-num_tokens // self.pool.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self.pool.allocate(missing)
        if taken is None:
            return False
        sequence.blocks += taken
        return True

    def _cover_or_preempt(self, sequence: Sequence, num_tokens: int) -> bool:
        """The same, putting the youngest running sequences back in line until it fits; False if it was this one."""
        while not self._cover(sequence, num_tokens):
            victim = self.running[-1]
            self.running.pop()
            victim.drop_blocks(self.pool)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            self._on_preempt(victim)
            if victim is sequence:
                return False
        return True
