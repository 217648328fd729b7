"""What is kept of the target for every slot: keys and values of each layer, and the taps that a drafter reads.

Both are paged under the same block tables, so a shared prefix brings its taps along. Rows of rejected drafts leave
stale states behind their sequence's end; they are overwritten before anybody may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from outrider.models.layers import row_writer
from outrider.models.recurrent import StateCache
from outrider.models.target import Target


class TargetMemory:
    """`cache`: one LayerCache a layer; `taps[layer]` [S, D]: the residual stream after that many layers, by slot."""

    def __init__(self, model: Target, num_slots: int) -> None:
        self.cache = model.new_cache(num_slots)
        self.taps: dict[int, Tensor] = {}
        self._writers: list[Callable[[Tensor, Tensor], None]] = []
        self._like, self._num_slots = model.embedding, num_slots

    def keep_taps(self, layers: Sequence[int]) -> None:
        """From now on keep these taps, in ascending order; those that are kept already stay as they are."""
        if sorted(layers) != list(self.taps):
            shape = (self._num_slots, self._like.shape[1])
            self.taps = {layer: self._like.new_empty(shape) for layer in sorted(layers)}
            self._writers = [row_writer(tap) for tap in self.taps.values()]

    def record(self, slots: Tensor, taps: Sequence[Tensor]) -> None:
        """Store a forward's taps ([T, D] each, contiguous, by ascending layers) in its rows' slots [T] int32."""
        for write, tap in zip(self._writers, taps, strict=True):
            write(slots, tap)

    def forget(self, block: int) -> None:
        """Drop the recurrent states of the request that began in a block which is free now."""
        for layer in self.cache:
            if isinstance(layer, StateCache):
                layer.forget(block)
