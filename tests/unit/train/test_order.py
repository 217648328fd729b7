"""The order of a run: every conversation once an epoch, whoever asks, and batches that hold what they name."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from outrider.train.capture import Shard
from outrider.train.order import Order, Step, batch_of

SHARD = 8
LENGTHS = np.random.default_rng(0).integers(1, 60, 43).tolist()


def order(*, seed: int = 0, epochs: float = 1.0, batch_tokens: int = 64, lengths: list[int] = LENGTHS) -> Order:
    return Order(lengths, shard_len=SHARD, batch_tokens=batch_tokens, epochs=epochs, seed=seed)


def plan(found: Order, first: int, count: int) -> list[Step]:
    return [found.step(number) for number in range(first, first + count)]


def seen(steps: list[Step]) -> Counter[int]:
    """How often each conversation is in these steps, by its number in the corpus."""
    return Counter(step.shard * SHARD + member for step in steps for member in step.members)


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 500, 10**6])
def test_every_conversation_once_an_epoch(batch_tokens: int) -> None:
    found = order(epochs=3, batch_tokens=batch_tokens)
    length, rest = divmod(found.num_steps, 3)
    assert rest == 0
    for epoch in range(3):
        assert seen(plan(found, epoch * length, length)) == Counter(range(len(LENGTHS)))


def test_a_run_may_end_within_an_epoch() -> None:
    length = order().num_steps
    assert order(epochs=0.5).num_steps == round(length / 2)
    assert order(epochs=1e-4).num_steps == 1
    part = seen(plan(order(epochs=1.5), length, round(length / 2)))
    assert 0 < len(part) < len(LENGTHS) and set(part.values()) == {1}


def test_the_order_is_the_seed_s_and_the_epoch_s() -> None:
    length = order().num_steps
    first = plan(order(), 0, length)
    assert plan(order(epochs=7), 0, length) == first
    assert plan(order(seed=1), 0, length) != first
    assert plan(order(epochs=2), length, length) != first


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    straight = plan(order(epochs=3), 0, order(epochs=3).num_steps)
    found = order(epochs=3)
    for number in (len(straight) - 1, 0, len(straight) // 2, 1, 0):
        assert found.step(number) == straight[number]
        assert order(epochs=3).step(number) == straight[number]


def test_steps_of_a_shard_follow_each_other() -> None:
    """So that an epoch reads each shard once."""
    found = order(batch_tokens=40)
    shards = [step.shard for step in plan(found, 0, found.num_steps)]
    changes = sum(one != other for one, other in zip(shards, shards[1:], strict=False))
    assert changes + 1 == len(set(shards)) == -(-len(LENGTHS) // SHARD)
    assert shards != sorted(shards)


def test_steps_hold_about_as_many_tokens_as_asked() -> None:
    """Within the longest conversation of the target, and on it on average."""
    lengths = np.random.default_rng(1).integers(1, 20, 64).tolist()
    found = Order(lengths, shard_len=32, batch_tokens=60, epochs=1, seed=0)
    sizes = [
        sum(lengths[step.shard * 32 + member] for member in step.members) for step in plan(found, 0, found.num_steps)
    ]
    assert all(abs(size - 60) <= 20 + 10 for size in sizes)
    assert np.mean(sizes) == pytest.approx(60, rel=0.1)


def test_one_long_conversation_leaves_no_step_empty() -> None:
    lengths = [500, 1, 1, 1]
    found = order(lengths=lengths, batch_tokens=100)
    steps = plan(found, 0, found.num_steps)
    assert all(step.members for step in steps) and seen(steps) == Counter(range(4))


def shard() -> Shard:
    """Three conversations of 3, 5 and 2 tokens; the state of layer l at token t is (t, l)."""
    ids = torch.arange(100, 110)
    taps = torch.stack([torch.arange(10)[:, None].expand(10, 3), torch.arange(3).expand(10, 3)], dim=2).float()
    return Shard(ids, ids % 2 == 0, taps, (0, 3, 8, 10))


def test_a_batch_packs_the_conversations_it_names() -> None:
    batch = batch_of(shard(), (2, 0), (1, 4, 6), torch.float64)
    assert batch is not None and batch.taps[4].dtype is torch.float64
    places = [8, 9, 0, 1, 2]
    assert batch.ids.tolist() == [100 + place for place in places]
    assert batch.is_response.tolist() == [place % 2 == 0 for place in places]
    assert batch.starts == (0, 2, 5)
    assert {layer: states.tolist() for layer, states in batch.taps.items()} == {
        layer: [[place, index] for place in places] for index, layer in enumerate((1, 4, 6))
    }


def test_no_conversations_are_no_batch() -> None:
    assert batch_of(shard(), (), (1, 4, 6), torch.float32) is None
