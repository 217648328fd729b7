"""Targets with a prediction module inside: the target's own logits, which the module must not touch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.models.attention import Batch
from outrider.models.llama import LlamaModel
from tests.kit import tiny
from tests.kit.mtp import VARIANTS
from tests.kit.mtp_reference import MtpReference


def said(model: LlamaModel, ids: tuple[int, ...]) -> Tensor:
    """Logits [T, V] after each token of a text."""
    blocks = [list(range(-(-len(ids) // 16)))]
    batch = Batch.pack(np.array(ids), [(0, len(ids))], blocks, np.arange(len(ids)), 16, model.device)
    return model(batch, model.new_cache(16 * len(blocks[0]))).logits


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_a_computation_of_our_own(name: str, tmp_path: Path) -> None:
    made, ids = VARIANTS[name](), tiny.random_prompt(1, 70)
    _, expected = MtpReference(made.target, {}, made.meaning).target(ids)
    assert torch.allclose(said(made.load(tmp_path), ids).double(), expected, atol=2e-4)


def test_a_mimo_target_is_transformers_qwen2(tmp_path: Path) -> None:
    """MiMo's class there is remote code over Qwen2; without the module the two are one."""
    transformers = pytest.importorskip("transformers")
    made, ids = VARIANTS["mimo"](), tiny.random_prompt(2, 70)
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**made.config | {"model_type": "qwen2"}))
    theirs.load_state_dict(made.target)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits[0]
    assert torch.allclose(said(made.load(tmp_path), ids), expected, atol=2e-4)


def test_a_module_that_is_not_asked_for_is_passed_over(tmp_path: Path) -> None:
    """Whatever is in it: only who drafts with it holds it against the config."""
    made, ids = VARIANTS["mimo"](), tiny.random_prompt(3, 40)
    bare = said(made.load(tmp_path / "bare", whole=False), ids)
    made.module = {name: torch.full_like(tensor, float("nan")) for name, tensor in made.module.items()}
    assert torch.equal(said(made.load(tmp_path / "spoilt"), ids), bare)
