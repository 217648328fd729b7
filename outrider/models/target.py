"""What the engine and the drafters may ask of a target, whichever family it is of and whatever code runs it.

Nobody outside models/ knows which class runs which family. Legend: T packed rows, R rows whose logits are wanted, D
hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.models.arch import TargetConfig
from outrider.models.attention import Batch, LayerCache
from outrider.models.layers import RMSNorm
from outrider.models.linear import Linear

AttentionKind = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Forward:
    """What a forward gives: logits [R, V] float32 and, for each layer asked for, its tap [T, D]."""

    logits: Tensor
    taps: tuple[Tensor, ...] = ()


class Target(Protocol):
    """Weights of one checkpoint, ready to run; holds no state of any request beyond what `new_cache` gave.

    `embedding` [V, D]: the table as stored, without a scale that the family puts on it. `norm` and `lm_head` give
    logits from the last residual stream, before any cap. `folder`: the checkpoint's, None for weights that were never
    in one.
    `brings_threads`: its heavy work is that of the C kernels, where they run, which have threads of their own.
    `shares_prefixes`: whether blocks that one request filled may serve another; not where layers are recurrent.
    """

    @property
    def config(self) -> TargetConfig:
        """What is known of it."""

    @property
    def folder(self) -> Path | None:
        """Where it was read."""

    @property
    def embedding(self) -> Tensor:
        """The input table [V, D]."""

    @property
    def norm(self) -> RMSNorm:
        """The last norm."""

    @property
    def lm_head(self) -> Linear:
        """The output matrix."""

    @property
    def brings_threads(self) -> bool:
        """Whether torch needs no threads for it where the C kernels run."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether the cache's blocks say all that there is of a prefix."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots (a multiple of 16), one entry a layer.

        Layers that share keys and values have the same entry.
        """

    def bytes_per_token(self) -> int:
        """Cache memory of one token over all layers."""

    def last_layer_of(self, kind: AttentionKind) -> int | None:
        """The last layer of that kind with keys and values of its own, an index into the cache; None without one."""

    def __call__(self, batch: Batch, cache: Sequence[LayerCache], taps: Sequence[int] = ()) -> Forward:
        """Run all rows; `taps` names residual streams by the number of layers that have run (0: the embedding)."""
