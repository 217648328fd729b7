"""Drafting with a smaller causal language model of the same vocabulary.

The model's keys and values are paged under the target's block tables, so a prefix that it once read stays read for
every request that shares it. It catches up on what it has not seen in one packed pass, which also gives the first
draft, then runs one row a request for each further draft. It never sees the target's hidden states. Source: Leviathan
et al. 2023, arXiv:2211.17192.
"""

from __future__ import annotations

import numpy as np
import torch

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.drawing import top_probs, top_probs_of
from outrider.drafting.filled import FilledRows
from outrider.errors import DrafterMismatch
from outrider.models.attention import Batch
from outrider.models.families import load_model
from outrider.sampling import concatenate, distributions, draft_group, draw, greedy
from outrider.types import Distributions, Proposal


class DraftModelDrafter:
    """A causal language model as drafter: `model` in the configuration names it."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.model is None:
            raise DrafterMismatch('draft_model needs a model: add "model" to the speculative config', param="model")
        dtype, device = target.model.embedding.dtype, target.model.device
        self._model = load_model(config.model, dtype=dtype, device=device, max_len=target.max_len)
        ours, theirs = self._model.config.vocab_size, target.model.config.vocab_size
        if ours != theirs:
            raise DrafterMismatch(
                f"draft model {config.model} has a vocabulary of {ours}, the target one of {theirs}: "
                "both need the same tokenizer",
                param="model",
            )
        self._max_len = min(target.max_len, self._model.config.max_position_embeddings)
        self._pool = target.pool
        self._cache = self._model.new_cache(target.pool.num_blocks * target.pool.block_size)
        self._filled = FilledRows(target.pool)

    def begin(self, slot: int) -> None:
        """Nothing to prepare: what was read is known by block."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    def propose(self, context: DraftContext) -> Proposal:
        """Chains of draft tokens, one model row each after the first. A text beyond the model's length gets none."""
        budgets = [
            min(budget, max(0, self._max_len - len(history) + 1))
            for budget, history in zip(context.budgets, context.histories, strict=True)
        ]
        chains: list[list[int]] = [[] for _ in budgets]
        rows: list[list[Distributions]] = [[] for _ in budgets]
        sure: list[list[float]] = [[] for _ in budgets]
        for step in range(max(budgets)):
            active = [index for index, budget in enumerate(budgets) if step < budget]
            if not active:
                break
            logits = self._forward(context, active, chains)
            groups = [draft_group(context.groups[index], step) for index in active]
            if context.sample_method == "greedy":
                chosen = greedy(logits)
                tokens, drawn_from = chosen.tolist(), None
            else:
                drawn_from = distributions(logits, groups)
                tokens = draw(drawn_from, groups, context.purpose)
                for row, index in enumerate(active):
                    rows[index].append(drawn_from.row(row))
            for index, token in zip(active, tokens, strict=True):
                chains[index].append(token)
            if context.pace is not None:
                noted = top_probs(logits, chosen) if drawn_from is None else top_probs_of(drawn_from)
                said = noted.tolist()
                goes_on = context.pace.goes_on(step, [context.slots[index] for index in active], said)
                for index, value, more in zip(active, said, goes_on, strict=True):
                    sure[index].append(value)
                    budgets[index] = budgets[index] if more else step + 1
        drawn = [row for part in rows for row in part]
        top = None if context.pace is None else tuple(map(tuple, sure))
        return Proposal(tuple(map(tuple, chains)), concatenate(drawn) if drawn else None, top_probs=top)

    def _forward(self, context: DraftContext, active: list[int], chains: list[list[int]]) -> torch.Tensor:
        """Logits [len(active), V] after all committed tokens and drafts so far; reads what is not read yet."""
        ids, spans, last = [], [], []
        for index in active:
            history, chain = context.histories[index], chains[index]
            read = self._filled.count(context.blocks[index], len(history) - 1)
            known = len(history) + len(chain) - 1 if chain else read
            text = np.array(chain[-1:], dtype=np.int64) if chain else history[known:]
            ids.append(text)
            spans.append((known, len(text)))
            last.append(len(text))
        blocks = [context.blocks[index] for index in active]
        logit_rows = np.cumsum(np.array(last, dtype=np.int64)) - 1
        size = self._pool.block_size
        batch = Batch.pack(np.concatenate(ids), spans, blocks, logit_rows, size, self._model.device)
        logits = self._model(batch, self._cache).logits
        for index in active:
            if not chains[index]:
                self._filled.mark(context.blocks[index], len(context.histories[index]))
        return logits
