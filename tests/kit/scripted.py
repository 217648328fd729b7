"""Drafters that follow a script: always right, always wrong, wrong at one place, silent, lying, crashing.

Most know the truth, the text that the target gives without drafts, and bend it. `Truth` is taken from a plain run that
does not stop early, so that drafts after a stop token are right as well and only the engine can cut them. Every one of
them holds the engine to the drafter's side of the contract: slots begin before they are asked for and end once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.drafting.base import DraftContext
from outrider.models.llama import LlamaModel
from outrider.sampling import concatenate, draft_group, draw
from outrider.types import Distributions, Proposal, Request
from tests.kit import books, tiny

Key = tuple[int, int, tuple[int, ...]]


class Truth:
    """What the target says without drafts: full texts by seed, choice and prompt."""

    def __init__(self, model: LlamaModel, requests: Sequence[Request], *, num_extra: int = 40) -> None:
        self._texts: dict[Key, list[int]] = {}
        engine = tiny.make_engine(model, max_num_seqs=16, kv_cache_tokens=8192)
        wanted = []
        for request in requests:
            room = engine.max_len - len(request.prompt_ids)
            length = room if request.params.max_tokens is None else min(room, request.params.max_tokens + num_extra)
            params = replace(
                request.params, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=(), logprobs=None
            )
            wanted.append(replace(request, params=params, sink=None))
        for request, tokens in zip(wanted, tiny.tokens_of(engine, wanted).values(), strict=True):
            self._texts[request.seed, request.choice_index, request.prompt_ids] = [*request.prompt_ids, *tokens]

    def after(self, context: DraftContext, index: int) -> list[int]:
        """What comes after the history of request `index`; empty where it is not known."""
        group, history = context.groups[index], context.histories[index].tolist()
        prompt = tuple(history[: len(history) - group.num_output])
        text = self._texts.get((group.seed, group.choice_index, prompt), [])
        return text[len(history) :] if text[: len(history)] == history else []


class Scripted:
    """The base: keeps what it was told and what it proposed. Subclasses say one chain at a time."""

    taps: tuple[int, ...] = ()

    def __init__(self, truth: Truth | None = None, vocab: int = tiny.VOCAB) -> None:
        self.truth, self.vocab = truth, vocab
        self.live: set[int] = set()
        self.num_rounds = 0
        self.proposed: list[tuple[int, ...]] = []

    def begin(self, slot: int) -> None:
        assert slot not in self.live, f"slot {slot} began twice"
        self.live.add(slot)

    def end(self, slot: int) -> None:
        self.live.remove(slot)

    def propose(self, context: DraftContext) -> Proposal:
        assert len(context.slots) > 0
        assert set(context.slots) <= self.live
        assert all(budget > 0 for budget in context.budgets)
        for history, group in zip(context.histories, context.groups, strict=True):
            assert len(history) == group.position, "the group draws the token after the history"
        self.num_rounds += 1
        chains = [self.chain(context, index)[:budget] for index, budget in enumerate(context.budgets)]
        self.proposed += chains
        return Proposal(tuple(chains), self.draft_probs(context, chains))

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        """The drafts of one request; more than its budget are cut."""
        raise NotImplementedError

    def draft_probs(self, context: DraftContext, chains: Sequence[tuple[int, ...]]) -> Distributions | None:
        return None

    def true_chain(self, context: DraftContext, index: int) -> list[int]:
        assert self.truth is not None
        return self.truth.after(context, index)[: context.budgets[index]]

    def wrong(self, token: int) -> int:
        return (token + 1) % self.vocab


class Oracle(Scripted):
    """Always right, as far as the truth is known."""

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        return tuple(self.true_chain(context, index))


class Contrarian(Scripted):
    """Always wrong."""

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        return tuple(self.wrong(token) for token in self.true_chain(context, index))


class OracleAt(Scripted):
    """Right but at draft `j`, and right again after it."""

    def __init__(self, truth: Truth, j: int) -> None:
        super().__init__(truth)
        self.j = j

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        tokens = self.true_chain(context, index)
        return tuple(self.wrong(token) if i == self.j else token for i, token in enumerate(tokens))


class Stutterer(Scripted):
    """Proposes nothing, with draft_probs or without."""

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        return ()


class Stopper(Scripted):
    """Puts a stop token at every position."""

    def __init__(self, stop: int) -> None:
        super().__init__()
        self.stop = stop

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        return (self.stop,) * context.budgets[index]


class Mixed(Scripted):
    """Each draft is right with probability `rate`, by a stream of its own; chains have any length up to the budget."""

    def __init__(self, truth: Truth, rate: float, seed: int = 0) -> None:
        super().__init__(truth)
        self.rate, self.random = rate, np.random.default_rng(seed)

    def chain(self, context: DraftContext, index: int) -> tuple[int, ...]:
        tokens = self.true_chain(context, index)
        length = int(self.random.integers(len(tokens) + 1)) if self.random.random() < 0.3 else len(tokens)
        return tuple(t if self.random.random() < self.rate else self.wrong(t) for t in tokens[:length])


class Liar(Contrarian):
    """Wrong, and certain of it: draft_probs put everything on its token."""

    def draft_probs(self, context: DraftContext, chains: Sequence[tuple[int, ...]]) -> Distributions | None:
        tokens = [token for chain in chains for token in chain]
        return Distributions(torch.tensor(tokens, dtype=torch.int64), torch.ones(len(tokens)), _starts(len(tokens), 1))


class Sampler(Scripted):
    """Draws from distributions of its own with the noise that the verification in force asks for, and says so."""

    def __init__(self, seed: int = 0, vocab: int = tiny.VOCAB, width: int = 12) -> None:
        super().__init__(vocab=vocab)
        self.random, self.width = np.random.default_rng(seed), width

    def propose(self, context: DraftContext) -> Proposal:
        self.num_rounds += 1
        chains, rows = [], []
        for index, budget in enumerate(context.budgets):
            chain = []
            for step in range(budget):
                row = self._row()
                group = draft_group(context.groups[index], step)
                chain += draw(row, [group], context.purpose)
                rows.append(row)
            chains.append(tuple(chain))
        return Proposal(tuple(chains), concatenate(rows))

    def _row(self) -> Distributions:
        ids = np.sort(self.random.permutation(self.vocab)[: self.width])
        probs = self.random.dirichlet(np.ones(self.width)).astype(np.float32) + np.float32(1e-6)
        return Distributions(torch.from_numpy(ids), torch.from_numpy(probs / probs.sum()), _starts(1, self.width))


class Peeker(Sampler):
    """Cuts its chain by the tokens it drew, which no distribution admits to; coupled verification does not mind."""

    def propose(self, context: DraftContext) -> Proposal:
        full = super().propose(context)
        assert full.draft_probs is not None
        chains, rows, row = [], [], 0
        for chain in full.tokens:
            length = next((i for i, token in enumerate(chain) if token % 3 == 0), len(chain))
            rows += [full.draft_probs.row(row + i) for i in range(length)]
            chains.append(chain[:length])
            row += len(chain)
        return Proposal(tuple(chains), concatenate(rows) if rows else None)


class Crasher(Oracle):
    """Right until round `at`, then raises for ever for the requests whose seed is in `seeds` (None: for all)."""

    def __init__(self, truth: Truth, at: int, seeds: Sequence[int] | None = None) -> None:
        super().__init__(truth)
        self.at, self.seeds = at, seeds

    def propose(self, context: DraftContext) -> Proposal:
        hit = self.seeds is None or any(group.seed in self.seeds for group in context.groups)
        if hit and self.num_rounds >= self.at:
            raise RuntimeError(books.ON_PURPOSE)
        return super().propose(context)


def _starts(num_rows: int, width: int) -> torch.Tensor:
    return torch.arange(num_rows + 1, dtype=torch.int64) * width
