"""A Gemma 4 MTP round by the slow road: the target's text read afresh, then plain float64 PyTorch for every draft.

Written from the method's description alone: no batch, no block tables, no kernels, and no config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.models.attention import Batch
from outrider.models.gemma import GemmaModel
from outrider.models.llama import LlamaModel
from tests.kit.gemma4_mtp import EPS, HEADS, Layer, Meaning

Reading = tuple[Tensor, list[tuple[Tensor, Tensor]]]


def read_afresh(model: LlamaModel | GemmaModel, text: Sequence[int]) -> Reading:
    """The target's last state, normed, of a text's last row [Dt]; keys and values [S, G, E] of every layer."""
    slots = torch.arange(len(text))
    cache = model.new_cache(-(-len(text) // 16) * 16)
    batch = Batch.pack(
        np.array(text),
        [(0, len(text))],
        [list(range(-(-len(text) // 16)))],
        np.zeros(0, dtype=np.int64),
        16,
        model.device,
    )
    taps = model(batch, cache, (model.config.num_layers,)).taps[0]
    return model.norm(taps[-1:].contiguous())[0], [entry.gather(slots) for entry in cache]


class Gemma4MtpReference:
    """Recomputes any round of a drafter over a target."""

    def __init__(self, tensors: Mapping[str, Tensor], meaning: Meaning, model: LlamaModel | GemmaModel) -> None:
        self.meaning, self.model = meaning, model
        self.weights = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embedding = model.embedding.double()

    def logits(self, history: Sequence[int], chain: Sequence[int]) -> Tensor:
        """Logits over the target's vocabulary [N, V] before each draft, given those before it."""
        state, cache = read_afresh(self.model, history[:-1])
        place, rows = len(history) - 2, []
        hidden = state.double()
        for token in [history[-1], *chain[:-1]]:
            embedded = self.embedding[token] * self.embedding.shape[1] ** 0.5
            x = self.weights["pre_projection.weight"] @ torch.cat([embedded, hidden])
            for index, layer in enumerate(self.meaning.layers):
                keys, values = cache[layer.reads]
                x = self._layer(index, layer, x, (keys.double(), values.double()), place)
            states = _rms(x, self.weights["model.norm.weight"])
            hidden = self.weights["post_projection.weight"] @ states
            rows.append(self._scored(states))
        return torch.stack(rows)

    def _layer(self, index: int, layer: Layer, x: Tensor, cache: tuple[Tensor, Tensor], place: int) -> Tensor:
        def of(name: str) -> Tensor:
            return self.weights[f"model.layers.{index}.{name}.weight"]

        query = (of("self_attn.q_proj") @ _rms(x, of("input_layernorm"))).view(HEADS, layer.head_dim)
        query = _turned(_rms(query, of("self_attn.q_norm")), layer, place)
        first = 0 if layer.window is None else max(0, place - layer.window + 1)
        keys, values = (part[first : place + 1].repeat_interleave(HEADS // layer.kv_heads, 1) for part in cache)
        weights = torch.einsum("he,she->hs", query, keys).softmax(-1)
        mixed = torch.einsum("hs,she->he", weights, values).flatten()
        x = x + _rms(of("self_attn.o_proj") @ mixed, of("post_attention_layernorm"))
        z = _rms(x, of("pre_feedforward_layernorm"))
        gated = torch.nn.functional.gelu(of("mlp.gate_proj") @ z, approximate="tanh") * (of("mlp.up_proj") @ z)
        x = x + _rms(of("mlp.down_proj") @ gated, of("post_feedforward_layernorm"))
        return x * self.weights[f"model.layers.{index}.layer_scalar"]

    def _scored(self, states: Tensor) -> Tensor:
        if self.meaning.top is not None:
            return self._of_best_groups(states)
        logits = self.weights.get("lm_head.weight", self.weights.get("model.embed_tokens.weight")) @ states
        if self.meaning.cap is not None:
            logits = self.meaning.cap * torch.tanh(logits / self.meaning.cap)
        wide = torch.full((len(self.embedding),), float("-inf"), dtype=torch.float64)
        offsets = self.weights.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        for index, offset in enumerate(offsets.tolist()):
            if index + offset not in self.meaning.suppressed:
                wide[index + offset] = logits[index]
        return wide

    def _of_best_groups(self, states: Tensor) -> Tensor:
        assert self.meaning.top is not None
        scores = self.weights["masked_embedding.centroids.weight"] @ states
        order = self.weights["masked_embedding.token_ordering"].tolist()
        size = len(order) // len(scores)
        wide = torch.full((len(order),), float("-inf"), dtype=torch.float64)
        for group in scores.argsort(descending=True)[: self.meaning.top].tolist():
            for token in order[group * size : (group + 1) * size]:
                wide[token] = self.weights["model.embed_tokens.weight"][token] @ states
        return wide


def _turned(x: Tensor, layer: Layer, place: int) -> Tensor:
    half = layer.head_dim // 2
    angles = place * layer.theta ** (-torch.arange(half, dtype=torch.float64) / half) / layer.slower
    angles[int(half * layer.rotated) :] = 0
    z = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag], -1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
