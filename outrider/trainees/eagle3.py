"""EAGLE-3.1 in training: the serving network, unrolled over its own drafts ("training-time test").

Row p holds the target's states at p and the token after it; it is to give the distribution after the next token. In
step k every row stands one token further on, reads what it gave in step k-1 in place of the target's states, and sees
the context's keys of step 0 up to p and its own keys of steps 1 to k: what serving does when drafts k+1 come due.
Rows are those that can follow a round: a response token that is known, and one to draft. Source: Li et al., EAGLE-3,
arXiv:2503.01840, section 3; vLLM Speculators for the norms of 3.1. Legend: T packed tokens, R rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafting.differentiable import (
    UNSURE,
    Extra,
    Rope,
    Weights,
    attend,
    draft_config,
    fresh_fusion,
    fresh_layers,
    gated_mlp,
    random_matrix,
)
from outrider.drafting.speculators import layer_table, speculators_keys
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss, spread_taps
from outrider.losses import chunked, soft_cross_entropy
from outrider.models.layers import reference_rms_norm

_LAYER = "layers.0."
_ATTENTION = _LAYER + "self_attn."


class Eagle3Trainee:
    """One decoder layer over the fused taps; embedding and output matrix are the target's own."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        self._config, self._teacher = config, teacher
        self.taps = config.taps or spread_taps(teacher.config.num_layers)
        self._model = draft_config(teacher, config, num_layers=1, qk_norm=False, attention_bias=False)
        self._rope = Rope(self._model, config.max_len + config.ttt_steps)
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in self._fresh().items()}

    def _fresh(self) -> dict[str, Tensor]:
        width = self._model.hidden_size
        tensors = fresh_layers(self._teacher, self._model, self._config.init, adds=0)
        for name in "qkv":
            # The embedding's half starts small: the target's projections have never seen it.
            known = tensors[f"{_ATTENTION}{name}_proj.weight"]
            tensors[f"{_ATTENTION}{name}_proj.weight"] = torch.cat(
                [random_matrix(*known.shape, scale=0.5), known], dim=1
            )
        tensors[_LAYER + "hidden_norm.weight"] = tensors[_LAYER + "input_layernorm.weight"].clone()
        tensors[_LAYER + "input_layernorm.weight"] = torch.ones(width)
        tensors["norm.weight"] = self._teacher.norm_weight * UNSURE
        tensors["fc.weight"] = fresh_fusion(len(self.taps), width)
        return tensors | {f"fc_norm.{index}.weight": torch.ones(width) for index in range(len(self.taps))}

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Summed over rows and steps, later steps weighted less; to be divided by the number of rows."""
        weights = {name: tensor.to(self._teacher.dtype) for name, tensor in self.parameters.items()}
        rows = _Rows.of(batch)
        if not len(rows.index):
            return TrainingLoss.of_nothing(self._config.ttt_steps)
        states = self._combine(batch, weights)
        unrolled = _Unrolled(self, batch, rows, weights, states)
        hidden, total = states[rows.index], torch.zeros((), requires_grad=True)
        agreed, counted = torch.zeros(self._config.ttt_steps), torch.zeros(self._config.ttt_steps)
        for step in range(self._config.ttt_steps):
            hidden = unrolled.step(hidden, step)
            kept = rows.reaching(step + 2, batch, self._teacher.is_drafted)
            if not len(kept):
                break
            # The token that step k drafts follows row p + k + 1, where the teacher says what it should be.
            probs = self._teacher.probs(batch, rows.index[kept] + step + 1)
            loss, sums = chunked(_row_losses, [hidden[kept], probs], [self._teacher.head])
            total = total + self._config.ttt_decay**step * loss
            agreed[step], counted[step] = sums[0], len(kept)
        return TrainingLoss(total, float(counted[0]), agreed, counted)

    def _combine(self, batch: TrainingBatch, weights: Weights) -> Tensor:
        eps = self._model.rms_norm_eps
        parts = [
            reference_rms_norm(batch.taps[layer], weights[f"fc_norm.{index}.weight"], eps)
            for index, layer in enumerate(self.taps)
        ]
        return torch.cat(parts, dim=1) @ weights["fc.weight"].T

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """EAGLE-3.1 in the Speculators format, without the target's embedding."""
        teacher = self._teacher
        layers, length = layer_table(self._model), self._config.num_speculative_tokens
        config = speculators_keys("eagle3", "Eagle3Speculator", layers, teacher, length) | {
            "draft_vocab_size": len(teacher.draft_ids),
            "target_hidden_size": teacher.config.hidden_size,
            "num_target_layers": teacher.config.num_layers,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": True,
            "norm_output": True,
        }
        return config, {name: tensor.detach() for name, tensor in self.parameters.items()} | teacher.ends()


