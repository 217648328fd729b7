"""A multi-token prediction module in training, for a target that came without one: Qwen3.5's layout, unrolled.

What is trained is a module as a target's checkpoint holds it (`mtp.*`), with rows of the target's output matrix for
what it drafts; the loop over its own drafts is drafting/unrolled.py's. Sources: Gloeckle et al., arXiv:2404.19737;
DeepSeek-V3, arXiv:2412.19437; vLLM 0.32 `qwen3_5_mtp.py`. Legend: R rows, D width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.differentiable import UNSURE, Rope, Weights, fresh_fusion, fresh_layers
from outrider.drafting.speculators import layer_table
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss
from outrider.drafting.unrolled import Rows, Unrolled, UnrolledLayer, unrolled_loss
from outrider.models.layers import reference_rms_norm

_LAYER = "mtp.layers.0."


class MtpTrainee:
    """One layer of the target's own shape over its last state, normed; embedding and output matrix are the target's."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        teacher.expect_layers("mtp")
        self._config, self._teacher = config, teacher
        self.taps: tuple[int, ...] = (teacher.config.num_layers,)
        self._model = replace(teacher.config, num_layers=1, sliding_window=None)
        self._rope = Rope(self._model, config.max_len + config.ttt_steps)
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in self._fresh().items()}

    def _fresh(self) -> dict[str, Tensor]:
        width = self._model.hidden_size
        layer = fresh_layers(self._teacher, self._model, self._config.init, adds=0)
        return {f"mtp.{name}": tensor for name, tensor in layer.items()} | {
            "mtp.fc.weight": fresh_fusion(2, width),
            "mtp.pre_fc_norm_embedding.weight": torch.ones(width),
            "mtp.pre_fc_norm_hidden.weight": torch.ones(width),
            "mtp.norm.weight": self._teacher.norm_weight * UNSURE,
        }

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Summed over rows and steps, later steps weighted less; to be divided by the number of rows."""
        rows = Rows(batch)
        if not len(rows.index):
            return TrainingLoss.of_nothing(self._config.ttt_steps)
        teacher = self._teacher
        weights = {name: tensor.to(teacher.dtype) for name, tensor in self.parameters.items()}
        last = batch.taps[self.taps[0]]
        states = reference_rms_norm(last, teacher.norm_weight, self._model.rms_norm_eps)
        enter = partial(self._enter, weights)
        layer = UnrolledLayer(self._model, self._rope, weights, _LAYER, "mtp.norm.weight", enter)
        step = Unrolled(layer, rows, states).step
        return unrolled_loss(self._config, teacher, rows, states[rows.index], step, teacher.head)

    def _enter(self, weights: Weights, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [R, D], and the residual [R, D]."""
        eps = self._model.rms_norm_eps
        embedding = weights["mtp.pre_fc_norm_embedding.weight"]
        embedded = reference_rms_norm(self._teacher.embedding[ids], embedding, eps)
        normed = reference_rms_norm(hidden, weights["mtp.pre_fc_norm_hidden.weight"], eps)
        residual = torch.cat([embedded, normed], dim=1) @ weights["mtp.fc.weight"].T
        return reference_rms_norm(residual, weights[_LAYER + "input_layernorm.weight"], eps), residual

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The target's config with the key that says how many modules there are, and the module's tensors alone."""
        config = layer_table(self._teacher.config) | {
            "architectures": list(self._teacher.architectures),
            "model_type": self._teacher.config.model_type,
            "mtp_num_hidden_layers": 1,
            "draft_vocab_size": len(self._teacher.draft_ids),
        }
        ends = {f"mtp.{name}": tensor for name, tensor in self._teacher.ends().items()}
        return config, {name: tensor.detach() for name, tensor in self.parameters.items()} | ends
