"""The draft layers of a block drafter: Qwen3-style layers whose keys and values come from two sources.

Context rows are projections of the target's taps: one matrix and one norm for all layers, then each layer's own key and
value projection; no draft layer ever changes them. Block rows run through the layers as usual and see both. Not here:
which rows are context and where they lie (block.py), heads and sampling (the leaves). Sources: z-lab DFlash
`dflash/model.py`, vLLM 0.32 `qwen3_dflash.py`. Legend: T rows, D draft width, H query heads, G key/value heads, E head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.drafting.block_config import BlockConfig, LayerMask
from outrider.models.arch import expected_shapes
from outrider.models.attention import Batch, Heads, LayerCache, attend, rope_store
from outrider.models.layers import RMSNorm, rope_tables, silu_mul, take_rows
from outrider.models.linear import Linear, fused_linear


def backbone_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the backbone must have, without embedding and output matrix."""
    shapes = expected_shapes(config.model)
    width = config.model.hidden_size
    found = {name.removeprefix("model."): shape for name, shape in shapes.items() if ".layers." in name}
    found["fc.weight"] = (width, len(config.taps) * config.target_hidden_size)
    return found | {"hidden_norm.weight": (width,), "norm.weight": (width,)}


@dataclass(frozen=True)
class BlockRows:
    """Rows of a block, ready for every layer: the packed batch and, for each kind of mask, what the rows see."""

    batch: Batch
    views: Mapping[LayerMask, tuple[Batch, Tensor]]

    @classmethod
    def of(cls, batch: Batch, block_ends: Tensor, masks: Sequence[LayerMask]) -> BlockRows:
        """`batch` is packed as causal rows; `block_ends` [T] int32: where each row's block ends (exclusive)."""
        return cls(batch, {mask: _view(batch, block_ends, mask) for mask in set(masks)})


def _view(batch: Batch, block_ends: Tensor, mask: LayerMask) -> tuple[Batch, Tensor]:
    """A causal row sees its window up to itself; another one also the rows after it, as far as its window goes."""
    starts = batch.starts(mask.window)
    if mask.causal:
        return batch, starts
    ends = block_ends if mask.window is None else torch.minimum(block_ends, batch.positions + mask.window)
    return replace(batch, ends=ends.contiguous()), starts


class Backbone:
    """The weights of a block drafter's layers: `context` fills caches from taps, `run` gives the block's states."""

    def __init__(self, config: BlockConfig, tensors: Mapping[str, Tensor], *, max_len: int) -> None:
        model = config.model
        self.config = config
        fusion = tensors["fc.weight"]
        self._like = fusion.new_empty(0)  # for device and type; the weights themselves are held packed
        rope = rope_tables(model.head_dim, max_len, model.rope_theta, model.rope_scaling)
        tables = (rope[0].to(fusion.device), rope[1].to(fusion.device))
        self._fc = Linear(fusion)
        self._hidden_norm = RMSNorm(tensors["hidden_norm.weight"], model.rms_norm_eps)
        self._layers = [_Layer(config, tensors, index, tables) for index in range(model.num_layers)]
        self._norm = RMSNorm(tensors["norm.weight"], model.rms_norm_eps)

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots, one entry a layer."""
        model = self.config.model
        return [LayerCache(num_slots, model.num_kv_heads, model.head_dim, self._like) for _ in self._layers]

    def context(self, taps: Tensor, batch: Batch, cache: Sequence[LayerCache]) -> None:
        """Write the keys and values of context rows, given their concatenated taps [T, taps x target width]."""
        features = self._hidden_norm(self._fc(taps))
        for layer, entry in zip(self._layers, cache, strict=True):
            layer.context(features, batch, entry)

    def run(self, embedded: Tensor, rows: BlockRows, cache: Sequence[LayerCache]) -> Tensor:
        """Normed states [R, D] of the batch's `logit_rows`, from the block's embeddings [T, D] (overwritten)."""
        delta: Tensor | None = None
        for layer, entry in zip(self._layers, cache, strict=True):
            delta = layer(embedded, delta, rows, entry)
        wanted = rows.batch.logit_rows
        return self._norm(take_rows(embedded, wanted), None if delta is None else take_rows(delta, wanted))


class _Layer:
    """One draft layer; adds its input's pending delta to the residual and gives its own."""

    def __init__(
        self, config: BlockConfig, tensors: Mapping[str, Tensor], index: int, rope: tuple[Tensor, Tensor]
    ) -> None:
        model, prefix = config.model, f"layers.{index}."
        self.mask = config.masks[index]
        self.input_norm = RMSNorm(tensors[prefix + "input_layernorm.weight"], model.rms_norm_eps)
        self.post_norm = RMSNorm(tensors[prefix + "post_attention_layernorm.weight"], model.rms_norm_eps)
        # Queries apart from keys and values: context rows need only the latter, and no weight is held twice.
        self.query = fused_linear(tensors, prefix + "self_attn.", ("q_proj",))
        self.key_value = fused_linear(tensors, prefix + "self_attn.", ("k_proj", "v_proj"))
        self.output = fused_linear(tensors, prefix + "self_attn.", ("o_proj",))
        self.gate_up = fused_linear(tensors, prefix + "mlp.", ("gate_proj", "up_proj"))
        self.down = fused_linear(tensors, prefix + "mlp.", ("down_proj",))
        self.heads = Heads.of(model, tensors, prefix + "self_attn.", rope)
        self.context_heads = replace(self.heads, num_heads=0, q_norm=None)

    def context(self, features: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Keys and values of context rows; the layer's input norm is not for them."""
        rope_store(self.key_value(features), batch, self.context_heads, cache)

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: BlockRows, cache: LayerCache) -> Tensor:
        normed = self.input_norm(residual, delta)
        qkv = torch.cat([self.query(normed), self.key_value(normed)], dim=1)
        rope_store(qkv, rows.batch, self.heads, cache)
        batch, starts = rows.views[self.mask]
        attended = self.output(attend(qkv, batch, starts, self.heads, cache))
        return self.down(silu_mul(self.gate_up(self.post_norm(residual, attended))))
