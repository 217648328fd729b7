"""Every proposal that vLLM 0.32 recorded for a z-lab DFlash checkpoint, made again by ours from the same rows."""

from __future__ import annotations

import pytest

from tests.kit.replay import VECTORS, Replay

FOLDER = VECTORS / "dflash_zlab_n7"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the recorded runs are not at {VECTORS}")


def test_every_recorded_proposal_is_reproduced() -> None:
    recorded = list(Replay.open(FOLDER).run())
    assert [item.name for item in recorded if item.differs] == []
    assert len(recorded) == 29
