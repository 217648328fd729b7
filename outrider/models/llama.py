"""The Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3, MiMo): a lean forward over packed rows and the paged cache.

Not a torch.nn.Module and not differentiable. Tensor names and the order of operations are those of the published
checkpoints (Hugging Face's layout); speed comes from fused projections and the kernels behind Linear, RMSNorm and
attention. Legend: T packed rows, R rows whose logits are wanted, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.arch import ModelConfig
from outrider.models.attention import Batch, Heads, LayerCache, attend, rope_store
from outrider.models.layers import RMSNorm, rope_tables, silu_mul, take_rows
from outrider.models.linear import Linear, fused_linear
from outrider.models.target import AttentionKind, Forward


class LlamaModel:
    """A Target of the Llama family; models/target.py says what its parts are."""

    shares_prefixes = True
    brings_threads = True

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], *, max_len: int, folder: Path | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.embedding = tensors["model.embed_tokens.weight"]
        tables = rope_tables(config.head_dim, max_len, config.rope_theta, config.rope_scaling)
        rope = (tables[0].to(self.embedding.device), tables[1].to(self.embedding.device))
        prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
        self.layers = [DecoderLayer(config, tensors, prefix, rope) for prefix in prefixes]
        self.norm = RMSNorm(tensors["model.norm.weight"], config.rms_norm_eps)
        self.lm_head = Linear(self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots (a multiple of 16), one entry a layer."""
        config = self.config
        return [LayerCache(num_slots, config.num_kv_heads, config.head_dim, self.embedding) for _ in self.layers]

    def bytes_per_token(self) -> int:
        """Cache memory of one token over all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.embedding.element_size()

    def last_layer_of(self, kind: AttentionKind) -> int | None:
        """The last layer, if its kind is the one that all layers have."""
        ours = "full_attention" if self.config.sliding_window is None else "sliding_attention"
        return self.config.num_layers - 1 if kind == ours else None

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Sequence[LayerCache], taps: Sequence[int] = ()) -> Forward:
        """Run all rows; `taps` names residual streams by the number of layers that have run (0: the embedding)."""
        residual = take_rows(self.embedding, batch.ids)
        delta: Tensor | None = None
        starts = batch.starts(self.config.sliding_window)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(residual.clone() if delta is None else residual + delta)
            delta = layer(residual, delta, batch, starts, cache[index])
        if len(self.layers) in taps:
            tapped.append(residual.clone() if delta is None else residual + delta)
        rows = batch.logit_rows
        last = self.norm(take_rows(residual, rows), None if delta is None else take_rows(delta, rows))
        return Forward(self.lm_head(last, wide=True), tuple(tapped))


class DecoderLayer:
    """One decoder layer, its tensors under a prefix; adds its input's pending delta to the residual, gives its own."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], prefix: str, rope: tuple[Tensor, Tensor]
    ) -> None:
        self.input_norm = RMSNorm(tensors[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        self.post_norm = RMSNorm(tensors[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        self.qkv = fused_linear(tensors, prefix + "self_attn.", ("q_proj", "k_proj", "v_proj"))
        self.output = fused_linear(tensors, prefix + "self_attn.", ("o_proj",))
        self.gate_up = fused_linear(tensors, prefix + "mlp.", ("gate_proj", "up_proj"))
        self.down = fused_linear(tensors, prefix + "mlp.", ("down_proj",))
        self.heads = Heads.of(config, tensors, prefix + "self_attn.", rope)

    def __call__(
        self, residual: Tensor, delta: Tensor | None, batch: Batch, starts: Tensor, cache: LayerCache
    ) -> Tensor:
        qkv = self.qkv(self.input_norm(residual, delta))
        rope_store(qkv, batch, self.heads, cache)
        attended = self.output(attend(qkv, batch, starts, self.heads, cache))
        return self.down(silu_mul(self.gate_up(self.post_norm(residual, attended))))
