"""Losses against their formulas in double precision, and the slice-by-slice road against all rows at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider import losses

ROWS, VOCAB, WIDTH = 13, 11, 6


def rows(seed: int = 0, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits [R, V] and a teacher's distribution [R, V]."""
    generator = torch.Generator().manual_seed(seed)
    student = scale * torch.randn(ROWS, VOCAB, generator=generator)
    return student, torch.softmax(scale * torch.randn(ROWS, VOCAB, generator=generator), dim=-1)


def log_q(student: Tensor, row: int, entry: int) -> float:
    """The logarithm of a softmax, one number at a time."""
    logits = student[row].tolist()
    return float(logits[entry] - math.log(math.fsum(math.exp(x) for x in logits)))


def test_soft_cross_entropy_is_its_sum() -> None:
    student, probs = rows()
    expected = [-math.fsum(float(probs[row, v]) * log_q(student, row, v) for v in range(VOCAB)) for row in range(ROWS)]
    assert losses.soft_cross_entropy(student, probs).tolist() == pytest.approx(expected, rel=1e-5)


def test_soft_cross_entropy_pulls_the_student_to_the_teacher() -> None:
    """Its gradient is q - p, so it is nothing exactly where both agree."""
    student, probs = rows()
    student.requires_grad_()
    (grad,) = torch.autograd.grad(losses.soft_cross_entropy(student, probs).sum(), student)
    assert torch.allclose(grad, student.softmax(-1) - probs, atol=1e-6)
    (none,) = torch.autograd.grad(losses.soft_cross_entropy(student, student.softmax(-1).detach()).sum(), student)
    assert float(none.abs().max()) < 1e-6


def test_total_variation_is_the_chance_of_a_rejection() -> None:
    student, probs = rows()
    found = losses.total_variation(student, probs)
    expected = [
        1 - math.fsum(min(float(probs[row, v]), math.exp(log_q(student, row, v))) for v in range(VOCAB))
        for row in range(ROWS)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert float(losses.total_variation(probs.log(), probs).max()) < 1e-6
    apart = torch.eye(VOCAB)
    assert losses.total_variation(1000 * apart, apart.roll(1, dims=0)).tolist() == pytest.approx([1.0] * VOCAB)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_total_variation_is_between_nothing_and_one(scale: float) -> None:
    student, probs = rows(1, scale=scale)
    found = losses.total_variation(student, probs)
    assert float(found.min()) >= 0 and float(found.max()) <= 1 + 1e-6


def test_confidence_learns_the_acceptance_and_leaves_it_alone() -> None:
    confidence = torch.linspace(-4, 4, ROWS).requires_grad_()
    acceptance = torch.linspace(0, 1, ROWS).requires_grad_()
    loss = losses.confidence_loss(confidence, acceptance)
    sure = [1 / (1 + math.exp(-x)) for x in confidence.tolist()]
    pairs = zip(sure, acceptance.tolist(), strict=True)
    expected = [-a * math.log(s) - (1 - a) * math.log(1 - s) for s, a in pairs]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)
    loss.sum().backward()
    assert acceptance.grad is None
    assert confidence.grad is not None
    assert torch.allclose(confidence.grad, torch.sigmoid(confidence.detach()) - acceptance.detach(), atol=1e-6)


def test_later_drafts_weigh_less() -> None:
    assert losses.decay_weights(4, 2.5).tolist() == pytest.approx([1, math.exp(-0.4), math.exp(-0.8), math.exp(-1.2)])


def weighted(states: Tensor, probs: Tensor, head: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A loss as a method writes one: two kinds of rows, two weights, two sums to report."""
    logits = (states @ head.T) * scale
    agreed = (logits.argmax(-1) == probs.argmax(-1)).sum().float()
    return losses.soft_cross_entropy(logits, probs).sum(), torch.stack([agreed, states.detach().sum()])


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    return [states, rows(5)[1].double(), head, torch.tensor(1.5, dtype=torch.float64)]


SIZES = [1, 4, 12, ROWS, 50]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sought", [(0, 2, 3), (0,), (2,), (1, 3)])
def test_slices_give_the_loss_and_every_gradient_of_the_whole(size: int, sought: tuple[int, ...]) -> None:
    plain, sliced = inputs(), inputs()
    for tensors in (plain, sliced):
        for index in sought:
            tensors[index].requires_grad_()
    loss, sums = weighted(*plain)
    (3 * loss).backward()
    found, reported = losses.chunked(weighted, sliced[:2], sliced[2:], chunk_rows=size)
    (3 * found).backward()
    assert torch.allclose(found, loss) and torch.allclose(reported, sums) and not reported.requires_grad
    for index, (ours, theirs) in enumerate(zip(sliced, plain, strict=True)):
        assert (ours.grad is not None) == (index in sought)
        if ours.grad is not None:
            assert theirs.grad is not None and torch.allclose(ours.grad, theirs.grad)


@pytest.mark.parametrize("size", SIZES)
def test_slices_give_the_same_numbers_without_gradients(size: int) -> None:
    tensors = inputs()
    tensors[0].requires_grad_()
    with torch.no_grad():
        loss, sums = losses.chunked(weighted, tensors[:2], tensors[2:], chunk_rows=size)
        expected = weighted(*tensors)
    assert torch.allclose(loss, expected[0]) and torch.allclose(sums, expected[1]) and not loss.requires_grad


@pytest.mark.parametrize("grad", [True, False])
def test_no_rows_cost_nothing_and_report_as_many_sums(grad: bool) -> None:
    tensors = [tensor[:0] if index < 2 else tensor for index, tensor in enumerate(inputs())]
    tensors[2].requires_grad_()
    with torch.set_grad_enabled(grad):
        loss, sums = losses.chunked(weighted, tensors[:2], tensors[2:])
    assert float(loss.detach()) == 0 and sums.tolist() == [0, 0]
    if grad:
        loss.backward()
        assert tensors[2].grad is not None and not tensors[2].grad.any()


def test_slices_of_slices_add_their_gradients() -> None:
    """Autograd reaches what rows and weights were made of, also where a tensor is used twice."""
    plain, sliced = inputs(), inputs()
    for tensors in (plain, sliced):
        tensors[2].requires_grad_()
    for _ in range(2):
        weighted(plain[0], plain[1], plain[2] * 2, plain[3])[0].backward()
    for _ in range(2):
        loss, _ = losses.chunked(weighted, sliced[:2], [sliced[2] * 2, sliced[3]], chunk_rows=5)
        loss.backward()
    assert sliced[2].grad is not None and plain[2].grad is not None
    assert torch.allclose(sliced[2].grad, plain[2].grad)
