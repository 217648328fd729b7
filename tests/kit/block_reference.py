"""A block drafter's logits by the slow road: the whole text's context again for every round, in plain float64 PyTorch.

Written from the method's description alone: no cache, no batch, no block tables, no kernels, and no config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.kit.block_checkpoints import LAYERS, MASK, Meaning

EPS = 1e-5


class BlockReference:
    """Recomputes any round of a checkpoint over a target with these two shared matrices."""

    def __init__(self, tensors: Mapping[str, Tensor], meaning: Meaning, embedding: Tensor, head: Tensor) -> None:
        self.meaning = meaning
        self.weights = {
            name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding.double())
        self.head = self.weights.get("lm_head.weight", head.double())

    def draft_ids(self) -> Tensor:
        """The target id of each draftable token."""
        ids = torch.arange(len(self.head))
        return ids + self.weights["d2t"] if "d2t" in self.weights else ids

    def logits(self, taps: Tensor, anchor: int, chain: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits over draftable tokens [N, Vd] and confidences [N], given the taps [P+1, n D] and the drafts chosen."""
        states = self._states(taps.double(), anchor, len(chain))
        base = states @ self.head.T * self.meaning.scale
        if self.meaning.topk is not None:
            kept = base.topk(self.meaning.topk).indices
            base = torch.full_like(base, -math.inf).scatter(1, kept, base.gather(1, kept))
        if not self.meaning.rank:
            return base, None
        before = torch.tensor([anchor, *chain[:-1]])
        known = self.weights["markov_head.markov_w1.weight"][before]
        return base + self._bias(states, known), self._confidence(states, known)

    def _confidence(self, states: Tensor, known: Tensor) -> Tensor | None:
        if not self.meaning.has_confidence:
            return None
        weight = self.weights["confidence_head.proj.weight"][0]
        seen = torch.cat([states, known], 1)[:, : len(weight)]
        return torch.sigmoid(seen @ weight + self.weights["confidence_head.proj.bias"])

    def _bias(self, states: Tensor, known: Tensor) -> Tensor:
        out = self.weights["markov_head.markov_w2.weight"].T
        if self.meaning.head == "gated":
            gate = torch.cat([states, known], 1) @ self.weights["markov_head.gate_proj.weight"].T
            return (torch.sigmoid(gate + self.weights["markov_head.gate_proj.bias"]) * known) @ out
        if self.meaning.head == "rnn":
            memory, rows = torch.zeros(self.meaning.rank, dtype=torch.float64), []
            for state, m in zip(states, known, strict=True):
                joint = self.weights["markov_head.joint_proj.weight"] @ torch.cat([memory, m, state])
                g, c, o = (joint + self.weights["markov_head.joint_proj.bias"]).split(self.meaning.rank)
                memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
                rows.append(torch.tanh(o) @ out)
            return torch.stack(rows)
        return known @ out

    def _states(self, taps: Tensor, anchor: int, num_tokens: int) -> Tensor:
        skipped = 0 if self.meaning.from_anchor else 1
        x = self.embedding[torch.tensor([anchor] + [MASK] * (num_tokens - 1 + skipped))]
        context = _rms(taps @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        for index in range(LAYERS):
            x = self._layer(index, x, context)
        return _rms(x, self.weights["norm.weight"])[skipped:]

    def _layer(self, index: int, x: Tensor, context: Tensor) -> Tensor:
        def of(name: str) -> Tensor:
            return self.weights[f"layers.{index}.{name}.weight"]

        x = x + self._attention(index, _rms(x, of("input_layernorm")), context)
        normed = _rms(x, of("post_attention_layernorm"))
        gated = torch.nn.functional.silu(normed @ of("mlp.gate_proj").T) * (normed @ of("mlp.up_proj").T)
        return x + gated @ of("mlp.down_proj").T

    def _attention(self, index: int, normed: Tensor, context: Tensor) -> Tensor:
        size, num_known = self.meaning.head_dim, len(context)
        where = torch.arange(num_known + len(normed))
        both = torch.cat([context, normed])

        def heads(name: str, rows: Tensor) -> Tensor:
            prefix = f"layers.{index}.self_attn.{name}"
            out = rows @ self.weights[f"{prefix}_proj.weight"].T + self.weights.get(f"{prefix}_proj.bias", 0.0)
            out = out.view(len(rows), -1, size)
            return out if name == "v" else _rms(out, self.weights[f"{prefix}_norm.weight"])

        query = self._rope(heads("q", normed), where[num_known:])
        key = self._rope(heads("k", both), where).repeat_interleave(2, 1)
        value = heads("v", both).repeat_interleave(2, 1)
        causal, window = self.meaning.views[index]
        distance = where[num_known:, None] - where[None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if window is not None:
            hidden |= distance.abs() >= window
        scores = torch.einsum("qhe,khe->hqk", query, key) * size**-0.5
        mixed = torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -math.inf).softmax(-1), value)
        prefix = f"layers.{index}.self_attn.o_proj"
        return mixed.flatten(1) @ self.weights[f"{prefix}.weight"].T + self.weights.get(f"{prefix}.bias", 0.0)

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.meaning.head_dim // 2
        turns = self.meaning.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * turns)[:, None]
        z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turned
        return torch.cat([z.real, z.imag], -1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
