"""Gemma targets against transformers on the same tiny random weights, in float32, however the text comes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models import attention, layers, linear
from outrider.models.families import load_model
from outrider.models.gemma import GemmaModel
from tests.kit import gemma, tiny
from tests.kit.gemma import Reading, gemma_model, save_gemma
from tests.kit.replay import VECTORS

CASE = VECTORS / "gemma4_mtp_keqv" / "target"
TEXT = tiny.random_prompt(1, 90)
NEAR = 2e-4


def theirs(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """transformers' model of a config, with these weights and none left over."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def said_by(model: Any, ids: tuple[int, ...], **more: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids]), **more)


@pytest.fixture(scope="module", params=gemma.VARIANTS)
def pair(request: pytest.FixtureRequest) -> tuple[GemmaModel, Any]:
    config = gemma.config_of(request.param)
    return gemma_model(request.param), theirs(gemma.VARIANTS[request.param], gemma.tensors_of(config))


def near(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, atol=NEAR, rtol=1e-4)


def test_logits_and_taps_are_those_of_transformers(pair: tuple[GemmaModel, Any]) -> None:
    ours, model = pair
    expected = said_by(model, TEXT, output_hidden_states=True)
    forward = Reading(ours).read({0: (0, TEXT)}, taps=range(ours.config.num_layers))
    assert near(forward.logits, expected.logits[0])
    for tap, state in zip(forward.taps, expected.hidden_states, strict=False):
        assert near(tap, state[0])
    # What they give after the last layer is normed; ours is not.
    (last,) = Reading(ours).read({0: (0, TEXT)}, taps=[ours.config.num_layers]).taps
    assert near(ours.norm(last), expected.hidden_states[-1][0])


@pytest.mark.parametrize("size", [1, 7, 33])
def test_chunks_and_drafts_that_are_taken_back_change_nothing(pair: tuple[GemmaModel, Any], size: int) -> None:
    """Each chunk comes with wrong tokens behind it, which the next one overwrites."""
    ours, model = pair
    expected = said_by(model, TEXT).logits[0]
    reading = Reading(ours)
    for first in range(0, len(TEXT), size):
        part = TEXT[first : first + size]
        forward = reading.read({0: (first, [*part, *tiny.random_prompt(first, 30)])})
        assert near(forward.logits[: len(part)], expected[first : first + len(part)])


def test_two_texts_in_one_forward_do_not_mix(pair: tuple[GemmaModel, Any]) -> None:
    ours, model = pair
    other = tiny.random_prompt(2, 71)
    reading = Reading(ours, num_texts=2)
    reading.read({0: (0, TEXT[:40])})
    forward = reading.read({1: (0, other), 0: (40, TEXT[40:])})
    assert near(forward.logits[: len(other)], said_by(model, other).logits[0])
    assert near(forward.logits[len(other) :], said_by(model, TEXT).logits[0, 40:])


def test_without_the_kernels_it_is_the_same(pair: tuple[GemmaModel, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair
    expected = Reading(ours).read({0: (0, TEXT)}).logits
    for module in (linear, layers, attention):
        monkeypatch.setattr(module, "kernels_for", lambda tensor: None)
    name = next(name for name in gemma.VARIANTS if gemma.config_of(name) == ours.config)
    assert near(Reading(gemma_model(name)).read({0: (0, TEXT)}).logits, expected)


@pytest.mark.parametrize(
    ("name", "family", "prefix"),
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma3", "gemma3", "model.language_model."),
        ("gemma4, small", "gemma4", "model.language_model."),
    ],
)
def test_a_text_model_inside_a_larger_one_is_the_same(name: str, family: str, prefix: str, tmp_path: Path) -> None:
    folder = save_gemma(tmp_path / "large", name, inside=prefix, model_type=family, eos_token_id=[1, 5])
    large: Any = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert large.config.eos_token_ids == (1, 5)
    expected = Reading(gemma_model(name)).read({0: (0, TEXT)}).logits
    assert torch.equal(Reading(large).read({0: (0, TEXT)}).logits, expected)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    """Its newest spelling: heads of the layers listed one by one."""
    name = "gemma4, keys as values"
    model = theirs(gemma.VARIANTS[name], gemma.tensors_of(gemma.config_of(name)))
    model.save_pretrained(tmp_path)
    assert "per_layer_config" in json.loads((tmp_path / "config.json").read_text())
    ours: Any = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(
        Reading(ours).read({0: (0, TEXT)}).logits, Reading(gemma_model(name)).read({0: (0, TEXT)}).logits
    )


@pytest.mark.skipif(not CASE.is_dir(), reason=f"the recorded runs are not at {VECTORS}")
def test_the_recorded_target_is_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CASE, dtype=torch.float32, attn_implementation="eager")
    ours: Any = load_model(str(CASE), dtype=torch.float32, device=torch.device("cpu"))
    ids = tiny.random_prompt(3, 120, vocab=512)
    assert near(Reading(ours).read({0: (0, ids)}).logits, said_by(model, ids).logits[0])


def test_a_cache_entry_is_shared_by_the_layers_that_share_keys() -> None:
    model = gemma_model("gemma4, small")
    cache = model.new_cache(32)
    assert [next(i for i, other in enumerate(cache) if other is entry) for entry in cache] == [0, 1, 2, 1, 1, 2]
    assert (model.last_layer_of("sliding_attention"), model.last_layer_of("full_attention")) == (1, 2)
    assert model.bytes_per_token() == 4 * 2 * 2 * (32 + 32 + 64)
