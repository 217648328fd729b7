"""The Gemma family (Gemma 3 text, dense Gemma 4 text): a lean forward over packed rows and the paged cache.

What sets it apart from Llama's: the embedding is scaled, four norms a layer, layers that slide beside layers that see
everything, each with rotary tables of its own; and in Gemma 4 normed values, heads of two sizes, layers that read the
keys of an earlier one, and a small embedding of the token for every layer. Not a torch.nn.Module and not
differentiable. Source of the facts: transformers 5.24, `models/gemma3` and `models/gemma4`; the tests hold the logits
against it. Legend: T packed rows, D hidden, V vocabulary, L layers, P width of a layer's own embedding, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.attention import Batch, Heads, LayerCache, attend, rope_store
from outrider.models.gemma_config import GemmaConfig, GemmaLayer
from outrider.models.layers import RMSNorm, gelu_mul, rope_tables, take_rows
from outrider.models.linear import Linear, fused_linear
from outrider.models.target import AttentionKind, Forward

Tables = tuple[Tensor, Tensor]
_OUTER_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_": "lm_"}


def text_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, those of a larger model's text part under the names that they have in a text model's own."""
    return {text_name(name): tensor for name, tensor in tensors.items()}


def text_name(name: str) -> str:
    """The same for one name."""
    for prefix, ours in _OUTER_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


