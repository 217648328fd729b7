"""Hears what a drafter that reads the target proposes inside the engine, while a script decides what is verified.

So none, some and all drafts are accepted, and every proposal can be held against a recomputation from nothing. Caches
start out as NaN, and after every step whatever is not there for good, the target's layers, taps and draft layers alike,
becomes NaN again: a rejected row that is read anywhere shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafting.base import DraftContext, Drafter
from outrider.drafting.filled import FilledRows
from outrider.drafting.modules import ModuleLoop
from outrider.engine.engine import Engine
from outrider.models.attention import Batch, LayerCache
from outrider.models.llama import LlamaModel
from outrider.types import Distributions, Proposal, Request
from tests.kit import scripted, tiny


@dataclass
class Round:
    """One request's part of one proposal."""

    history: tuple[int, ...]
    chain: tuple[int, ...]
    rows: list[Distributions]
    confidence: tuple[float, ...] | None


class Overheard:
    """Asks a drafter and keeps what it says, but proposes what a script says."""

    def __init__(self, inner: Drafter, script: scripted.Scripted) -> None:
        self.inner, self.script = inner, script
        self.taps = inner.taps
        self.rounds: list[Round] = []

    def begin(self, slot: int) -> None:
        self.inner.begin(slot)
        self.script.begin(slot)

    def end(self, slot: int) -> None:
        self.inner.end(slot)
        self.script.end(slot)

    def propose(self, context: DraftContext) -> Proposal:
        proposal = self.inner.propose(context)
        row = 0
        for index, chain in enumerate(proposal.tokens):
            assert len(chain) == context.budgets[index]
            probs, row = proposal.draft_probs, row + len(chain)
            rows = [] if probs is None else [probs.row(r) for r in range(row - len(chain), row)]
            confidence = None if proposal.confidence is None else proposal.confidence[index]
            self.rounds.append(Round(tuple(context.histories[index].tolist()), chain, rows, confidence))
        return self.script.propose(context)


def spoil_unused(engine: Engine) -> None:
    """NaN over every row of the target that is not computed for good, and of the drafter's cache that is not filled."""
    assert isinstance(engine.drafter, Overheard)
    loop = getattr(engine.drafter.inner, "_loop", None)
    for sequence in engine.scheduler.running:
        beyond = _slots(sequence.blocks, sequence.num_computed)
        for taps in engine.target.memory.taps.values():
            taps[beyond] = float("nan")
        for layer in engine.target.memory.cache:
            if len(layer.values):  # a recurrent layer has no slots
                _spoil(layer, beyond)
        for rows, cache in _own_caches(loop):
            filled = rows.count(sequence.blocks, sequence.num_computed)
            for layer in cache:
                _spoil(layer, _slots(sequence.blocks, filled))


def _own_caches(loop: Any) -> list[tuple[FilledRows, list[LayerCache]]]:
    """A drafter's caches with what is filled of each: none, one, or one a draft."""
    if isinstance(loop, ModuleLoop):
        return list(zip(loop._filled, loop.caches, strict=True))
    return [] if loop is None else [(loop._filled, loop.cache)]


def _slots(blocks: Sequence[int], first: int) -> Tensor:
    positions = np.arange(first, len(blocks) * 16)
    return torch.from_numpy(np.asarray(blocks)[positions // 16] * 16 + positions % 16)


def _spoil(layer: LayerCache, slots: Tensor) -> None:
    keys, values = layer.gather(slots)
    layer.scatter(slots, torch.full_like(keys, float("nan")), torch.full_like(values, float("nan")))


def overheard(model: LlamaModel, speculative: Mapping[str, Any], script: scripted.Scripted, **settings: Any) -> Engine:
    """An engine over the configured drafter, heard, with a script that decides."""
    engine = tiny.make_engine(model, speculative={"num_speculative_tokens": 6} | dict(speculative), **settings)
    assert engine.drafter is not None
    loop = getattr(engine.drafter, "_loop", None)
    for layer in [layer for _, cache in _own_caches(loop) for layer in cache]:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    for taps in engine.target.memory.taps.values():
        taps.fill_(float("nan"))
    assert engine.safe_drafter is not None
    engine.safe_drafter.drafter = Overheard(engine.drafter, script)
    return engine


def requests_of(lengths: Sequence[int], **params: Any) -> list[Request]:
    """Requests of prompts of these lengths, each with its seed and a little longer an answer than the last."""
    return [
        tiny.make_request(f"{i}", tiny.random_prompt(40 + i, length), seed=i, max_tokens=22 + i, **params)
        for i, length in enumerate(lengths)
    ]


def rounds_of(engine: Engine, requests: Sequence[Request]) -> list[Round]:
    """Run the requests; what was proposed for them."""
    assert isinstance(engine.drafter, Overheard)
    first = len(engine.drafter.rounds)
    results = tiny.run(engine, requests, each_step=spoil_unused)
    assert [result.stats and result.stats.drafting_error for result in results.values()] == [None] * len(requests)
    return engine.drafter.rounds[first:]


def taps_of(model: LlamaModel, text: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The tapped states of a text, read afresh: [length, layers x width]."""
    blocks = [list(range(-(-len(text) // 16)))]
    none = np.zeros(0, dtype=np.int64)
    batch = Batch.pack(np.array(text), [(0, len(text))], blocks, none, 16, model.device)
    return torch.cat(model(batch, model.new_cache(16 * len(blocks[0])), layers).taps, dim=1)
