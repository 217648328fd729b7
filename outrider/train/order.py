"""Which conversations each optimiser step sees: an order that depends on seed, epoch and step alone.

So a run that is resumed, or spread over several processes, sees what one uninterrupted process would have seen. A
step's conversations come from one shard, so that a pass reads every shard once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.drafting.training import TrainingBatch
from outrider.train.capture import Shard


@dataclass(frozen=True)
class Step:
    """Conversations of one shard, by their number in it."""

    shard: int
    members: tuple[int, ...]


class Order:
    """The steps of a run. `lengths`: response tokens of every conversation, in the capture's order."""

    def __init__(self, lengths: Sequence[int], *, shard_len: int, batch_tokens: int, epochs: float, seed: int) -> None:
        self._shards = [np.array(lengths[i : i + shard_len]) for i in range(0, len(lengths), shard_len)]
        self._batch_tokens, self._seed = batch_tokens, seed
        self._per_epoch = sum(self._num_groups(shard) for shard in self._shards)
        self.num_steps = max(1, round(epochs * self._per_epoch))
        self._epoch = (-1, list[Step]())

    def step(self, number: int) -> Step:
        """Step `number` of the run, from 0."""
        epoch, within = divmod(number, self._per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        return self._epoch[1][within]

    def _plan(self, epoch: int) -> list[Step]:
        random = np.random.default_rng((self._seed, epoch))
        steps = []
        for shard in random.permutation(len(self._shards)).tolist():
            lengths = self._shards[shard]
            members = random.permutation(len(lengths))
            # Equal shares of the shard's tokens, whatever the conversations' lengths.
            groups = self._num_groups(lengths)
            middle = np.cumsum(lengths[members]) - lengths[members] / 2
            share = _gapless(np.minimum(middle * groups // max(1, lengths.sum()), groups - 1).astype(int), groups)
            steps += [Step(shard, tuple(members[share == group].tolist())) for group in range(groups)]
        return steps

    def _num_groups(self, lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
        return min(len(lengths), max(1, round(int(lengths.sum()) / self._batch_tokens)))


def _gapless(share: np.ndarray[tuple[int], np.dtype[np.int64]], groups: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ascending group numbers moved so that no group is empty, which one long conversation may leave behind it."""
    place = np.arange(len(share))
    stepwise = np.minimum(np.minimum.accumulate(share - place), 0) + place
    return np.maximum(stepwise, groups - len(share) + place)


def batch_of(shard: Shard, members: Sequence[int], layers: Sequence[int], dtype: torch.dtype) -> TrainingBatch | None:
    """Some of a shard's conversations, packed; None for none of them. `layers` names the shard's taps in order.

    States are cast to `dtype`, that of the products: the target may have run in another.
    """
    spans = [(shard.starts[member], shard.starts[member + 1]) for member in members]
    if not spans:
        return None
    rows = torch.cat([torch.arange(first, end) for first, end in spans])
    taps = shard.taps[rows].to(dtype)
    starts = np.cumsum([0, *(end - first for first, end in spans)]).tolist()
    by_layer = {layer: taps[:, index].contiguous() for index, layer in enumerate(layers)}
    return TrainingBatch(shard.ids[rows], shard.is_response[rows], by_layer, tuple(starts))
