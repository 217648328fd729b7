"""The loop that block drafters share: context rows from the target's taps, then one pass over a block of mask tokens.

For each draft layer it keeps keys and values under the target's own block tables. When asked to propose it first fills
the rows that are committed and not filled yet, for all requests in one packed pass, then runs every request's block
[anchor, mask, ...] in one more. The block's own keys and values lie in the slots after the context and never count as
filled, so neither they nor a rejected draft's states are ever read as context. One propose is one round: nothing of a
request is kept besides filled rows. Not here: output matrix, sampling, correction (the leaves). Source: z-lab DFlash,
as in vLLM 0.32 `v1/worker/gpu/spec_decode/dflash`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.block_config import BlockConfig
from outrider.drafting.block_layers import Backbone, BlockRows
from outrider.drafting.filled import FilledRows
from outrider.models.attention import Batch
from outrider.models.layers import take_rows

_Item = TypeVar("_Item")
_CONTEXT_ROWS = 2048
"""Context rows projected at once: their taps are copied together, several times the draft's width each."""


class BlockLoop:
    """The state of one block drafter over one target: its layers' cache, and which rows of it are filled."""

    def __init__(self, config: BlockConfig, backbone: Backbone, embedding: Tensor, target: TargetInfo) -> None:
        self._config, self._backbone, self._embedding = config, backbone, embedding
        self._pool, self._memory = target.pool, target.memory
        self._max_len = min(target.max_len, config.model.max_position_embeddings)
        self.cache = backbone.new_cache(target.pool.num_blocks * target.pool.block_size)
        self._filled = FilledRows(target.pool)

    def budgets(self, context: DraftContext) -> list[int]:
        """Drafts to make for each request: what is wanted, and none beyond the drafter's own length."""
        pairs = zip(context.budgets, context.histories, strict=True)
        return [min(budget, max(0, self._max_len - len(history))) for budget, history in pairs]

    @torch.inference_mode()
    def states(self, context: DraftContext, budgets: Sequence[int]) -> Tensor:
        """Normed states [sum of budgets, D] that predict the drafts, request by request, first draft first.

        A block has as many rows as its budget asks for, so a smaller budget is another block, not a shorter cut of it.
        Cost: one packed pass for context that is missing, one for the blocks.
        """
        active = [index for index, budget in enumerate(budgets) if budget > 0]
        self._catch_up(context, active)
        rows = self._pack(context, active, [budgets[index] for index in active])
        return self._backbone.run(take_rows(self._embedding, rows.batch.ids), rows, self.cache)

    def _catch_up(self, context: DraftContext, active: Sequence[int]) -> None:
        """Fill the context of these requests up to the last row that the target has computed for good."""
        spans, blocks = [], []
        for index in active:
            length = len(context.histories[index]) - 1
            known = self._filled.count(context.blocks[index], length)
            if known < length:
                spans.append((known, length - known))
                blocks.append(context.blocks[index])
        if not spans:
            return
        unused = np.zeros(sum(rows for _, rows in spans), dtype=np.int64)
        batch = Batch.pack(unused, spans, blocks, unused[:0], self._pool.block_size, self._embedding.device)
        for first in range(0, len(unused), _CONTEXT_ROWS):
            part = slice(first, first + _CONTEXT_ROWS)
            rows = replace(batch, positions=batch.positions[part], slots=batch.slots[part])
            slots = rows.slots.long()
            taps = torch.cat([take_rows(self._memory.taps[layer], slots) for layer in self._config.taps], dim=1)
            self._backbone.context(taps, rows, self.cache)
        for (first, count), table in zip(spans, blocks, strict=True):
            self._filled.mark(table, first + count)

    def _pack(self, context: DraftContext, active: Sequence[int], budgets: Sequence[int]) -> BlockRows:
        """The blocks of these requests, at the positions from their anchors on."""
        skipped = 0 if self._config.sample_from_anchor else 1
        lengths = np.array(budgets) + skipped
        histories = [context.histories[index] for index in active]
        firsts = np.cumsum(lengths) - lengths
        ids = np.full(lengths.sum(), self._config.mask_token_id, dtype=np.int64)
        ids[firsts] = [history[-1] for history in histories]
        wanted = np.ones(len(ids), dtype=bool)
        wanted[firsts] = not skipped
        anchors = [len(history) - 1 for history in histories]
        spans = list(zip(anchors, lengths.tolist(), strict=True))
        blocks = [context.blocks[index] for index in active]
        device = self._embedding.device
        batch = Batch.pack(ids, spans, blocks, np.flatnonzero(wanted), self._pool.block_size, device)
        ends = np.repeat((np.array(anchors) + lengths).astype(np.int32), lengths)
        return BlockRows.of(batch, torch.from_numpy(ends).to(device), self._config.masks)


def split_chains(values: Sequence[_Item], budgets: Sequence[int]) -> tuple[tuple[_Item, ...], ...]:
    """What belongs to all requests' drafts, request by request, cut into one tuple a request."""
    return tuple(tuple(values[first:end]) for first, end in pairwise([0, *accumulate(budgets)]))
