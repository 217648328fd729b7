"""Drafters trained for Gemma targets: they learn the target's own distribution, and what is written is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.differentiable import UNSURE, tap_norm, unsure_norm
from outrider.drafting.training import Teacher, TrainingBatch
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.linear import Linear
from outrider.train import trainer as training
from outrider.train.corpus import Corpus
from outrider.types import SamplingParams
from tests.kit import gemma, lesson, threads, tiny
from tests.kit.gemma import Reading, gemma_model, save_gemma
from tests.kit.talker import VOCAB, save_talker

CAPPED = ("gemma3, capped, untied, odd heads", "gemma4", "gemma4, small", "gemma3")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", params=["gemma3", "gemma4, small"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_talker(tmp_path_factory.mktemp("target"))
    keys = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "tie_word_embeddings": False}
    save_gemma(folder, request.param, 3, cyclic=True, **keys)
    return lesson.load_target(folder)


@pytest.fixture(scope="module")
def corpus(llm: LLM) -> Corpus:
    return lesson.corpus_of(lesson.answers(llm, 60))


@pytest.mark.parametrize("name", CAPPED)
def test_the_teacher_is_the_target(name: str) -> None:
    """Its probabilities over what can be drafted are the target's own, its norm and cap included."""
    model: Any = gemma_model(name)
    text, last = tiny.random_prompt(1, 50), model.config.num_layers
    forward = Reading(model).read({0: (0, text)}, taps=[last])
    ids = torch.arange(3, tiny.VOCAB, 2)
    teacher = Teacher.of(model, ids, dtype=torch.float32, name="tiny")
    batch = TrainingBatch(torch.tensor(text), torch.ones(50, dtype=torch.bool), {last: forward.taps[0]}, (0, 50))
    expected = forward.logits[:, ids].softmax(-1)
    assert torch.allclose(teacher.probs(batch, torch.arange(50)), expected, atol=1e-5)
    assert torch.equal(teacher.embedding, model.embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_gives_its_rows_back(dtype: torch.dtype) -> None:
    for rows, columns in ((5, 34), (32, 64), (70, 16), (3, 7)):
        weight = torch.randn(rows, columns).to(dtype)
        assert torch.equal(Linear(weight).rows(), weight)


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_a_fresh_network_is_unsure_whatever_the_size_of_the_targets_norm(size: float) -> None:
    """A norm that is small is shared, a large and uneven one is not: logits say little, and taps are evened out."""
    model: Any = gemma_model("gemma3")
    model.norm.weight *= size * (1 + 2 * (torch.arange(tiny.WIDTH) % 8 == 0))
    teacher = Teacher.of(model, torch.arange(tiny.VOCAB), dtype=torch.float32, name="tiny")
    states = torch.randn(400, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    logits = (states * unsure_norm(teacher)) @ teacher.head.T
    assert float(logits.std()) < 2.2
    assert torch.equal(unsure_norm(teacher), UNSURE * teacher.norm_weight) == (size == 1)
    assert float(tap_norm(teacher).mean()) == pytest.approx(1)


def test_training_raises_what_the_engine_accepts(
    llm: LLM, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "can_draw", lambda: False)
    trainer = lesson.trainer_of("eagle3", llm, corpus, tmp_path, eval_every=8)
    trainer.run()
    values = [
        entry["mean_acceptance_length"] for entry in trainer.folder.entries() if "mean_acceptance_length" in entry
    ]
    steps = [entry["loss"] for entry in trainer.folder.entries() if "loss" in entry]
    assert max(values) > values[0] + 0.1 and steps[-1] < 0.8 * steps[0], (values, steps)
    settings = {"method": "eagle3", "model": str(trainer.folder.best), "num_speculative_tokens": 3}
    prompts = [list(tiny.random_prompt(seed, 9, lesson.KNOWN)) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=lesson.ANSWER)
    plain, served = (engine.generate(prompts, params) for engine in (llm, llm.sibling(settings)))
    assert [o.outputs[0].token_ids for o in served] == [o.outputs[0].token_ids for o in plain]


def test_a_method_that_builds_on_the_targets_layers_says_so(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mtp builds on the target's own layers"):
        lesson.trainer_of("mtp", llm, corpus, tmp_path)


def test_the_kit_has_caps() -> None:
    assert {gemma.config_of(name).final_soft_cap for name in CAPPED} == {6.0, 8.0, None}
