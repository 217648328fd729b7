"""Every proposal that vLLM 0.32 recorded for a MiMo checkpoint's own module, made again by ours from the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.replay import VECTORS, Replay

CASE = VECTORS / "mtp_mimo"
pytestmark = pytest.mark.skipif(not CASE.is_dir(), reason=f"the recorded runs are not at {VECTORS}")


def test_every_recorded_proposal_is_reproduced() -> None:
    recorded = list(Replay.open(CASE).run())
    assert [item.name for item in recorded if item.differs] == []
    assert len(recorded) == 40


def test_every_recorded_logit_is_reproduced() -> None:
    replay, heard, worst = Replay.open(CASE), list[Tensor](), 0.0
    drafter: Any = replay.drafter
    network, logits = drafter._loop._network, drafter._loop._network.logits

    def listen(states: Tensor) -> Tensor:
        heard.append(logits(states))
        return heard[-1]

    network.logits = listen
    for item in replay.run():
        for step, rows in enumerate(heard[-replay.num_tokens :]):
            found = rows[item.record["batch_index"], torch.tensor(item.record["top3_ids"][step])]
            worst = max(worst, float((found - torch.tensor(item.record["top3_logits"][step])).abs().max()))
    assert worst < 3e-5
