"""The drafter, asked for a step: one context for all requests that draft, one proposal back, checked; also `cut`.

A drafter that raises, or proposes what cannot be, costs its request the drafts and nothing else. Decides nothing about
lengths (lengths.py) and verifies nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, Drafter, Pace
from outrider.engine.sequence import Entry, Sequence
from outrider.errors import ShapeError
from outrider.sampling import Purpose, concatenate, entries_of
from outrider.types import Distributions, Proposal

_Item = TypeVar("_Item")
_log = logging.getLogger(__name__)


class SafeDrafter:
    """A drafter under one configuration, asked for the entries of a step."""

    def __init__(self, drafter: Drafter, config: SpeculativeConfig, vocab_size: int) -> None:
        self.drafter, self._config, self._vocab_size = drafter, config, vocab_size

    def propose(self, entries: Items[Entry], pace: Pace | None) -> Proposal:
        """One proposal over all entries; () for those that have no budget."""
        drafting = [index for index, entry in enumerate(entries) if entry.budget > 0]
        if not drafting:
            return Proposal(((),) * len(entries))
        context = self._context([entries[index] for index in drafting], pace)
        part = self._guarded(context, [entries[index].sequence for index in drafting])
        count = len(entries)
        return Proposal(
            _spread(part.tokens, drafting, count),
            part.draft_probs,
            None if part.confidence is None else _spread(part.confidence, drafting, count),
            None if part.top_probs is None else _spread(part.top_probs, drafting, count),
        )

    def begin(self, sequence: Sequence) -> None:
        """Tell the drafter that a sequence starts in its slot."""
        try:
            self.drafter.begin(sequence.slot)
        except Exception as error:
            _stop_drafting(sequence, error)

    def end(self, sequence: Sequence) -> None:
        """Tell it that the sequence leaves its slot."""
        try:
            self.drafter.end(sequence.slot)
        except Exception as error:
            _stop_drafting(sequence, error)

    def _context(self, entries: Items[Entry], pace: Pace | None) -> DraftContext:
        sequences = [entry.sequence for entry in entries]
        coupled = self._config.rejection_sample_method == "coupled"
        return DraftContext(
            slots=tuple(sequence.slot for sequence in sequences),
            histories=tuple(sequence.tokens for sequence in sequences),
            blocks=tuple(sequence.blocks for sequence in sequences),
            budgets=tuple(entry.budget for entry in entries),
            groups=tuple(sequence.row_group(()) for sequence in sequences),
            sample_method=self._config.draft_sample_method,
            purpose=Purpose.GUMBEL if coupled else Purpose.DRAFT,
            pace=pace,
        )

    def _guarded(self, context: DraftContext, sequences: Items[Sequence]) -> Proposal:
        """The drafter's proposal; a request for which it fails goes on as plain decoding, and says so."""
        try:
            proposal = self.drafter.propose(context)
            self._check(proposal, context)
            return proposal
        except Exception as error:
            if len(sequences) == 1:
                _stop_drafting(sequences[0], error)
                return Proposal(((),))
        alone = [self._guarded(context.only(i), sequences[i : i + 1]) for i in range(len(sequences))]
        rows = [part.draft_probs for part in alone if part.draft_probs is not None]
        if not rows:
            return Proposal(tuple(part.tokens[0] for part in alone))
        # One proposal has rows for all its drafts or for none: who gave none beside others goes without drafts.
        tokens = tuple(part.tokens[0] if part.draft_probs is not None else () for part in alone)
        return Proposal(tokens, concatenate(rows))

    def _check(self, proposal: Proposal, context: DraftContext) -> None:
        if len(proposal.tokens) != len(context.budgets):
            raise ShapeError(f"proposal.tokens has {len(proposal.tokens)} requests, expected {len(context.budgets)}")
        for chain, budget in zip(proposal.tokens, context.budgets, strict=True):
            if len(chain) > budget or not all(0 <= token < self._vocab_size for token in chain):
                raise ShapeError(f"proposal.tokens has {chain}, expected at most {budget} ids below {self._vocab_size}")
        lengths = list(map(len, proposal.tokens))
        rows, num_drafts = proposal.draft_probs, sum(lengths)
        if rows is not None and rows.num_rows != num_drafts:
            raise ShapeError(f"proposal.draft_probs has {rows.num_rows} rows, expected {num_drafts}, one a draft token")
        for name in ("confidence", "top_probs"):
            values = getattr(proposal, name)
            if values is not None and list(map(len, values)) != lengths:
                raise ShapeError(f"proposal.{name} has {list(map(len, values))} numbers, expected {lengths}")


def cut(proposal: Proposal, lengths: Items[int]) -> Proposal:
    """The first drafts of each chain, as many as `lengths` says, with their distributions; confidences are dropped."""
    tokens = tuple(chain[:length] for chain, length in zip(proposal.tokens, lengths, strict=True))
    if tokens == proposal.tokens or proposal.draft_probs is None:
        return Proposal(tokens, proposal.draft_probs)
    firsts = accumulate(map(len, proposal.tokens), initial=0)
    kept = [np.arange(first, first + len(chain)) for first, chain in zip(firsts, tokens, strict=False)]
    entries, starts = entries_of(proposal.draft_probs.starts.numpy(), np.concatenate(kept))
    chosen = torch.from_numpy(entries)
    rows = Distributions(proposal.draft_probs.ids[chosen], proposal.draft_probs.probs[chosen], torch.from_numpy(starts))
    return Proposal(tokens, rows)


def _spread(values: Items[tuple[_Item, ...]], places: Items[int], count: int) -> tuple[tuple[_Item, ...], ...]:
    """Values of some entries laid out over all of them."""
    spread: list[tuple[_Item, ...]] = [()] * count
    for place, value in zip(places, values, strict=True):
        spread[place] = value
    return tuple(spread)


def _stop_drafting(sequence: Sequence, error: Exception) -> None:
    sequence.drafting_error = sequence.drafting_error or f"{type(error).__name__}: {error}"
    _log.warning("request %s goes on without drafts: %s", sequence.request.request_id, error)