class GemmaModel:
    """A Target of the Gemma family; models/target.py says what its parts are."""

    shares_prefixes = True
    brings_threads = True

    def __init__(
        self, config: GemmaConfig, tensors: Mapping[str, Tensor], *, max_len: int, folder: Path | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.embedding = tensors["model.embed_tokens.weight"]
        self._scale = _rounded(config.hidden_size**0.5, self.embedding)
        tables: dict[AttentionKind, Tables] = {}
        for layer in config.layers:
            if layer.kind not in tables:
                tables[layer.kind] = layer_tables(layer, max_len, self.embedding.device)
        self._windows = {layer.window for layer in config.layers}
        self.layers = [
            DecoderLayer(config, index, tensors, tables[layer.kind]) for index, layer in enumerate(config.layers)
        ]
        self.per_layer = PerLayerInputs(config, tensors) if config.per_layer_size else None
        self.norm = RMSNorm(tensors["model.norm.weight"], config.rms_norm_eps, offset=config.norm_offset)
        self.lm_head = Linear(self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots (a multiple of 16); layers that share them have one entry."""
        cache: list[LayerCache] = []
        for index, layer in enumerate(self.config.layers):
            own = layer.kv_source == index
            fresh = LayerCache(num_slots, layer.num_kv_heads, layer.head_dim, self.embedding) if own else None
            cache.append(fresh or cache[layer.kv_source])
        return cache

    def bytes_per_token(self) -> int:
        """Cache memory of one token over all layers."""
        own = [layer for index, layer in enumerate(self.config.layers) if layer.kv_source == index]
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in own) * self.embedding.element_size()

    def last_layer_of(self, kind: AttentionKind) -> int | None:
        """The last layer of that kind that has keys and values of its own."""
        return max((layer.kv_source for layer in self.config.layers if layer.kind == kind), default=None)

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Sequence[LayerCache], taps: Sequence[int] = ()) -> Forward:
        """Run all rows; `taps` names residual streams by the number of layers that have run (0: the embedding)."""
        residual = take_rows(self.embedding, batch.ids) * self._scale
        told = None if self.per_layer is None else self.per_layer(batch.ids, residual)
        starts = {window: batch.starts(window) for window in self._windows}
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(residual.clone())
            layer.attention(residual, batch, starts[layer.shape.window], cache[index])
            layer.feed_forward(residual, None if told is None else told[:, index])
        if len(self.layers) in taps:
            tapped.append(residual.clone())
        logits = self.lm_head(self.norm(take_rows(residual, batch.logit_rows)), wide=True)
        return Forward(soft_capped(logits, self.config.final_soft_cap), tuple(tapped))


class DecoderLayer:
    """One decoder layer in two halves, each of which adds to the residual [T, D] in place."""

    def __init__(self, config: GemmaConfig, index: int, tensors: Mapping[str, Tensor], tables: Tables) -> None:
        self.shape = config.layers[index]
        prefix = f"model.layers.{index}."

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{prefix}{name}.weight"], config.rms_norm_eps, offset=config.norm_offset)

        self.input_norm, self.post_attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.pre_mlp_norm, self.post_mlp_norm = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.self_attention = Attention(config, index, tensors, tables)
        self.gate_up = fused_linear(tensors, prefix + "mlp.", ("gate_proj", "up_proj"))
        self.down = fused_linear(tensors, prefix + "mlp.", ("down_proj",))
        self.told = LayerTold(tensors, prefix, norm("post_per_layer_input_norm")) if config.per_layer_size else None
        self.scalar = float(tensors[prefix + "layer_scalar"]) if config.layer_scalar else 1.0

    def attention(self, residual: Tensor, batch: Batch, starts: Tensor, cache: LayerCache) -> None:
        """Row r sees the tokens from starts[r] on."""
        attended = self.self_attention(self.input_norm(residual), batch, starts, cache)
        residual += self.post_attention_norm(attended)

    def feed_forward(self, residual: Tensor, told: Tensor | None) -> None:
        """`told` [T, P]: what this layer is told of the tokens beside the residual, in a model that has it."""
        wide = self.gate_up(self.pre_mlp_norm(residual))
        residual += self.post_mlp_norm(self.down(gelu_mul(wide)))
        if self.told is not None and told is not None:
            residual += self.told(residual, told)
        if self.scalar != 1.0:
            residual *= self.scalar


class Attention:
    """A layer's attention, with keys and values of its own or over those of an earlier layer of its kind."""

    def __init__(self, config: GemmaConfig, index: int, tensors: Mapping[str, Tensor], tables: Tables) -> None:
        layer, prefix = config.layers[index], f"model.layers.{index}.self_attn."
        self.has_kv = layer.kv_source == index
        names = ("q_proj", "k_proj", "k_proj" if layer.key_is_value else "v_proj") if self.has_kv else ("q_proj",)
        self.qkv, self.output = fused_linear(tensors, prefix, names), fused_linear(tensors, prefix, ("o_proj",))
        norms = [tensors[f"{prefix}{name}_norm.weight"].float() + config.norm_offset for name in "qk"[: len(names)]]
        self.heads = Heads(
            num_heads=config.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            cosine=tables[0],
            sine=tables[1],
            scale=config.attention_scale,
            q_norm=norms[0],
            k_norm=norms[1] if self.has_kv else None,
            norm_eps=config.rms_norm_eps,
        )
        self.projected = self.heads if self.has_kv else replace(self.heads, num_kv_heads=0)
        ones = torch.ones_like(tensors[prefix + "q_norm.weight"])
        self.value_norm = RMSNorm(ones, config.rms_norm_eps) if config.value_norm and self.has_kv else None

    def __call__(self, x: Tensor, batch: Batch, starts: Tensor, cache: LayerCache) -> Tensor:
        """x [T, D] -> [T, D]."""
        qkv = self.qkv(x)
        if self.value_norm is not None:
            values = qkv.view(len(qkv), -1, self.heads.head_dim)[:, -self.heads.num_kv_heads :]
            values.copy_(self.value_norm(values.flatten(0, 1).contiguous()).view_as(values))
        rope_store(qkv, batch, self.projected, cache)
        return self.output(attend(qkv, batch, starts, self.heads, cache))


class LayerTold:
    """What a layer makes of its own embedding of the token: gated by the residual, brought to its width, normed."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, norm: RMSNorm) -> None:
        self.gate = fused_linear(tensors, prefix, ("per_layer_input_gate",))
        self.projection = fused_linear(tensors, prefix, ("per_layer_projection",))
        self.norm = norm

    def __call__(self, residual: Tensor, told: Tensor) -> Tensor:
        """residual [T, D], told [T, P] -> what to add [T, D]."""
        return self.norm(self.projection(gelu_mul(torch.cat([self.gate(residual), told], dim=1))))


class PerLayerInputs:
    """One small embedding of the token for every layer, mixed with a projection of the scaled input embedding."""

    def __init__(self, config: GemmaConfig, tensors: Mapping[str, Tensor]) -> None:
        self._size, self._projection_scale = config.per_layer_size, config.hidden_size**-0.5
        self._table = tensors["model.embed_tokens_per_layer.weight"]
        self._scale = _rounded(self._size**0.5, self._table)
        self._projection = fused_linear(tensors, "model.", ("per_layer_model_projection",))
        weight = tensors["model.per_layer_projection_norm.weight"]
        self._norm = RMSNorm(weight, config.rms_norm_eps, offset=config.norm_offset)

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """ids [T], embedded [T, D] -> [T, L, P]."""
        projected = self._projection(embedded) * self._projection_scale
        normed = self._norm(projected.view(-1, self._size)).view(len(ids), -1, self._size)
        looked_up = (take_rows(self._table, ids) * self._scale).view_as(normed)
        mixed: Tensor = (normed + looked_up) * 2.0**-0.5
        return mixed


def layer_tables(layer: GemmaLayer, max_len: int, device: torch.device) -> Tables:
    """A layer's rotary tables."""
    cosine, sine = rope_tables(layer.head_dim, max_len, layer.rope_theta, layer.rope_scaling)
    return cosine.to(device), sine.to(device)


def _rounded(value: float, like: Tensor) -> float:
    """A number as the model's type holds it: the published models round the embedding's scale."""
    return float(torch.tensor(value).to(like.dtype))


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) in place, row by row: a vector operation over all may round a row by its neighbours."""
    if cap is not None:
        for row in logits:
            row.div_(cap).tanh_().mul_(cap)
    return logits
