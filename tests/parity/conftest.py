"""Targets that exported drafters belong to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.models.llama import LlamaModel
from tests.kit import block_checkpoints, eagle3, tiny
from tests.kit.exported import Find


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[str, LlamaModel]]]:
    """By number of layers: a target's folder, and the same loaded."""
    kept = {}
    for layers in (eagle3.TARGET["num_layers"], block_checkpoints.TARGET["num_layers"]):
        folder = tiny.save_tiny(tmp_path_factory.mktemp("target") / "tiny", 5, num_layers=layers)
        kept[layers] = (str(folder), tiny.tiny_model(5, num_layers=layers))
    yield kept


@pytest.fixture
def target_of(targets: dict[int, tuple[str, LlamaModel]]) -> Find:
    def find(name: str) -> tuple[str, LlamaModel]:
        kit = eagle3 if name.startswith("eagle3") else block_checkpoints
        return targets[kit.TARGET["num_layers"]]

    return find
