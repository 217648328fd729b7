"""From a step's entries to tensors and back: packs rows, runs the target, hands out logits. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
from torch import Tensor

from outrider.engine.sequence import Entry
from outrider.models.attention import Batch
from outrider.models.memory import TargetMemory
from outrider.models.target import Target


class Runner:
    """Runs packed forwards of the target over its memory."""

    def __init__(self, model: Target, memory: TargetMemory, block_size: int) -> None:
        self.model, self.memory, self.block_size = model, memory, block_size

    def forward(self, entries: Items[Entry], drafts: Items[tuple[int, ...]]) -> Tensor:
        """Logits [R, V] float32: for each entry that samples, its last committed row and one row a draft token."""
        batch = self._pack(entries, drafts)
        result = self.model(batch, self.memory.cache, tuple(self.memory.taps))
        if result.taps:
            self.memory.record(batch.slots, result.taps)
        return result.logits

    def _pack(self, entries: Items[Entry], drafts: Items[tuple[int, ...]]) -> Batch:
        ids: list[npt.NDArray[np.int64]] = []
        spans: list[tuple[int, int]] = []
        logit_rows: list[int] = []
        row = 0
        for entry, tokens in zip(entries, drafts, strict=True):
            sequence = entry.sequence
            ids.append(sequence.tokens[sequence.num_computed : sequence.num_computed + entry.num_rows])
            ids.append(np.array(tokens, dtype=np.int64))
            spans.append((sequence.num_computed, entry.num_rows + len(tokens)))
            row += spans[-1][1]
            if entry.samples:
                logit_rows += range(row - len(tokens) - 1, row)
        blocks = [entry.sequence.blocks for entry in entries]
        wanted = np.array(logit_rows, dtype=np.int64)
        return Batch.pack(np.concatenate(ids), spans, blocks, wanted, self.block_size, self.model.device)
