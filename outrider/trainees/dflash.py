"""DFlash in training: every draft of a block learns the teacher's distribution at its place, the first ones most.

The network is `drafting/block_training.py`. Source: z-lab DFlash; the weights are DeepSpec's. Legend: A anchors, B
block rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafting.block_training import Anchors, BlockNetwork
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss
from outrider.losses import chunked, decay_weights, soft_cross_entropy


class DFlashTrainee:
    """The block network and the target's own output rows."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        self._network, self._config, self._teacher = BlockNetwork(config, teacher), config, teacher
        self.taps = self._network.taps
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in self._network.fresh().items()}

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Soft cross-entropy, weighted by place; to be divided by the sum of the weights."""
        config, teacher = self._config, self._teacher
        weights = {name: tensor.to(teacher.dtype) for name, tensor in self.parameters.items()}
        anchors = Anchors.draw(batch, config.anchors / config.block_size, config.block_size, generator)
        if not len(anchors.index):
            return TrainingLoss.of_nothing(config.block_size - 1)
        states = self._network.states(batch, anchors, weights)
        kept = (anchors.targets >= 0) & teacher.is_drafted[batch.ids[anchors.targets.clamp(min=0)]]
        places = torch.nonzero(kept)[:, 1]
        decay = decay_weights(config.block_size - 1, config.position_decay)[places]
        probs = teacher.probs(batch, anchors.targets[kept] - 1)
        onehot = torch.nn.functional.one_hot(places, config.block_size - 1).float()
        total, agreed = chunked(_row_losses, [states[kept], probs, decay, onehot], [teacher.head])
        return TrainingLoss(total, float(decay.sum()), agreed, onehot.sum(dim=0))

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """DFlash in the Speculators format, without the target's embedding."""
        tensors = {name: tensor.detach() for name, tensor in self.parameters.items()}
        return self._network.table("dflash", "DFlashSpeculator"), tensors | self._teacher.ends()


def _row_losses(states: Tensor, probs: Tensor, decay: Tensor, onehot: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted sum, rows that agree with the teacher by place [B-1])."""
    logits, wide = (states @ head.T).float(), probs.float()
    agreed = (logits.argmax(-1) == wide.argmax(-1)).float()
    return (decay * soft_cross_entropy(logits, wide)).sum(), agreed @ onehot
