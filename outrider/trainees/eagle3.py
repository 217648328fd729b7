"""EAGLE-3.1 in training: the serving network, unrolled over its own drafts (drafting/unrolled.py).

Source: Li et al., EAGLE-3, arXiv:2503.01840, section 3; vLLM Speculators for the norms of 3.1. Legend: T packed tokens,
R rows, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.differentiable import (
    Rope,
    Weights,
    draft_config,
    fresh_fusion,
    fresh_layers,
    random_matrix,
    tap_norm,
    unsure_norm,
)
from outrider.drafting.speculators import layer_table, speculators_keys
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss, spread_taps
from outrider.drafting.unrolled import Rows, Unrolled, UnrolledLayer, unrolled_loss
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
        tensors["norm.weight"] = unsure_norm(self._teacher)
        tensors["fc.weight"] = fresh_fusion(len(self.taps), width)
        return tensors | {f"fc_norm.{index}.weight": tap_norm(self._teacher) for index in range(len(self.taps))}

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Summed over rows and steps, later steps weighted less; to be divided by the number of rows."""
        rows = Rows(batch)
        if not len(rows.index):
            return TrainingLoss.of_nothing(self._config.ttt_steps)
        weights = {name: tensor.to(self._teacher.dtype) for name, tensor in self.parameters.items()}
        states = self._combine(batch, weights)
        layer = UnrolledLayer(self._model, self._rope, weights, _LAYER, "norm.weight", partial(self._enter, weights))
        step = Unrolled(layer, rows, states).step
        return unrolled_loss(self._config, self._teacher, rows, states[rows.index], step, self._teacher.head)

    def _enter(self, weights: Weights, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [R, 2 D], and the residual [R, D]: the normed state."""
        eps = self._model.rms_norm_eps
        embedded = reference_rms_norm(self._teacher.embedding[ids], weights[_LAYER + "input_layernorm.weight"], eps)
        normed = reference_rms_norm(hidden, weights[_LAYER + "hidden_norm.weight"], eps)
        return torch.cat([embedded, normed], dim=1), normed

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
