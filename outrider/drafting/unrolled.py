"""Training a drafter over its own drafts: rows that stand one token further on in each step ("training-time test").

Row p holds the target's state at p and the token after it; it is to give the distribution after the next token. In step
k every row stands k tokens further on and reads what it gave in step k-1 in place of the target's state: what serving
does when draft k+1 comes due. Rows are those that can follow a round: a response token that is known, and one to draft.
Not here: the networks (trainees). Source: Li et al., EAGLE-3, arXiv:2503.01840, section 3. Legend: T packed tokens, R
rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafting.differentiable import Extra, Rope, Weights, attend, gated_mlp
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss
from outrider.losses import chunked, soft_cross_entropy
from outrider.models.arch import ModelConfig
from outrider.models.layers import reference_rms_norm

Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From what the rows read [R, D] and the step's number to (what the head scores, what the next step reads)."""
Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From ids [R] and what stands for the target's state [R, D] to (what attention reads, the residual [R, D])."""


class Rows:
    """The rows of a batch that learn: `index` [R] into its tokens, `spans` where each conversation's lie among them."""

    def __init__(self, batch: TrainingBatch) -> None:
        """Row p counts if token p+1 is the target's own, hence known when drafting, and token p+2 as well."""
        found, ends, count = [], [], 0
        self.batch, self.spans = batch, list[tuple[int, int]]()
        for first, end in zip(batch.starts, batch.starts[1:], strict=False):
            mask = batch.is_response[first:end]
            rows = torch.nonzero(mask[1:-1] & mask[2:])[:, 0] + first
            found.append(rows)
            ends.append(torch.full_like(rows, end))
            self.spans.append((count, count + len(rows)))
            count += len(rows)
        self.index, self._ends = torch.cat(found), torch.cat(ends)
        firsts, lengths = torch.tensor(batch.starts[:-1]), torch.tensor(batch.starts).diff()
        self.positions = torch.arange(len(batch.ids)) - firsts.repeat_interleave(lengths)

    def ahead(self, distance: int) -> Tensor:
        """The ids [R] that many tokens after each row; past the end of all, the last one."""
        return self.batch.ids[(self.index + distance).clamp(max=len(self.batch.ids) - 1)]

    def reaching(self, distance: int, is_drafted: Tensor) -> Tensor:
        """The rows [R'] from which every token up to that distance is the target's own, and the last one draftable."""
        kept = self.index + distance < self._ends
        for further in range(2, distance + 1):
            kept &= self.batch.is_response[(self.index + further).clamp(max=len(self.batch.ids) - 1)]
        return torch.nonzero(kept & is_drafted[self.ahead(distance)])[:, 0]

    def conversations(self) -> list[tuple[slice, slice]]:
        """For each conversation, its tokens in the batch and its rows."""
        bounds = zip(self.batch.starts, self.batch.starts[1:], strict=False)
        return [(slice(*bound), slice(*span)) for bound, span in zip(bounds, self.spans, strict=True)]


def unrolled_loss(
    config: TrainConfig, teacher: Teacher, rows: Rows, hidden: Tensor, step: Step, head: Tensor
) -> TrainingLoss:
    """Cross-entropy summed over rows and steps, later steps weighted less; to be divided by the number of rows.

    `hidden` [R, D]: what the rows read first; `head` [Vd, Dh]: rows that score the drafted vocabulary.
    """
    total = torch.zeros((), requires_grad=True)
    agreed, counted = torch.zeros(config.ttt_steps), torch.zeros(config.ttt_steps)
    for number in range(config.ttt_steps):
        states, hidden = step(hidden, number)
        kept = rows.reaching(number + 2, teacher.is_drafted)
        if not len(kept):
            break
        # The token that step k drafts follows row p + k + 1, where the teacher says what it should be.
        probs = teacher.probs(rows.batch, rows.index[kept] + number + 1)
        loss, sums = chunked(_row_losses, [states[kept], probs], [head])
        total = total + config.ttt_decay**number * loss
        agreed[number], counted[number] = sums[0], len(kept)
    return TrainingLoss(total, float(counted[0]), agreed, counted)


def _row_losses(states: Tensor, probs: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the loss, [rows whose likeliest token is the teacher's])."""
    logits, wide = (states @ head.T).float(), probs.float()
    agreed = (logits.argmax(-1) == wide.argmax(-1)).sum().float()
    return soft_cross_entropy(logits, wide).sum(), agreed[None]


@dataclass(frozen=True)
class UnrolledLayer:
    """One decoder layer with a cache of its own, and a norm after it. `layer`: its tensors' prefix; `norm`: a name."""

    model: ModelConfig
    rope: Rope
    weights: Weights
    layer: str
    norm: str
    enter: Enter

    def heads(self, inputs: Tensor, name: str, count: int) -> Tensor:
        """One of its three projections [R, heads, E]."""
        return (inputs @ self.weights[f"{self.layer}self_attn.{name}_proj.weight"].T).view(len(inputs), count, -1)

    def key_value(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values [R, G, E]."""
        count = self.model.num_kv_heads
        return self.rope(self.heads(inputs, "k", count), positions), self.heads(inputs, "v", count)


class Unrolled:
    """A layer over one batch: a row sees the context's keys of step 0 up to its own, and its keys of later steps."""

    def __init__(self, layer: UnrolledLayer, rows: Rows, states: Tensor) -> None:
        """`states` [T, D]: the target's, as the drafter reads them."""
        self._layer, self._rows = layer, rows
        following = rows.batch.ids.roll(-1)
        self._keys, self._values = layer.key_value(layer.enter(following, states)[0], rows.positions)
        self._own: list[tuple[Tensor, Tensor]] = []

    def step(self, hidden: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """From what the rows read in place of states [R, D] to their normed output, which the next step reads too."""
        layer, weights, eps = self._layer, self._layer.weights, self._layer.model.rms_norm_eps
        inputs, residual = layer.enter(self._rows.ahead(1 + number), hidden)
        positions = self._rows.positions[self._rows.index] + number
        query = layer.rope(layer.heads(inputs, "q", layer.model.num_heads), positions)
        if number:
            self._own.append(layer.key_value(inputs, positions))
        residual = residual + self._attended(query) @ weights[layer.layer + "self_attn.o_proj.weight"].T
        normed = reference_rms_norm(residual, weights[layer.layer + "post_attention_layernorm.weight"], eps)
        residual = residual + gated_mlp(normed, weights, layer.layer + "mlp.")
        states = reference_rms_norm(residual, weights[layer.norm], eps)
        return states, states

    def _attended(self, query: Tensor) -> Tensor:
        parts = []
        for tokens, span in self._rows.conversations():
            seen = torch.arange(tokens.start, tokens.stop)[None] <= self._rows.index[span, None]
            extra = None
            if self._own:
                keys = torch.stack([key[span] for key, _ in self._own], dim=1)
                values = torch.stack([value[span] for _, value in self._own], dim=1)
                extra = Extra(keys, values)
            parts.append(attend(query[span], self._keys[tokens], self._values[tokens], seen, extra))
        return torch.cat(parts)
