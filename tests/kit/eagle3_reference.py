"""An EAGLE-3 round by the slow road: the whole text again for every draft, in plain float64 PyTorch.

Written from the method's description alone: no cache, no batch, no block tables, no kernels, and no config. Latent
attention is transformers' own module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.kit.eagle3 import Meaning

EPS = 1e-5


class Eagle3Reference:
    """Recomputes any round of a checkpoint over a target with these two shared matrices and this final norm."""

    def __init__(
        self, tensors: Mapping[str, Tensor], meaning: Meaning, embedding: Tensor, head: Tensor, norm: Tensor
    ) -> None:
        self.meaning = meaning
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding.double())
        self.head = self.weights.get("lm_head.weight", head.double())
        self.target_norm = norm.double()

    def logits(self, taps: Tensor, history: Sequence[int], chain: Sequence[int]) -> Tensor:
        """Logits over the target's vocabulary [N, V] before each draft, given those before it.

        `taps` [P+1, K Dt] are those of history[:-1]. Row p reads the token after it; rows after P read a draft and what
        the row before them gave.
        """
        states = self._combined(taps.double())
        ids, rows = list(history[1:]), []
        for draft in chain:
            normed, feedback = self._forward(torch.tensor(ids), states)
            rows.append(self._widened(normed[-1] @ self.head.T * self.meaning.scale))
            ids.append(draft)
            states = torch.cat([states, feedback[-1:]])
        return torch.stack(rows)

    def _widened(self, logits: Tensor) -> Tensor:
        if "d2t" not in self.weights:
            return logits
        wide = torch.full((len(self.embedding),), -math.inf, dtype=torch.float64)
        for i, offset in enumerate(self.weights["d2t"].tolist()):
            wide[i + offset] = logits[i]
        return wide

    def _combined(self, taps: Tensor) -> Tensor:
        if not self.meaning.has_fusion:
            return _rms(taps, self.target_norm)
        if "input_norm.weight" in self.weights:
            taps = _rms(taps, self.weights["input_norm.weight"])
        if "fc_norm.0.weight" in self.weights:
            parts = taps.split(taps.shape[1] // len(self.meaning.taps), 1)
            taps = torch.cat([_rms(part, self.weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
        return taps @ self.weights["fc.weight"].T

    def _forward(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        def of(index: int, name: str) -> Tensor:
            return self.weights[f"layers.{index}.{name}.weight"]

        normed = _rms(states, of(0, "hidden_norm"))
        inputs = torch.cat([_rms(self.embedding[ids], of(0, "input_layernorm")), normed], 1)
        x = normed if self.meaning.residual_is_normed else states
        for index, window in enumerate(self.meaning.windows):
            if index:
                inputs = _rms(x, of(index, "input_layernorm"))
            x = x + self._attention(index, inputs, window)
            y = _rms(x, of(index, "post_attention_layernorm"))
            gated = torch.nn.functional.silu(y @ of(index, "mlp.gate_proj").T) * (y @ of(index, "mlp.up_proj").T)
            x = x + gated @ of(index, "mlp.down_proj").T
        out = _rms(x, self.weights["norm.weight"])
        return out, out if self.meaning.feeds_back_normed else x

    def _latent_attention(self, index: int, inputs: Tensor) -> Tensor:
        keys = dict(self.meaning.latent or {}) | {"hidden_size": inputs.shape[1], "attn_implementation": "eager"}
        keys["model_type"] = "deepseek_v3"
        config = transformers.DeepseekV3Config(**{name: keys[name] for name in keys if name != "model_type"})
        module = DeepseekV3Attention(config, 0).double()
        module.o_proj = torch.nn.Linear(1, 1, bias=False)
        for name, part in module.named_modules():
            if hasattr(part, "weight"):
                part.weight = torch.nn.Parameter(self.weights[f"layers.{index}.self_attn.{name}.weight"])
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = EPS
        where = torch.arange(len(inputs))[None]
        mask = torch.full((len(inputs), len(inputs)), -math.inf, dtype=torch.float64).triu(1)[None, None]
        turns = DeepseekV3RotaryEmbedding(config)(inputs[None], where)
        with torch.no_grad():
            return cast(Tensor, module(inputs[None], turns, mask)[0][0])

    def _attention(self, index: int, inputs: Tensor, window: int | None) -> Tensor:
        if self.meaning.latent is not None:
            return self._latent_attention(index, inputs)
        size, where = self.meaning.head_dim, torch.arange(len(inputs))

        def heads(name: str) -> Tensor:
            prefix = f"layers.{index}.self_attn.{name}"
            out = inputs @ self.weights[f"{prefix}_proj.weight"].T + self.weights.get(f"{prefix}_proj.bias", 0.0)
            out = out.view(len(inputs), -1, size)
            norm = self.weights.get(f"{prefix}_norm.weight")
            return out if norm is None else _rms(out, norm)

        query, key, value = self._rope(heads("q"), where), self._rope(heads("k"), where), heads("v")
        groups = query.shape[1] // key.shape[1]
        distance = where[:, None] - where[None]
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance >= window)
        scores = torch.einsum("qhe,khe->hqk", query, key.repeat_interleave(groups, 1)) * size**-0.5
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khe->qhe", weights, value.repeat_interleave(groups, 1))
        return mixed.flatten(1) @ self.weights[f"layers.{index}.self_attn.o_proj.weight"].T

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.meaning.head_dim // 2
        turns = self.meaning.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * turns)[:, None]
        z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turned
        return torch.cat([z.real, z.imag], -1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
