"""Every proposal that vLLM 0.32 recorded for EAGLE-3 checkpoints, made again by ours from the same rows.

One is flat with an embedding of its own and taps that begin at the embedding; the other is EAGLE-3.1 in the Speculators
format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafting.base import DraftContext
from outrider.types import Proposal
from tests.kit.replay import VECTORS, Recorded, Replay

CASES = {"eagle3_flat_nbr1": 44, "eagle31_spec": 36}
pytestmark = pytest.mark.skipif(
    not all((VECTORS / case).is_dir() for case in CASES), reason=f"the recorded runs are not at {VECTORS}"
)


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_proposal_is_reproduced(case: str) -> None:
    recorded = list(Replay.open(VECTORS / case).run())
    assert [item.name for item in recorded if item.differs] == []
    assert len(recorded) == CASES[case]


class Listening:
    """A drafter whose logits, over the target's ids, are kept step by step: [R, V] for each draft of a round."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.taps, self.heard = inner, inner.taps, list[Tensor]()
        network, vocabulary = inner._loop._network, inner._loop._vocabulary
        logits = network.logits

        def listen(states: Tensor) -> Tensor:
            found: Tensor = logits(states)
            self.heard.append(vocabulary.widen(found))
            return found

        network.logits = listen

    def propose(self, context: DraftContext) -> Proposal:
        self.heard.clear()
        proposal: Proposal = self.inner.propose(context)
        return proposal


def heard(folder: Path) -> Iterator[tuple[int, Recorded, list[Tensor]]]:
    """Each recorded proposal with its place in the step and the logits [R, V] that ours came from, draft by draft."""
    replay = Replay.open(folder)
    listening = Listening(replay.drafter)
    replay.drafter = listening  # type: ignore[assignment]
    step, place = -1, 0
    for item in replay.run():
        place = place + 1 if item.record["step"] == step else 0
        step = item.record["step"]
        yield place, item, list(listening.heard)


@pytest.mark.parametrize("case", CASES)
def test_every_recorded_logit_is_reproduced(case: str) -> None:
    worst = 0.0
    for place, item, logits in heard(VECTORS / case):
        for step, rows in enumerate(logits):
            found = rows[place][torch.tensor(item.record["top3_ids"][step])]
            worst = max(worst, float((found - torch.tensor(item.record["top3_logits"][step])).abs().max()))
    assert worst < 3e-5


@pytest.mark.parametrize("case", CASES)
def test_a_proposal_depends_on_the_text_alone(case: str) -> None:
    """Recorded texts again, each read in one go, from blocks that were handed out anew."""
    fresh = Replay.open(VECTORS / case)
    for item in list(Replay.open(VECTORS / case).run())[::5]:
        last = item.record["last_valid_pos"]
        fresh.blocks.clear()
        known = item.record["committed"][: last + 1]
        line = item.record | {"row_start": 0, "row_ids": known, "verified_drafts": [], "phase": "prompt_chunk"}
        fresh._forward([line])
        assert fresh.drafter.propose(fresh._context([line])).tokens[0] == item.ours
        fresh.target.pool.release(fresh.blocks[item.record["req"]])
