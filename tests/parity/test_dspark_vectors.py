"""Every proposal and confidence that vLLM 0.32 recorded for a DeepSpec DSpark checkpoint, made again by ours."""

from __future__ import annotations

import pytest

from tests.kit.replay import VECTORS, Replay

FOLDER = VECTORS / "dspark_flat"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the recorded runs are not at {VECTORS}")


def test_every_recorded_proposal_is_reproduced() -> None:
    recorded = list(Replay.open(FOLDER).run())
    assert [item.name for item in recorded if item.differs] == []
    assert len(recorded) == 28


def test_every_recorded_confidence_is_reproduced() -> None:
    for item in Replay.open(FOLDER).run():
        assert item.confidence == pytest.approx(item.record["confidence"], abs=2e-5), item.name
