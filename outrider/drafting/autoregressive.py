"""The loop that drafters share which draft one token after the other from the target's states and their own.

Row p of such a drafter reads the token after it, t_{p+1}, and the target's state at p; it predicts t_{p+2}. The first
pass of a round covers every row that is committed and not filled yet, with the target's real states, and gives the
first draft; each further draft takes one row, which reads the draft before and the state that the drafter itself had
there. Those rows are never counted as filled: the next round overwrites them with real ones.

Row p's keys and values lie in the slot of position p+1, not p. What a slot holds then depends on its own block's tokens
and those before it, as the target's does, so requests that share a block may share the drafter's part of it as well,
though they go on differently; slot 0 of a sequence stays unused. Positions are p all the same. Not here: the network.
Source: vLLM 0.32 `v1/worker/gpu/spec_decode/target_dependent_ar`. Legend: T packed rows, R last rows, D draft width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.drawing import Drawing
from outrider.drafting.filled import FilledRows
from outrider.drafting.vocabulary import DraftVocabulary
from outrider.models.attention import Batch, LayerCache
from outrider.models.layers import take_rows
from outrider.types import Proposal

_TAP_ROWS = 2048
"""Rows combined at once: their taps are copied together, several times the draft's width each."""


class Network(Protocol):
    """What a method brings to the loop: its weights, and a forward over packed rows under the loop's layout."""

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots, one entry a layer."""

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        """The state [T, D] that a row reads, from the target's taps [T, Dt] in ascending order of layers."""

    def forward(self, ids: Tensor, hidden: Tensor, batch: Batch, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Of the batch's `logit_rows`, what `logits` reads and the state for the next draft's row, both [R, D].

        `hidden` [T, D] may be overwritten. A row sees from slot 1 on (`first_seen`).
        """

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] float32 over what can be drafted."""


class AutoregressiveLoop:
    """The state of one such drafter over one target: its layers' cache, and which rows of it are filled."""

    def __init__(self, network: Network, vocabulary: DraftVocabulary, taps: Sequence[int], target: TargetInfo) -> None:
        self._network, self._vocabulary, self._taps = network, vocabulary, tuple(taps)
        self._pool, self._memory, self._max_len = target.pool, target.memory, target.max_len
        self._device = target.model.device
        self.cache = network.new_cache(target.pool.num_blocks * target.pool.block_size)
        self._filled = FilledRows(target.pool)

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """A chain for each request. Cost: one packed pass over new rows, and one row a request for each further draft.

        A text of a single token has no row to draft from and gets none.
        """
        budgets = np.array([self._budget(*pair) for pair in zip(context.budgets, context.histories, strict=True)])
        chains = Chains(context, budgets, self._vocabulary)
        active = np.flatnonzero(budgets)
        if not len(active):
            return chains.proposal()
        batch, states, hidden = self._first_pass(context, active.tolist())
        tokens = chains.choose(self._network.logits(states), 0, active)
        for step in range(1, int(budgets.max())):
            stays = np.flatnonzero((budgets[active] > step) & chains.go_on())
            if not len(stays):
                break
            if len(stays) < len(active):
                rows, active = torch.from_numpy(stays).to(self._device), active[stays]
                batch, hidden, tokens = keep_rows(batch, rows), take_rows(hidden, rows), tokens[rows]
            batch = self._next_rows(batch, tokens)
            states, hidden = self._network.forward(tokens, hidden, batch, self.cache)
            tokens = chains.choose(self._network.logits(states), step, active)
        return chains.proposal()

    def _budget(self, budget: int, history: npt.NDArray[np.int64]) -> int:
        return min(budget, max(0, self._max_len - len(history))) if len(history) > 1 else 0

    def _first_pass(self, context: DraftContext, active: Sequence[int]) -> tuple[Batch, Tensor, Tensor]:
        """Fill what is committed and not filled; the last rows as a batch of their own, with states and next hidden."""
        ids, spans, blocks = [], [], []
        for index in active:
            history, table = context.histories[index], context.blocks[index]
            # The last row runs in any case: the first draft comes from it.
            known = max(1, self._filled.count(table, len(history) - 1))
            ids.append(history[known:])
            spans.append((known, len(history) - known))
            blocks.append(table)
        last = np.cumsum([rows for _, rows in spans]) - 1
        batch = Batch.pack(np.concatenate(ids), spans, blocks, last, self._pool.block_size, self._device)
        batch = replace(batch, positions=batch.positions - 1)
        features = features_of(self._network, [self._memory.taps[layer] for layer in self._taps], batch)
        states, hidden = self._network.forward(batch.ids, features, batch, self.cache)
        for (first, rows), table in zip(spans, blocks, strict=True):
            self._filled.mark(table, first + rows)
        return keep_rows(batch, batch.logit_rows), states, hidden

    def _next_rows(self, batch: Batch, tokens: Tensor) -> Batch:
        """For each sequence of a batch of one row each, the row after it."""
        slots = _slots(batch, batch.ends)
        return replace(batch, ids=tokens, positions=batch.positions + 1, slots=slots, ends=batch.ends + 1)


def features_of(network: Network, taps: Sequence[Tensor], batch: Batch) -> Tensor:
    """The states that these rows read, [T, D], from the target's kept taps: row p's are in the slot of p."""
    slots = _slots(batch, batch.positions).long()
    parts = [network.combine([take_rows(tap, part) for tap in taps]) for part in torch.split(slots, _TAP_ROWS)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def first_seen(batch: Batch, window: int | None) -> Tensor:
    """The first slot that each row sees, [T] int32, under a sliding window of that many rows.

    Rows lie some slots after their positions, one as a rule; the first row's slot is the first with keys.
    """
    return torch.maximum(batch.starts(window), batch.ends - 1 - batch.positions)


def keep_rows(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch [R], all of whose logits are wanted."""
    return replace(
        batch,
        ids=batch.ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        row_sequence=batch.row_sequence[rows],
        ends=batch.ends[rows],
        logit_rows=torch.arange(len(rows), device=rows.device),
    )


def _slots(batch: Batch, indices: Tensor) -> Tensor:
    """The slots of these places [T] int32 of the rows' sequences."""
    blocks = batch.tables[batch.row_sequence.long(), (indices // batch.block_size).long()]
    return blocks * batch.block_size + indices % batch.block_size


class Chains:
    """The drafts of one round while they are made, all first drafts first."""

    def __init__(self, context: DraftContext, budgets: npt.NDArray[np.int64], vocabulary: DraftVocabulary) -> None:
        self._num_requests, self._drawing = len(budgets), Drawing(context, vocabulary)
        self._tokens: list[Tensor] = []
        self._requests: list[npt.NDArray[np.int64]] = []

    def choose(self, logits: Tensor, step: int, active: npt.NDArray[np.int64]) -> Tensor:
        """Take one draft from each row of logits [R, Vd], the likeliest or a drawn one; target ids [R]."""
        tokens = self._drawing.choose(logits, step, active.tolist())
        self._tokens.append(tokens)
        self._requests.append(active)
        return tokens

    def go_on(self) -> npt.NDArray[np.bool_]:
        """Which requests of the last step want another draft, [R]."""
        return np.array(self._drawing.goes_on(len(self._requests) - 1, self._requests[-1].tolist()))

    def proposal(self) -> Proposal:
        """The chains, request by request, what they were drawn from if they were, and how sure the drafter was."""
        if not self._tokens:
            return Proposal(((),) * self._num_requests)
        requests = np.concatenate(self._requests)
        order = np.argsort(requests, kind="stable")
        lengths = np.bincount(requests, minlength=self._num_requests)
        tokens = split_rows(torch.cat(self._tokens).cpu().numpy()[order], lengths)
        sure = self._drawing.top_probs(order)
        top_probs = None if sure is None else split_rows(sure, lengths)
        return Proposal(tokens, self._drawing.drawn_from(order), top_probs=top_probs)


def split_rows(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> tuple[tuple[Any, ...], ...]:
    """What belongs to all requests' drafts, request by request, cut into one tuple a request."""
    return tuple(tuple(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1]))
