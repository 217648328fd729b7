"""A run that starts from another's checkpoint: it begins where that one ended, and refuses one that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.train.corpus import Corpus
from outrider.train.trainer import Trainer
from tests.kit import lesson, threads

SHORT = {"epochs": 3.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return lesson.load_target(lesson.save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def corpus(llm: LLM) -> Corpus:
    return lesson.corpus_of(lesson.answers(llm, 60))


@pytest.fixture(scope="module")
def best(llm: LLM, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained DFlash."""
    with threads.one_thread():
        trainer = lesson.trainer_of("dflash", llm, corpus, tmp_path_factory.mktemp("dflash"))
        trainer.run()
    return trainer.folder.best


def first_measured(trainer: Trainer) -> float:
    trainer.run()
    return next(float(e["mean_acceptance_length"]) for e in trainer.folder.entries() if "mean_acceptance_length" in e)


def test_a_head_is_added_to_what_another_method_has_learnt(
    best: Path, llm: LLM, corpus: Corpus, tmp_path: Path
) -> None:
    """DSpark from DFlash drafts well from the first measurement on; from nothing it does not yet."""
    with threads.one_thread():
        warm = lesson.trainer_of("dspark", llm, corpus, tmp_path / "warm", start_from=str(best), **SHORT)
        cold = lesson.trainer_of("dspark", llm, corpus, tmp_path / "cold", **SHORT)
        assert first_measured(warm) > first_measured(cold) + 0.2


def test_a_resumed_run_goes_on_from_its_own_state(best: Path, llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    with threads.one_thread():
        lesson.trainer_of("dflash", llm, corpus, tmp_path, start_from=str(best), **SHORT).run()
        state = (tmp_path / "state.pt").read_bytes()
        lesson.trainer_of("dflash", llm, corpus, tmp_path, start_from=str(best), **SHORT).run()
    assert (tmp_path / "state.pt").read_bytes() == state


def test_another_start_is_another_run(best: Path, llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    lesson.trainer_of("dflash", llm, corpus, tmp_path, start_from=str(best))
    with pytest.raises(ConfigError, match="another start_from"):
        lesson.trainer_of("dflash", llm, corpus, tmp_path)


@pytest.mark.parametrize("changes", [{"intermediate_size": 48}, {"taps": (1, 2)}])
def test_another_shape_is_named(
    changes: dict[str, object], best: Path, llm: LLM, corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has shape \[.*this network's has \[.*settings that it was trained with"):
        lesson.trainer_of("dflash", llm, corpus, tmp_path, start_from=str(best), **changes)


def test_a_checkpoint_of_something_else_is_refused(best: Path, llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((best / "config.json").read_text())
    save_file({"something.weight": torch.zeros(2)}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor of this network"):
        lesson.trainer_of("dflash", llm, corpus, tmp_path / "run", start_from=str(other))
