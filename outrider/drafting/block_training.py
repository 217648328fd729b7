"""The block network in training: random anchors, each with its block of mask tokens, over the context before it.

Shared by DFlash and DSpark, which add their losses (and DSpark its heads). Layout as in serving, fill-in: block row 0
is the anchor, row k predicts the token at its own position. Context rows give keys and values only. Sources: z-lab
DFlash; DeepSpec; vLLM Speculators. Legend: T packed tokens, A anchors, B block rows, R = A x B, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.block_config import BlockConfig, LayerMask
from outrider.drafting.differentiable import (
    Extra,
    Rope,
    Weights,
    attend,
    draft_config,
    fresh_fusion,
    fresh_layers,
    gated_mlp,
    random_matrix,
    unsure_norm,
)
from outrider.drafting.speculators import layer_table, speculators_keys
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, spread_taps
from outrider.models.arch import ModelConfig
from outrider.models.layers import reference_rms_norm

_FAINT, _SHARP = 0.1, 1.3
"""Of heads that look back: how much rows' content says at first, and the size of their normed queries and keys."""


@dataclass(frozen=True)
class Anchors:
    """`index` [A] into the packed tokens, ascending; `spans`: which of them lie in each conversation.

    `targets` [A, B-1]: index of the token that draft k is to be, -1 where the response has ended or the token cannot be
    drafted, and for all later drafts of such a block.
    """

    index: Tensor
    spans: tuple[tuple[int, int], ...]
    targets: Tensor

    @classmethod
    def draw(cls, batch: TrainingBatch, share: float, block_size: int, generator: torch.Generator) -> Anchors:
        """A share of the response tokens that have a response token after them."""
        chosen, spans, count = [], [], 0
        for first, end in zip(batch.starts, batch.starts[1:], strict=False):
            mask = batch.is_response[first:end]
            places = torch.nonzero(mask[:-1] & mask[1:])[:, 0] + first
            wanted = min(len(places), max(1, round(share * len(places)))) if len(places) else 0
            picked = places[torch.randperm(len(places), generator=generator)[:wanted].sort().values]
            chosen.append(picked)
            spans.append((count, count + len(picked)))
            count += len(picked)
        index = torch.cat(chosen)
        ends = torch.tensor(batch.starts)[1:].repeat_interleave(torch.tensor([high - low for low, high in spans]))
        targets = index[:, None] + torch.arange(1, block_size)
        inside = (targets < ends[:, None]) & batch.is_response[targets.clamp(max=len(batch.ids) - 1)]
        return cls(index, tuple(spans), torch.where(inside.cumprod(dim=1).bool(), targets, -1))