def _row_losses(states: Tensor, probs: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the loss, [rows whose likeliest token is the teacher's])."""
    logits, wide = (states @ head.T).float(), probs.float()
    agreed = (logits.argmax(-1) == wide.argmax(-1)).sum().float()
    return soft_cross_entropy(logits, wide).sum(), agreed[None]


class _Rows:
    """The rows that learn: `index` [R] into the packed tokens, `spans` where each conversation's lie among them."""

    def __init__(self, index: Tensor, ends: Tensor, spans: list[tuple[int, int]]) -> None:
        self.index, self.spans, self._ends = index, spans, ends

    @classmethod
    def of(cls, batch: TrainingBatch) -> _Rows:
        """Row p counts if token p+1 is the target's own, hence known when drafting, and token p+2 as well."""
        found, ends, spans, count = [], [], [], 0
        for first, end in zip(batch.starts, batch.starts[1:], strict=False):
            mask = batch.is_response[first:end]
            rows = torch.nonzero(mask[1:-1] & mask[2:])[:, 0] + first
            found.append(rows)
            ends.append(torch.full_like(rows, end))
            spans.append((count, count + len(rows)))
            count += len(rows)
        return cls(torch.cat(found), torch.cat(ends), spans)

    def reaching(self, distance: int, batch: TrainingBatch, is_drafted: Tensor) -> Tensor:
        """The rows [R'] from which every token up to that distance is the target's own, and the last one draftable."""
        kept = self.index + distance < self._ends
        ahead = (self.index + distance).clamp(max=len(batch.ids) - 1)
        for further in range(2, distance + 1):
            kept &= batch.is_response[(self.index + further).clamp(max=len(batch.ids) - 1)]
        return torch.nonzero(kept & is_drafted[batch.ids[ahead]])[:, 0]


class _Unrolled:
    """One batch's forward: the context's keys of step 0, and the rows' own keys of every step after it."""

    def __init__(
        self, trainee: Eagle3Trainee, batch: TrainingBatch, rows: _Rows, weights: Weights, states: Tensor
    ) -> None:
        self._model, self._rope = trainee._model, trainee._rope
        self._embedding, self._batch, self._rows, self._weights = trainee._teacher.embedding, batch, rows, weights
        firsts = torch.tensor(batch.starts[:-1])
        lengths = torch.tensor(batch.starts).diff()
        self._positions = torch.arange(len(batch.ids)) - firsts.repeat_interleave(lengths)
        following = batch.ids.roll(-1)
        self._keys, self._values = self._key_value(self._inputs(following, states)[0], self._positions)
        self._own: list[tuple[Tensor, Tensor]] = []

    def step(self, hidden: Tensor, step: int) -> Tensor:
        """From what the rows read in place of states [R, D] to their normed output, which the next step reads."""
        index, eps = self._rows.index, self._model.rms_norm_eps
        ahead = (index + 1 + step).clamp(max=len(self._batch.ids) - 1)
        inputs, residual = self._inputs(self._batch.ids[ahead], hidden)
        positions = self._positions[index] + step
        query = self._rope(self._heads(inputs, "q", self._model.num_heads), positions)
        if step:
            self._own.append(self._key_value(inputs, positions))
        residual = residual + self._attended(query) @ self._weights[_ATTENTION + "o_proj.weight"].T
        normed = reference_rms_norm(residual, self._weights[_LAYER + "post_attention_layernorm.weight"], eps)
        residual = residual + gated_mlp(normed, self._weights, _LAYER + "mlp.")
        return reference_rms_norm(residual, self._weights["norm.weight"], eps)

    def _inputs(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [R, 2 D], and the residual [R, D]: the normed state."""
        eps = self._model.rms_norm_eps
        embedded = reference_rms_norm(self._embedding[ids], self._weights[_LAYER + "input_layernorm.weight"], eps)
        normed = reference_rms_norm(hidden, self._weights[_LAYER + "hidden_norm.weight"], eps)
        return torch.cat([embedded, normed], dim=1), normed

    def _heads(self, inputs: Tensor, name: str, count: int) -> Tensor:
        return (inputs @ self._weights[f"{_ATTENTION}{name}_proj.weight"].T).view(len(inputs), count, -1)

    def _key_value(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        count = self._model.num_kv_heads
        return self._rope(self._heads(inputs, "k", count), positions), self._heads(inputs, "v", count)

    def _attended(self, query: Tensor) -> Tensor:
        parts = []
        bounds = zip(self._batch.starts, self._batch.starts[1:], strict=False)
        for (first, end), (low, high) in zip(bounds, self._rows.spans, strict=True):
            seen = torch.arange(first, end)[None] <= self._rows.index[low:high, None]
            extra = None
            if self._own:
                keys = torch.stack([key[low:high] for key, _ in self._own], dim=1)
                values = torch.stack([value[low:high] for _, value in self._own], dim=1)
                extra = Extra(keys, values)
            parts.append(attend(query[low:high], self._keys[first:end], self._values[first:end], seen, extra))
        return torch.cat(parts)
