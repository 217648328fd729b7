"""Which rows a drafter's own cache holds, block by block, under the target's block tables.

A drafter fills rows when it is asked to propose; what it filled stays known by block and by the block's generation, so
a shared prefix is filled once for all requests, and nothing has to be told when a request ends or is preempted. The
cache itself is the drafter's. Only committed rows are ever marked, so rolling back takes nothing away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.models.cache import BlockPool


class FilledRows:
    """How many rows of each block are filled, and for which handing out of the block that holds."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._rows = np.zeros(pool.num_blocks, dtype=np.int64)
        self._generation = np.full(pool.num_blocks, -1, dtype=np.int64)

    def count(self, blocks: Sequence[int], most: int) -> int:
        """How many rows of a sequence with these blocks are filled from its start without a gap, at most `most`."""
        table, size = np.asarray(blocks), self._pool.block_size
        filled = np.where(self._generation[table] == self._pool.generation[table], self._rows[table], 0)
        short = np.flatnonzero(filled < size)
        whole = int(short[0]) if len(short) else len(table)
        extra = int(filled[whole]) if whole < len(table) else 0
        return min(most, whole * size + extra)

    def mark(self, blocks: Sequence[int], length: int) -> None:
        """Say that the first `length` rows of a sequence with these blocks are filled."""
        size = self._pool.block_size
        table = np.asarray(blocks)[: -(-length // size)]
        self._generation[table] = self._pool.generation[table]
        self._rows[table] = np.clip(length - np.arange(len(table)) * size, 0, size)
