"""Conversations too short to teach anything: they add nothing, and stop no step."""

from __future__ import annotations

import pytest
import torch

from outrider.drafting import registry
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, Trainee, TrainingBatch, TrainingLoss
from tests.kit import tiny

LAYERS = range(3)


def trainee_of(method: str, *, drafted: int = tiny.VOCAB) -> Trainee:
    """A network that drafts the last `drafted` ids."""
    target = tiny.tiny_config()
    ids = torch.arange(tiny.VOCAB - drafted, tiny.VOCAB)
    teacher = Teacher(target, tiny.tiny_tensors(0, target), ids, dtype=torch.float32, name="tiny")
    torch.manual_seed(0)
    config = TrainConfig(block_size=4, ttt_steps=3, anchors=100, max_len=64, markov_rank=4)
    trainee = registry.trainee(method)(config, teacher)
    for parameter in trainee.parameters.values():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return trainee


def batch(*conversations: tuple[int, int], first_id: int = 30) -> TrainingBatch:
    """Conversations of so many prompt and response tokens."""
    lengths = [prompt + response for prompt, response in conversations]
    generator = torch.Generator().manual_seed(1)
    marks = [torch.arange(prompt + response) >= prompt for prompt, response in conversations]
    starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    taps = {layer: torch.randn(sum(lengths), tiny.WIDTH, generator=generator) for layer in LAYERS}
    return TrainingBatch(first_id + torch.arange(sum(lengths)), torch.cat(marks), taps, starts)


def numbers(loss: TrainingLoss) -> list[float]:
    return [float(loss.total.detach()), loss.weight, *loss.agreed.tolist(), *loss.counted.tolist()]


@pytest.mark.parametrize("method", registry.trainable())
@pytest.mark.parametrize("response", [1, 2])
def test_short_responses_alone_are_a_step_without_a_loss(method: str, response: int) -> None:
    trainee = trainee_of(method)
    loss = trainee.loss(batch((4, 1), (3, min(response, 1))), torch.Generator())
    assert set(numbers(loss)) == {0.0}
    loss.total.backward()
    assert not any(p.grad is not None and p.grad.any() for p in trainee.parameters.values())


@pytest.mark.parametrize("method", registry.trainable())
def test_short_responses_add_nothing_to_others(method: str) -> None:
    trainee = trainee_of(method)
    alone = trainee.loss(batch((5, 9)), torch.Generator())
    mixed = batch((5, 9), (3, 1))
    # The same states for the conversation that counts.
    mixed.taps.update({layer: torch.cat([states, states[:4]]) for layer, states in batch((5, 9)).taps.items()})  # type: ignore[attr-defined]
    together = trainee.loss(mixed, torch.Generator())
    assert numbers(together) == pytest.approx(numbers(alone), rel=1e-5)
    assert alone.weight > 0


@pytest.mark.parametrize("method", registry.trainable())
def test_responses_of_tokens_that_cannot_be_drafted_have_no_loss(method: str) -> None:
    trainee = trainee_of(method, drafted=10)
    loss = trainee.loss(batch((5, 9), first_id=10), torch.Generator())
    assert set(numbers(loss)) == {0.0}
    loss.total.backward()