class BlockNetwork:
    """The weights under their checkpoint's names, and the forward from anchors to the normed states of their drafts."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        self.config, self.teacher = config, teacher
        self.taps = config.taps or spread_taps(teacher.config.num_layers)
        self.model = draft_config(teacher, config, num_layers=2, qk_norm=True, attention_bias=True)
        self.block = BlockConfig(
            model=self.model,
            taps=self.taps,
            mask_token_id=_mask_token(teacher),
            masks=(LayerMask(config.causal, None),) * self.model.num_layers,
            block_size=config.block_size,
            draft_vocab_size=len(teacher.draft_ids),
            target_hidden_size=teacher.config.hidden_size,
            num_target_layers=teacher.config.num_layers,
            sample_from_anchor=False,
            source="",
        )
        self._rope = Rope(self.model, config.max_len + config.block_size)
        block = torch.ones(config.block_size, config.block_size, dtype=torch.bool)
        self._mask = block.tril() if config.causal else block

    def fresh(self) -> dict[str, Tensor]:
        """Weights to start from."""
        width = self.model.hidden_size
        tensors = fresh_layers(self.teacher, self.model, self.config.init, adds=1)
        for index in range(self.model.num_layers):
            _look_back(tensors, f"layers.{index}.self_attn.", self.model, self.config.block_size)
        tensors["hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"].clone()
        tensors["norm.weight"] = unsure_norm(self.teacher)
        tensors["fc.weight"] = fresh_fusion(len(self.taps), width)
        return tensors

    def states(self, batch: TrainingBatch, anchors: Anchors, weights: Weights) -> Tensor:
        """Normed states [A, B-1, D] of the drafts."""
        size, eps = self.config.block_size, self.model.rms_norm_eps
        bounds = list(zip(batch.starts, batch.starts[1:], strict=False))
        positions = torch.cat([torch.arange(end - first) for first, end in bounds])
        taps = torch.cat([batch.taps[layer] for layer in self.taps], dim=1)
        context = reference_rms_norm(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
        ids = torch.full((len(anchors.index), size), self.block.mask_token_id)
        ids[:, 0] = batch.ids[anchors.index]
        residual = self.teacher.embedding[ids.flatten()]
        places = (positions[anchors.index][:, None] + torch.arange(size)).flatten()
        for index in range(self.model.num_layers):
            prefix = f"layers.{index}."
            inputs = reference_rms_norm(residual, weights[prefix + "input_layernorm.weight"], eps)
            query = self._head(inputs, weights, prefix, "q", places)
            keys, values = self._key_value(context, weights, prefix, positions)
            own = [part.unflatten(0, (-1, size)) for part in self._key_value(inputs, weights, prefix, places)]
            parts = []
            for (first, end), (low, high) in zip(bounds, anchors.spans, strict=True):
                seen = torch.arange(first, end) < anchors.index[low:high, None]
                extra = Extra(own[0][low:high], own[1][low:high], self._mask)
                rows = query[low * size : high * size]
                seen = seen.repeat_interleave(size, dim=0)
                parts.append(attend(rows, keys[first:end], values[first:end], seen, extra))
            residual = residual + torch.cat(parts) @ weights[prefix + "self_attn.o_proj.weight"].T
            residual = residual + weights[prefix + "self_attn.o_proj.bias"]
            normed = reference_rms_norm(residual, weights[prefix + "post_attention_layernorm.weight"], eps)
            residual = residual + gated_mlp(normed, weights, prefix + "mlp.")
        states: Tensor = reference_rms_norm(residual, weights["norm.weight"], eps).unflatten(0, (-1, size))
        return states[:, 1:]

    def _head(self, inputs: Tensor, weights: Weights, prefix: str, name: str, positions: Tensor) -> Tensor:
        heads = _projected(inputs, weights, f"{prefix}self_attn.{name}_proj.").unflatten(1, (-1, self.model.head_dim))
        normed = reference_rms_norm(heads, weights[f"{prefix}self_attn.{name}_norm.weight"], self.model.rms_norm_eps)
        return self._rope(normed, positions)

    def _key_value(self, inputs: Tensor, weights: Weights, prefix: str, positions: Tensor) -> Sequence[Tensor]:
        values = _projected(inputs, weights, prefix + "self_attn.v_proj.")
        return self._head(inputs, weights, prefix, "k", positions), values.unflatten(1, (-1, self.model.head_dim))

    def table(self, method: str, class_name: str) -> dict[str, Any]:
        """The config in the Speculators format, fill-in layout."""
        teacher, length = self.teacher, self.config.num_speculative_tokens
        layers = layer_table(self.model) | {"is_causal": self.config.causal}
        keys = speculators_keys(method, class_name, layers, teacher, length)
        return keys | self.block.speculators_keys(teacher.config.num_layers)


def _projected(inputs: Tensor, weights: Weights, prefix: str) -> Tensor:
    return inputs @ weights[prefix + "weight"].T + weights[prefix + "bias"]


def _look_back(tensors: dict[str, Tensor], prefix: str, model: ModelConfig, reach: int) -> None:
    """Let two thirds of the heads start out looking at the row one, two, … `reach` places before theirs, in turn.

    A block row knows neither the anchor nor the context's last row until attention finds them, and with few examples
    it takes long to. The biases say where: on the pairs of dimensions that turn fastest, a query turned back by a
    distance meets the key that lies there. What rows hold matters little to these heads at first.
    """
    size, half = model.head_dim, model.head_dim // 2
    fast = max(1, half // 4)
    turns = model.rope_theta ** (-torch.arange(fast) / half)
    heads, shared = model.num_heads, model.num_heads // model.num_kv_heads
    for name in ("q_proj", "k_proj"):
        rows, bias = tensors[f"{prefix}{name}.weight"], tensors[f"{prefix}{name}.bias"].view(-1, size)
        places = range(0, heads, 1 if name == "q_proj" else shared)
        for row, head in enumerate(places):
            if head >= max(1, 2 * heads // 3):
                break
            angles = -turns * (1 + head % reach) if name == "q_proj" else torch.zeros(fast)
            bias[row, :fast], bias[row, half : half + fast] = angles.cos(), angles.sin()
            rows[row * size : (row + 1) * size] = random_matrix(size, rows.shape[1], scale=_FAINT)
        tensors[f"{prefix}{name[0]}_norm.weight"] = torch.full((size,), _SHARP)


def _mask_token(teacher: Teacher) -> int:
    """A token that the responses never have: the first that cannot be drafted, or the last of all."""
    left = torch.nonzero(~teacher.is_drafted)
    return int(left[0, 0]) if len(left) else teacher.config.vocab_size - 1
