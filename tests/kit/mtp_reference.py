"""A target and its prediction module by the slow road: the whole text again for every draft, in plain float64 PyTorch.

Written from the method's description alone: no cache, no batch, no block tables, no kernels, and no config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.kit.mtp import LAYERS, Meaning

EPS, HEAD = 1e-5, 16


class MtpReference:
    """Recomputes what the target says of a text, and any round of its module."""

    def __init__(self, target: Mapping[str, Tensor], module: Mapping[str, Tensor], meaning: Meaning) -> None:
        self.weights = {name: tensor.double() for name, tensor in {**target, **module}.items()}
        self.meaning = meaning

    def target(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The target's last states [P+1, D] before its final norm, and its logits [P+1, V]."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        for index in range(LAYERS):
            x = self._layer(f"model.layers.{index}.", x)
        return x, self._head(_rms(x, self.weights["model.norm.weight"]))

    def logits(self, history: Sequence[int], chain: Sequence[int]) -> Tensor:
        """Logits [N, V] before each draft, given those before it.

        Row p reads the token after it and the target's state at p; rows after P read a draft and what the row before
        them gave. Of several modules each makes a draft in turn: it reads one token further than the one before it, and
        what that one gave at the same row.
        """
        states, _ = self.target(history[:-1])
        if self.meaning.after_norm:
            states = _rms(states, self.weights["model.norm.weight"])
        if self.meaning.modules > 1:
            return self._in_turn([*history, *chain], states, len(chain))
        ids, rows = list(history[1:]), []
        for draft in chain:
            normed = self._module(ids, states)
            rows.append(self._head(normed[-1]))
            ids.append(draft)
            states = torch.cat([states, normed[-1:]])
        return torch.stack(rows)

    def _in_turn(self, text: Sequence[int], states: Tensor, num_drafts: int) -> Tensor:
        rows = []
        for step in range(num_drafts):
            states = self._module(text[1 + step :][: len(states)], states, step % self.meaning.modules)
            rows.append(self._head(states[-1]))
        return torch.stack(rows)

    def _head(self, states: Tensor) -> Tensor:
        return states @ self.weights["lm_head.weight"].T

    def _module(self, ids: Sequence[int], states: Tensor, number: int = 0) -> Tensor:
        meaning = self.meaning.of(number)
        embedded = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        if meaning.blind_start:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        token = _rms(embedded, self.weights[meaning.token_norm])
        state = _rms(states, self.weights[meaning.state_norm])
        both = torch.cat([state, token] if meaning.state_first else [token, state], 1)
        x = self._layer(meaning.layer, both @ self.weights[meaning.fusion].T)
        return _rms(x, self.weights[meaning.norm])

    def _layer(self, prefix: str, x: Tensor) -> Tensor:
        def of(name: str) -> Tensor:
            return self.weights[f"{prefix}{name}.weight"]

        x = x + self._attention(prefix + "self_attn.", _rms(x, of("input_layernorm")))
        y = _rms(x, of("post_attention_layernorm"))
        gated = torch.nn.functional.silu(y @ of("mlp.gate_proj").T) * (y @ of("mlp.up_proj").T)
        return x + gated @ of("mlp.down_proj").T

    def _attention(self, prefix: str, inputs: Tensor) -> Tensor:
        where = torch.arange(len(inputs))

        def heads(name: str) -> Tensor:
            out = inputs @ self.weights[f"{prefix}{name}_proj.weight"].T
            out = (out + self.weights.get(f"{prefix}{name}_proj.bias", 0.0)).view(len(inputs), -1, HEAD)
            norm = self.weights.get(f"{prefix}{name}_norm.weight")
            return out if norm is None else _rms(out, norm)

        query, key, value = self._rope(heads("q"), where), self._rope(heads("k"), where), heads("v")
        groups = query.shape[1] // key.shape[1]
        distance = where[:, None] - where[None]
        hidden = distance < 0
        if self.meaning.window is not None:
            hidden = hidden | (distance >= self.meaning.window)
        scores = torch.einsum("qhe,khe->hqk", query, key.repeat_interleave(groups, 1)) * HEAD**-0.5
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khe->qhe", weights, value.repeat_interleave(groups, 1))
        return mixed.flatten(1) @ self.weights[f"{prefix}o_proj.weight"].T

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        half = HEAD // 2
        turns = self.meaning.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None].double() * turns)[:, None]
        z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turned
        return torch.cat([z.real, z.imag], -1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
