"""DSpark in training: DFlash's block, the Markov correction taught with the true token before, and the confidence.

The loss of a draft is a mix of cross-entropy, total variation (the chance of a rejection), and the confidence head's
error about that chance. The network is `drafting/block_training.py`. Source: DeepSpec `deepspec/modeling/dspark`
(weights 0.1, 0.9 on the L1 distance, 1). Legend: A anchors, B block rows, R drafts that count, D width, r Markov rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafting.block_training import Anchors, BlockNetwork
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss
from outrider.losses import chunked, confidence_loss, decay_weights, soft_cross_entropy, total_variation

_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_CONFIDENCE = "confidence_head.proj."
_CROSS_ENTROPY, _DISTANCE, _CONFIDENCE_SHARE = 0.1, 2 * 0.9, 1.0


class DSparkTrainee:
    """The block network, the target's own output rows, and two small heads."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        self._network, self._config, self._teacher = BlockNetwork(config, teacher), config, teacher
        self.taps = self._network.taps
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in self._fresh().items()}

    def _fresh(self) -> dict[str, Tensor]:
        teacher, rank = self._teacher, self._config.markov_rank
        width = teacher.config.hidden_size
        return self._network.fresh() | {
            _W1: _principal(teacher.embedding.float(), rank),
            # No correction at first, so that a backbone that knows nothing of it starts undisturbed.
            _W2: torch.zeros(len(teacher.draft_ids), rank),
            _CONFIDENCE + "weight": torch.zeros(1, width + rank),
            _CONFIDENCE + "bias": torch.zeros(1),
        }

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Weighted by place; to be divided by the sum of the weights."""
        config, teacher = self._config, self._teacher
        weights = {name: tensor.to(teacher.dtype) for name, tensor in self.parameters.items() if name != _W1}
        anchors = Anchors.draw(batch, config.anchors / config.block_size, config.block_size, generator)
        if not len(anchors.index):
            return TrainingLoss.of_nothing(config.block_size - 1)
        states = self._network.states(batch, anchors, weights)
        kept = (anchors.targets >= 0) & teacher.is_drafted[batch.ids[anchors.targets.clamp(min=0)]]
        targets, states = anchors.targets[kept], states[kept]
        # Only the rows that are looked up are cast: the table has one for every token of the target.
        before = torch.nn.functional.embedding(batch.ids[targets - 1], self.parameters[_W1]).to(teacher.dtype)
        confidence = torch.cat([states, before], dim=1).float() @ self.parameters[_CONFIDENCE + "weight"][0]
        confidence = confidence + self.parameters[_CONFIDENCE + "bias"]
        places = torch.nonzero(kept)[:, 1]
        decay = decay_weights(config.block_size - 1, config.position_decay)[places]
        onehot = torch.nn.functional.one_hot(places, config.block_size - 1).float()
        rows = [states, before, teacher.probs(batch, targets - 1), torch.stack([confidence, decay], dim=1), onehot]
        total, agreed = chunked(_row_losses, rows, [weights[_W2], teacher.head])
        return TrainingLoss(total, float(decay.sum()), agreed, onehot.sum(dim=0))

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """DSpark in the Speculators format, without the target's embedding."""
        config = self._network.table("dspark", "DSparkSpeculator") | {
            "markov_rank": self._config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        tensors = {name: tensor.detach() for name, tensor in self.parameters.items()}
        return config, tensors | self._teacher.ends()


def _row_losses(
    states: Tensor, before: Tensor, probs: Tensor, numbers: Tensor, onehot: Tensor, *matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """(weighted sum, rows that agree with the teacher by place [B-1]); `numbers` [R, 2]: confidence and weight."""
    (correction, head), (confidence, decay) = matrices, numbers.unbind(dim=1)
    logits, wide = (states @ head.T).float() + (before @ correction.T).float(), probs.float()
    distance = total_variation(logits, wide)
    loss = _CROSS_ENTROPY * soft_cross_entropy(logits, wide) + _DISTANCE * distance
    loss = loss + _CONFIDENCE_SHARE * confidence_loss(confidence, 1 - distance)
    agreed = (logits.argmax(-1) == wide.argmax(-1)).float()
    return (decay * loss).sum(), agreed @ onehot


def _principal(table: Tensor, rank: int) -> Tensor:
    """The table's rows along its principal directions [V, r], of unit size: tokens alike start out alike."""
    centred = table - table.mean(dim=0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    reduced = centred @ directions[:, -rank:]
    scaled: Tensor = reduced / reduced.std()
    return scaled
