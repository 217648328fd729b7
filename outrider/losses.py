"""Training objectives as pure functions of logits, and the one way to take them over rows without holding all logits.

A loss here gives one number a row; who trains decides which rows count and how much. `chunked` is the fast road:
it computes any of them slice by slice together with its gradient, so that logits never exist for more than a slice;
calling the same function on all rows at once is the plain reference. Not here: which rows and teachers a method has
(the leaves in drafters). Sources: Li et al., EAGLE-3, arXiv:2503.01840; DeepSpec; vLLM Speculators' loss names.
Legend: R rows, V drafted vocabulary; student and teacher are logits [R, V] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LossFunction = Callable[..., tuple[Tensor, Tensor]]
"""From slices of row-wise tensors and whole weights to (sum of the loss, a vector of sums to report)."""


def soft_cross_entropy(student: Tensor, teacher_probs: Tensor) -> Tensor:
    """-sum p log q for each row [R], p being the teacher's probabilities; its gradient is KL(p || q)'s."""
    return torch.logsumexp(student, dim=-1) - (teacher_probs * student).sum(dim=-1)


def total_variation(student: Tensor, teacher_probs: Tensor) -> Tensor:
    """Half the L1 distance of the two distributions for each row [R]: the chance that a sampled draft is rejected."""
    return 0.5 * (student.softmax(dim=-1) - teacher_probs).abs().sum(dim=-1)


def confidence_loss(confidence: Tensor, acceptance: Tensor) -> Tensor:
    """Binary cross-entropy [R] of a confidence's logit against how likely acceptance is; no gradient to the latter."""
    return torch.nn.functional.binary_cross_entropy_with_logits(confidence, acceptance.detach(), reduction="none")


def decay_weights(count: int, scale: float) -> Tensor:
    """exp(-k / scale) for k = 0 to count - 1: later drafts matter less, being reached less often."""
    return torch.exp(-torch.arange(count, dtype=torch.float32) / scale)


def chunked(
    function: LossFunction, rows: Sequence[Tensor], weights: Sequence[Tensor], *, chunk_rows: int = 256
) -> tuple[Tensor, Tensor]:
    """(loss, sums) of a function that is a sum over rows, slice by slice, with gradients for rows and weights.

    rows: tensors [R, ...] that are sliced alike. weights: tensors that every slice reads whole. Equals
    `function(*rows, *weights)` up to rounding. Cost: the same products, memory for one slice.
    """
    if not torch.is_grad_enabled():
        return _sums(function, rows, weights, chunk_rows)
    taken: tuple[Tensor, Tensor] = _Chunked.apply(function, chunk_rows, len(rows), *rows, *weights)  # type: ignore[no-untyped-call]
    return taken


def _sums(
    function: LossFunction, rows: Sequence[Tensor], weights: Sequence[Tensor], size: int
) -> tuple[Tensor, Tensor]:
    parts = [function(*(row[first : first + size] for row in rows), *weights) for first in _firsts(rows, size)]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([sums for _, sums in parts]).sum(dim=0)


def _firsts(rows: Sequence[Tensor], size: int) -> range:
    """Where slices begin; no rows are one empty slice, which says how many sums there are."""
    return range(0, max(1, len(rows[0])), size)


class _Chunked(torch.autograd.Function):
    """Gradients are taken while a slice's logits are there, and scaled when autograd asks for them."""

    @staticmethod
    def forward(ctx: Any, function: LossFunction, size: int, num_rows: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = tensors[:num_rows], tensors[num_rows:]
        wanted = ctx.needs_input_grad[3:]
        grads: list[Tensor | None] = [torch.zeros_like(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
        total: Tensor | float = 0.0
        reported: Tensor | float = 0.0
        for first in _firsts(rows, size):
            inputs = [row[first : first + size].detach() for row in rows] + [weight.detach() for weight in weights]
            sought = [tensor.requires_grad_() for tensor, needed in zip(inputs, wanted, strict=True) if needed]
            with torch.enable_grad():
                loss, sums = function(*inputs)
                found = iter(torch.autograd.grad(loss, sought))
            for index, grad in enumerate(grads):
                if grad is not None:
                    part = grad[first : first + size] if index < num_rows else grad
                    part += next(found)
            total, reported = total + loss.detach(), reported + sums.detach()
        ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        ctx.wanted = wanted
        sums_out = torch.as_tensor(reported)
        ctx.mark_non_differentiable(sums_out)
        return torch.as_tensor(total), sums_out

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        scaled = [next(saved) * outputs[0] if needed else None for needed in ctx.wanted]
        return (None, None, None, *scaled)
