"""What is kept of the target for every slot: keys and values of each layer, and the taps that a drafter reads.

Both are paged under the same block tables, so a shared prefix brings its taps along. Rows of rejected drafts leave
stale states behind their sequence's end; they are overwritten before anybody may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.recurrent import StateCache
from outrider.models.target import Target


class TargetMemory:
    """`cache`: one LayerCache a layer; `taps[layer]` [S, D]: the residual stream after that many layers, by slot."""

    def __init__(self, model: Target, num_slots: int) -> None:
        self.cache = model.new_cache(num_slots)
        self.taps: dict[int, Tensor] = {}
        self._tap_numbers: list[npt.NDArray[Any]] = []  # the taps' memory, where NumPy can write it
        self._like, self._num_slots = model.embedding, num_slots

    def keep_taps(self, layers: Sequence[int]) -> None:
        """From now on keep these taps, in ascending order; those that are kept already stay as they are."""
        if sorted(layers) != list(self.taps):
            shape = (self._num_slots, self._like.shape[1])
            self.taps = {layer: self._like.new_empty(shape) for layer in sorted(layers)}
            on_cpu = self._like.device.type == "cpu"
            self._tap_numbers = [_as_integers(tap) for tap in self.taps.values()] if on_cpu else []

    def record(self, slots: Tensor, taps: Sequence[Tensor]) -> None:
        """Store a forward's taps ([T, D] each, in ascending order of layers) in its rows' slots [T] int32."""
        if self._tap_numbers:
            # NumPy, because from eight rows on torch would wake threads that get in the way of the kernels' own.
            rows = slots.numpy()
            for numbers, tap in zip(self._tap_numbers, taps, strict=True):
                numbers[rows] = _as_integers(tap)
            return
        rows_of = slots.long()
        for kept, tap in zip(self.taps.values(), taps, strict=True):
            kept[rows_of] = tap

    def forget(self, block: int) -> None:
        """Drop the recurrent states of the request that began in a block which is free now."""
        for layer in self.cache:
            if isinstance(layer, StateCache):
                layer.forget(block)


def _as_integers(values: Tensor) -> npt.NDArray[Any]:
    """The same memory as integers of the same size: NumPy has no bfloat16."""
    numbers: npt.NDArray[Any] = values.view({2: torch.int16, 4: torch.int32}[values.element_size()]).numpy()
    return numbers
