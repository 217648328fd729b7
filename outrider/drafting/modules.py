"""The loop of several prediction modules that draft in turn: module s mod n makes draft s of a round, from 0 on.

Module 0 reads, at row p, the target's state at p and the token t_{p+1}; whoever makes draft s reads the state that
draft s - 1's module had at the same row p, and t_{p+1+s}. So every pass covers the same rows, the last ones beside
those that are new: the text's end shifts by one token a pass, and a draft that was rejected has spoilt the rows that
read it. Each draft has a cache of its own, complete over all rows, also where a module comes round again.

Row p's keys for draft s lie in the slot of position p+1+s, the newest token that they depend on; why is told in
`drafting/autoregressive.py`, the loop of a single module, which moves on by one row a draft instead. Sources:
DeepSeek-V3, arXiv:2412.19437, section 2.2; vLLM 0.32 `v1/worker/gpu/spec_decode/multi_module_mtp`. Legend: T packed
rows, R requests, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from outrider.drafting.autoregressive import Chains, Network, features_of
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.filled import FilledRows
from outrider.drafting.vocabulary import DraftVocabulary
from outrider.models.attention import Batch
from outrider.models.layers import take_rows
from outrider.types import Proposal


class ModuleLoop:
    """The state of such modules over one target: for each draft of a round, its cache and which rows of it are filled.

    Cost: for each draft one pass over the new rows and N - 1 before them.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        vocabulary: DraftVocabulary,
        taps: Sequence[int],
        target: TargetInfo,
        num_speculative_tokens: int,
    ) -> None:
        self._networks = [networks[step % len(networks)] for step in range(num_speculative_tokens)]
        self._vocabulary, self._taps, self._target = vocabulary, tuple(taps), target
        num_slots = target.pool.num_blocks * target.pool.block_size
        self.caches = [network.new_cache(num_slots) for network in self._networks]
        self._filled = [FilledRows(target.pool) for _ in self._networks]

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Proposal:
        """A chain for each request; a text of a single token has no row to draft from and gets none."""
        budgets = np.array([self._budget(*pair) for pair in zip(context.budgets, context.histories, strict=True)])
        chains = Chains(context, budgets, self._vocabulary)
        texts = [history.tolist() for history in context.histories]
        firsts = [self._first_row(context, index, int(budget)) for index, budget in enumerate(budgets)]
        hidden: dict[int, torch.Tensor] = {}
        for step in range(int(budgets.max(initial=0))):
            active = np.flatnonzero(budgets > step)
            spans = [(firsts[i] + 1 + step, len(context.histories[i]) - 1 - firsts[i]) for i in active]
            batch = self._batch(context, [texts[i] for i in active], active.tolist(), spans)
            batch = replace(batch, positions=batch.positions - 1 - step)
            features = self._features(batch) if not step else torch.cat([hidden[i] for i in active.tolist()])
            network = self._networks[step]
            states, after = network.forward(batch.ids, features, batch, self.caches[step])
            lengths = [rows for _, rows in spans]
            hidden = dict(zip(active.tolist(), after.split(lengths), strict=True))
            last = torch.from_numpy(np.cumsum(lengths) - 1).to(states.device)
            tokens = chains.choose(network.logits(take_rows(states, last)), step, active)
            for index, token in zip(active.tolist(), tokens.tolist(), strict=True):
                texts[index].append(token)
                self._filled[step].mark(context.blocks[index], len(context.histories[index]))
        return chains.proposal()

    def _budget(self, budget: int, history: npt.NDArray[np.int64]) -> int:
        most = min(budget, len(self._networks), max(0, self._target.max_len - len(history)))
        return most if len(history) > 1 else 0

    def _first_row(self, context: DraftContext, index: int, budget: int) -> int:
        """The first row that the round's passes cover: all that is not filled for some draft of the round."""
        table, most = context.blocks[index], len(context.histories[index]) - 1
        rows = [filled.count(table, most) - 1 - step for step, filled in enumerate(self._filled[:budget])]
        return max(0, min(rows, default=0))

    def _batch(
        self, context: DraftContext, texts: list[list[int]], active: list[int], spans: list[tuple[int, int]]
    ) -> Batch:
        """The rows whose keys lie in these spans of slots; each reads the token of its slot."""
        ids = [np.array(text[first : first + rows]) for text, (first, rows) in zip(texts, spans, strict=True)]
        every = np.arange(sum(rows for _, rows in spans))
        blocks = [context.blocks[index] for index in active]
        pool, device = self._target.pool, self._target.model.device
        return Batch.pack(np.concatenate(ids), spans, blocks, every, pool.block_size, device)

    def _features(self, batch: Batch) -> torch.Tensor:
        taps = self._target.memory.taps
        return features_of(self._networks[0], [taps[layer] for layer in self._taps], batch)
