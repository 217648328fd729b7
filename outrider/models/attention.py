"""Attention over the paged cache: the seam for attention kernels, and the layout of cached keys and values.

Every row is treated alone: its keys are read through its sequence's block table in absolute order, so its result does
not depend on the rows that come with it (bit for bit where the C kernels run). Legend: T packed rows, H query heads,
G key/value heads, E head size, S slots (blocks x block size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.arch import ModelConfig
from outrider.models.layers import reference_rms_norm
from outrider.models.linear import kernel, kernels_for

GROUP = 16
"""Slots whose keys lie together: a multiple of them makes a block."""


@dataclass(frozen=True)
class Batch:
    """One packed forward: rows of several sequences, prompt chunks and drafts alike.

    ids [T] int64. positions, slots, row_sequence [T] int32: where each row stands in its text, where its key and value
    go, and whose block table (row of `tables` [B, max_blocks] int32) it reads. `ends` [T] int32: a row sees tokens
    0 to ends - 1 of its sequence (causal: position + 1). `logit_rows` [R] int64: the rows whose logits are wanted.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    row_sequence: Tensor
    ends: Tensor
    tables: Tensor
    block_size: int
    logit_rows: Tensor

    @classmethod
    def pack(
        cls,
        ids: npt.NDArray[np.int64],
        spans: Sequence[tuple[int, int]],
        blocks: Sequence[Sequence[int]],
        logit_rows: npt.NDArray[np.int64],
        block_size: int,
        device: torch.device,
    ) -> Batch:
        """Lay out rows of several sequences: sequence b has `spans[b]` = (first position, rows) and those blocks.

        ids [T] are the rows' tokens, sequence by sequence. A row sees its own token and everything before it.
        """
        lengths = np.array([rows for _, rows in spans])
        sequence = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)
        within = np.arange(len(ids), dtype=np.int32) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.repeat([first for first, _ in spans], lengths) + within).astype(np.int32)
        tables = np.zeros((len(spans), max(map(len, blocks))), dtype=np.int32)
        for row, owned in enumerate(blocks):
            tables[row, : len(owned)] = owned
        slots = tables[sequence, positions // block_size] * block_size + positions % block_size
        arrays = (ids, positions, slots.astype(np.int32), sequence, positions + 1, tables, logit_rows)
        names = ("ids", "positions", "slots", "row_sequence", "ends", "tables", "logit_rows")
        tensors = {name: torch.from_numpy(array).to(device) for name, array in zip(names, arrays, strict=True)}
        return cls(block_size=block_size, **tensors)

    def starts(self, window: int | None) -> Tensor:
        """First token that each row sees, [T] int32, under a sliding window of that many tokens."""
        return torch.zeros_like(self.ends) if window is None else (self.ends - window).clamp_(min=0)


class LayerCache:
    """One layer's keys and values for S slots. Keys are laid out for the kernel, [S/16, G, E/pair, 16, pair]."""

    def __init__(self, num_slots: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.pair = 2 if like.dtype == torch.bfloat16 else 1
        # Never read before it is written, so not cleared either: an untouched page costs nothing.
        self.keys = like.new_empty(num_slots // GROUP, kv_heads, head_dim // self.pair, GROUP, self.pair)
        self.values = like.new_empty(num_slots, kv_heads, head_dim)

    @property
    def num_bytes(self) -> int:
        """Memory that the layer's keys and values take."""
        return self.keys.nbytes + self.values.nbytes

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, G, E] of the given slots, as copies."""
        keys = self.keys[slots // GROUP, :, :, slots % GROUP, :]
        return keys.flatten(2), self.values[slots]

    def scatter(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, G, E] into the given slots."""
        split = keys.unflatten(2, (-1, self.pair))
        self.keys[slots // GROUP, :, :, slots % GROUP, :] = split
        self.values[slots] = values


@dataclass(frozen=True)
class Heads:
    """The head layout of a layer, its rotary tables [max_len, E/2] and its optional per-head norms [E]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cosine: Tensor
    sine: Tensor
    scale: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, config: ModelConfig, tensors: Mapping[str, Tensor], prefix: str, rope: tuple[Tensor, Tensor]) -> Heads:
        """A layer's heads; its norms, where the config has them, are `q_norm` and `k_norm` under the prefix."""
        norms = [tensors[f"{prefix}{name}_norm.weight"].float().contiguous() for name in "qk" if config.qk_norm]
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cosine=rope[0],
            sine=rope[1],
            scale=config.head_dim**-0.5,
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            norm_eps=config.rms_norm_eps,
        )


def fits_kernels(heads: Heads) -> bool:
    """Whether the C kernels take this head size."""
    return heads.head_dim % (2 * GROUP) == 0 and heads.head_dim <= 32 * GROUP


def rope_store(qkv: Tensor, batch: Batch, heads: Heads, cache: LayerCache) -> None:
    """Norm and rotate queries and keys of qkv [T, (H + 2 G) E] in place; write keys and values into their slots.

    Heads without a key head (G = 0) are queries alone, and nothing is written.
    """
    lib = kernels_for(qkv) if fits_kernels(heads) else None
    if lib is None:
        _reference_rope_store(qkv, batch, heads, cache)
        return
    norms = [None if norm is None else norm.data_ptr() for norm in (heads.q_norm, heads.k_norm)]
    kernel(lib, "rope_store", qkv)(
        qkv.data_ptr(),
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        heads.cosine.data_ptr(),
        heads.sine.data_ptr(),
        *norms,
        heads.norm_eps,
        len(qkv),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
    )


def attend(queries: Tensor, batch: Batch, starts: Tensor, heads: Heads, cache: LayerCache) -> Tensor:
    """softmax(scale q k) v for rotated queries in the first H E columns of `queries` [T, ...] -> [T, H E].

    Row r sees tokens starts[r] to batch.ends[r] - 1 of its sequence. Cost: every row reads its own keys once.
    """
    lib = kernels_for(queries) if fits_kernels(heads) else None
    if lib is None:
        return _reference_attend(queries, batch, starts, heads, cache)
    out = torch.empty(len(queries), heads.num_heads * heads.head_dim, dtype=queries.dtype)
    kernel(lib, "attend", queries)(
        queries.data_ptr(),
        queries.shape[1],
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        batch.tables.data_ptr(),
        batch.tables.shape[1],
        batch.block_size,
        batch.row_sequence.data_ptr(),
        starts.data_ptr(),
        batch.ends.data_ptr(),
        heads.scale,
        len(queries),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        out.data_ptr(),
    )
    return out


def _reference_rope_store(qkv: Tensor, batch: Batch, heads: Heads, cache: LayerCache) -> None:
    rows, sizes = len(qkv), [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    queries, keys, values = qkv.view(rows, sum(sizes), heads.head_dim).split(sizes, dim=1)
    positions = batch.positions.long()
    cosine, sine = heads.cosine[positions][:, None], heads.sine[positions][:, None]
    for part, norm in ((queries, heads.q_norm), (keys, heads.k_norm)):
        normed = part if norm is None else reference_rms_norm(part, norm, heads.norm_eps)
        first, second = normed.float().chunk(2, dim=-1)
        part.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1))
    if heads.num_kv_heads:
        cache.scatter(batch.slots.long(), keys, values)


def _reference_attend(queries: Tensor, batch: Batch, starts: Tensor, heads: Heads, cache: LayerCache) -> Tensor:
    width = heads.num_heads * heads.head_dim
    out = queries.new_empty(len(queries), width)
    for sequence in batch.row_sequence.unique().tolist():
        rows = (batch.row_sequence == sequence).nonzero()[:, 0]
        positions = torch.arange(int(batch.ends[rows].max()), device=queries.device)
        blocks = batch.tables[sequence][positions // batch.block_size].long()
        keys, values = cache.gather(blocks * batch.block_size + positions % batch.block_size)
        seen = (positions >= starts[rows, None]) & (positions < batch.ends[rows, None])
        query = queries[rows, :width].view(len(rows), heads.num_kv_heads, -1, heads.head_dim).float()
        scores = torch.einsum("tgqe,sge->tgqs", query, keys.float()) * heads.scale
        weights = scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(dim=-1)
        # A hidden slot may hold anything, NaN too: its value must not reach the sum as 0 x NaN.
        values = values.float().nan_to_num(0.0, 0.0, 0.0)
        out[rows] = torch.einsum("tgqs,sge->tgqe", weights, values).reshape(len(rows), width).to(out.dtype)
    return out
