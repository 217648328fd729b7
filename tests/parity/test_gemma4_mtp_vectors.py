"""Every proposal that vLLM 0.32 recorded for a Gemma 4 MTP drafter, made again by ours from the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.attention import Batch
from tests.kit.replay import VECTORS, Recorded, Replay

CASE = VECTORS / "gemma4_mtp_keqv"
NEAR_TIE = 1e-3
"""The recording and a float64 recomputation of it are this close here."""
pytestmark = pytest.mark.skipif(not CASE.is_dir(), reason=f"the recorded runs are not at {VECTORS}")


def differs(item: Recorded) -> bool:
    pairs = zip(item.ours, item.record["drafts"], item.record["margin"], strict=True)
    return next((margin >= NEAR_TIE for mine, theirs, margin in pairs if mine != theirs), False)


def test_every_recorded_proposal_is_reproduced() -> None:
    """The recording calls the method mtp, as vLLM does; what the drafter's folder holds says which it is."""
    recorded = list(Replay.open(CASE).run())
    assert [item.name for item in recorded if differs(item)] == []
    assert len(recorded) == 35


def test_every_recorded_logit_is_reproduced() -> None:
    replay, heard, worst = Replay.open(CASE), list[Tensor](), 0.0
    drafter: Any = replay.drafter
    head = drafter._head

    def listen(states: Tensor) -> Tensor:
        heard.append(head(states))
        return heard[-1]

    drafter._head = listen
    for item in replay.run():
        for step, rows in enumerate(heard[-replay.num_tokens :]):
            found = rows[item.record["batch_index"], torch.tensor(item.record["top3_ids"][step])]
            worst = max(worst, float((found - torch.tensor(item.record["top3_logits"][step])).abs().max()))
    assert worst < 2e-4


MOVES: dict[str, Callable[[Batch], Batch]] = {
    "another position": lambda batch: replace(batch, positions=batch.positions + 1),
    "a row less to see": lambda batch: replace(batch, ends=batch.ends - 1),
}


@pytest.mark.parametrize("name", MOVES)
def test_the_recording_tells_where_drafts_stand(name: str) -> None:
    """Rows that stand at P + 1, as transformers has it, or do not see row P, draft otherwise."""
    replay = Replay.open(CASE)
    drafter: Any = replay.drafter
    last_rows = drafter._last_rows
    drafter._last_rows = lambda *what: MOVES[name](last_rows(*what))
    assert any(differs(item) for item in replay.run())


def test_a_position_that_moves_on_drafts_otherwise() -> None:
    """Every draft of a round stands at P; the loop of other drafters goes one further for each."""
    replay = Replay.open(CASE)
    drafter: Any = replay.drafter
    network, steps = drafter._network, list[Batch]()

    def moving(ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        steps[:] = [] if steps and batch is not steps[0] else steps
        steps.append(batch)
        taken: tuple[Tensor, Tensor] = network(ids, hidden, replace(batch, positions=batch.positions + len(steps) - 1))
        return taken

    drafter._network = moving
    assert any(differs(item) for item in replay.run())
