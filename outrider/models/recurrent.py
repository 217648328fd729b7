"""Layers that keep a state in place of keys (gated delta rule, linear attention, state spaces): where it is kept.

A state cannot be shortened, so it is kept at every place from which a request may go on: after each row whose logits
were wanted (the last committed row and every draft), and after its last row. The next forward begins at one of them,
which is what rolling back comes to. Requests are told apart by their first block, which no other live request has:
such a target shares no prefixes. States are transformers' own layer caches, copied; the layer's own forward runs on
one request's rows at a time. Legend: T packed rows, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ShapeError
from outrider.models.attention import LayerCache
from outrider.models.hf_attention import Paging, Span

State = Any
"""transformers' cache of one layer of one request."""


class StateCache(LayerCache):
    """One layer's states: by request (its first block), by the number of tokens that they have seen."""

    def __init__(self, like: Tensor) -> None:
        super().__init__(0, 1, 2, like)
        self._states: dict[int, dict[int, State]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that all states take."""
        return sum(_num_bytes(state) for kept in self._states.values() for state in kept.values())

    def forget(self, block: int) -> None:
        """Drop what is kept of the request that begins in this block; nothing happens where there is none."""
        self._states.pop(block, None)

    def take(self, span: Span) -> State | None:
        """A request's state before its rows, and nothing is kept of it any more; None at its start."""
        kept = self._states.pop(span.block, {})
        if span.position == 0:
            return None
        if span.position not in kept:
            raise ShapeError(f"a request goes on at token {span.position}, its states are at {sorted(kept)}")
        return kept[span.position]

    def keep(self, span: Span, length: int, state: State) -> None:
        """Keep a state that has seen `length` tokens of a request."""
        self._states.setdefault(span.block, {})[length] = state


def page_layer(module: Any, paging: Paging, layer: int, fresh: Any) -> None:
    """Let a recurrent module, which knows one text only, run request by request over a StateCache.

    `fresh`: a cache of transformers' for the whole model that nothing has been written to.
    """
    whole = module.forward

    def forward(hidden_states: Tensor, *given: Any, **options: Any) -> Tensor:
        if paging.batch is None:
            return whole(hidden_states, *given, **options)  # type: ignore[no-any-return]
        entry = paging.cache[layer]
        assert isinstance(entry, StateCache)

        def run(rows: slice, state: State) -> Tensor:
            seen = _with(fresh, layer, state)
            return whole(hidden_states[:, rows], *given, **(options | {"cache": seen}))  # type: ignore[no-any-return]

        return torch.cat([_run_span(span, entry, fresh.layers[layer], run) for span in paging.spans], dim=1)

    module.forward = forward


def _run_span(span: Span, entry: StateCache, fresh: State, run: Callable[[slice, State], Tensor]) -> Tensor:
    """One request's rows, in parts that end where it may go on."""
    state, parts, begin = entry.take(span), [], span.begin
    for cut in span.cuts:
        state = _copied(fresh if state is None else state)
        parts.append(run(slice(begin, cut), state))
        entry.keep(span, span.position + cut - span.begin, state)
        begin = cut
    return torch.cat(parts, dim=1)


def _with(fresh: Any, layer: int, state: State) -> Any:
    """A model's cache in which one layer has this state."""
    seen = copy.copy(fresh)
    seen.layers = [*fresh.layers]
    seen.layers[layer] = state
    return seen


def _copied(state: State) -> State:
    """The same with tensors and tables of its own: transformers writes into them."""
    new = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, dict):
            value = {key: item.clone() if isinstance(item, Tensor) else item for key, item in value.items()}
            setattr(new, name, value)
    return new


def _num_bytes(state: State) -> int:
    tables = [value for value in vars(state).values() if isinstance(value, dict)]
    return sum(item.nbytes for table in tables for item in table.values() if isinstance(item, Tensor))
