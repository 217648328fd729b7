"""A fresh block drafter already reads the places next to it, which with few examples would take long to find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.drafting.block_training import Anchors, BlockNetwork
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch
from tests.kit import tiny

LENGTH, ANCHOR, BLOCK = 40, 30, 4


def network(num_kv_heads: int | None) -> BlockNetwork:
    target = tiny.tiny_config(num_heads=6, num_kv_heads=2, head_dim=64)
    teacher = Teacher(target, tiny.tiny_tensors(0, target), torch.arange(tiny.VOCAB), dtype=torch.float32, name="tiny")
    torch.manual_seed(0)
    return BlockNetwork(TrainConfig(block_size=BLOCK, num_kv_heads=num_kv_heads, max_len=64), teacher)


def states(net: BlockNetwork, taps: dict[int, Tensor], ids: Tensor) -> Tensor:
    batch = TrainingBatch(ids, torch.ones(LENGTH, dtype=torch.bool), taps, (0, LENGTH))
    anchors = Anchors(torch.tensor([ANCHOR]), ((0, 1),), torch.full((1, BLOCK - 1), -1))
    return net.states(batch, anchors, net.fresh())[0]


@pytest.mark.parametrize("num_kv_heads", [None, 1, 6])
def test_fresh_drafts_hang_on_the_last_context_row_and_the_anchor(num_kv_heads: int | None) -> None:
    net = network(num_kv_heads)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, tiny.VOCAB, (LENGTH,), generator=generator)
    taps = {layer: torch.randn(LENGTH, tiny.WIDTH, generator=generator) for layer in range(3)}

    def moved(place: int) -> Tensor:
        """How far the drafts move when a context row is another."""
        others = {layer: rows.clone() for layer, rows in taps.items()}
        for rows in others.values():
            rows[place] = torch.randn(tiny.WIDTH, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(3)
        changed = states(net, others, ids)
        torch.manual_seed(3)
        return (changed - states(net, taps, ids)).norm(dim=1)

    near, far = moved(ANCHOR - 1), moved(ANCHOR - 15)
    assert (near > 3 * far).all(), (near, far)
