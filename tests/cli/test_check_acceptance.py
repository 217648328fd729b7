"""`outrider check --acceptance`: a drafter that reaches what it recorded passes, one that has collapsed does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Here
from tests.kit import lesson, threads


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a drafter that has learnt something of it."""
    folder = tmp_path_factory.mktemp("acceptance")
    target = lesson.save_target(folder / "target")
    llm = lesson.load_target(target)
    corpus = lesson.corpus_of(lesson.answers(llm, 60))
    trainer = lesson.trainer_of("eagle3", llm, corpus, folder / "run")
    assert trainer.run() > 1.3
    return target, trainer.folder.best


def words(target: Path, drafter: Path, *more: str) -> list[str]:
    settings = json.dumps({"method": "eagle3", "model": str(drafter)})
    engine = ["--dtype", "float32", "--set", "engine.kv_cache_tokens=2048"]
    return ["check", str(target), "--speculative-config", settings, "--acceptance", *engine, *more]


def copy_of(drafter: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in drafter.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_sound_drafter_reaches_its_record(here: Here, trained: tuple[Path, Path], tmp_path: Path) -> None:
    told = here(*words(*trained, "--json", str(tmp_path / "found.json")))
    assert told.code == 0, told.err
    assert "reached" in told.out
    (test,) = json.loads((tmp_path / "found.json").read_text())["acceptance"]
    assert test["passed"] and test["measured"] == pytest.approx(test["recorded"], abs=1e-4)


def test_a_collapse_is_an_error(here: Here, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """Finite weights of the right shape that are simply wrong: nothing else would notice."""
    target, drafter = trained
    broken = copy_of(drafter, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, dims=0)
    save_file(tensors, broken / "model.safetensors")
    told = here(*words(target, broken))
    assert told.code == 1
    assert "COLLAPSED" in told.out


@pytest.mark.parametrize("content", [None, "{}", '{"acceptance": {"math": {"prompts": [[1, 2]]}}}'])
def test_without_a_record_there_is_nothing_to_reach(
    content: str | None, here: Here, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = trained
    bare = copy_of(drafter, tmp_path / "bare")
    profile = json.loads((bare / "speculation_profile.json").read_text())
    if content is None:
        (bare / "speculation_profile.json").unlink()
    else:
        profile.pop("acceptance")
        (bare / "speculation_profile.json").write_text(json.dumps(profile | json.loads(content)))
    told = here(*words(target, bare))
    assert told.code == 2
    assert len(told.err.strip().splitlines()) == 1 and "speculation_profile.json" in told.err
