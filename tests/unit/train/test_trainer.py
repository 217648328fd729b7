"""A training run: it teaches, goes on where it stopped, keeps what served best, and survives bad days."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.drafting import registry
from outrider.drafting.profile import read_profile
from outrider.errors import CapacityError, ConfigError, LoadError
from outrider.evaluate.acceptance import Acceptance, measure
from outrider.llm import LLM
from outrider.models.fingerprint import fingerprint
from outrider.train import folder as run_folder
from outrider.train import trainer as training
from outrider.train.corpus import Corpus
from outrider.train.trainer import Trainer, frequent_ids
from outrider.types import RequestStats
from tests.kit import lesson, threads

STEPS, EVERY = 32, 4
SHORT = {"epochs": 3.0}
"""Twelve steps, three measurements."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the steps."""
    monkeypatch.setattr(training, "can_draw", lambda: False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lesson.save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return lesson.load_target(target)


@pytest.fixture(scope="module")
def corpus(llm: LLM) -> Corpus:
    return lesson.corpus_of(lesson.answers(llm, 60))


@pytest.fixture(scope="module")
def whole(llm: LLM, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trainer]:
    """A run from start to end, by method."""
    runs: dict[str, Trainer] = {}

    def of(method: str) -> Trainer:
        if method not in runs:
            runs[method] = lesson.trainer_of(method, llm, corpus, tmp_path_factory.mktemp(method))
            runs[method].run()
        return runs[method]

    return of


def measured(trainer: Trainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.folder.entries() if "mean_acceptance_length" in entry]


def stop_after(step: int) -> Callable[[str, int, int, str], None]:
    """Ctrl-C when that step is done and logged."""

    def progress(name: str, done: int, total: int, note: str) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


def interrupted(method: str, llm: LLM, corpus: Corpus, run: Path, step: int, **changes: Any) -> Trainer:
    trainer = lesson.trainer_of(method, llm, corpus, run, progress=stop_after(step), **changes)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    return trainer


def flat(value: object, name: str = "") -> dict[str, object]:
    """Nested state as one table."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{name}.{key}").items()}
    return {name: value}


def assert_same_run(one: Trainer, other: Trainer) -> None:
    """State bit for bit, the log, and the best checkpoint."""
    assert one.folder.entries() == other.folder.entries()
    ours, theirs = flat(one.folder.state()), flat(other.folder.state())
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]  # type: ignore[arg-type]
        assert same, name
    for name in ("model.safetensors", "config.json"):
        assert (one.folder.best / name).read_bytes() == (other.folder.best / name).read_bytes()


@pytest.mark.parametrize("method", registry.trainable())
def test_training_raises_what_the_engine_accepts(
    method: str, whole: Callable[[str], Trainer], llm: LLM, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = whole(method)
    values = [entry["mean_acceptance_length"] for entry in measured(trainer)]
    assert trainer.num_steps == STEPS and len(values) == STEPS // EVERY
    untrained = lesson.trainer_of(
        method, llm, corpus, tmp_path, learning_rate=1e-9, muon_learning_rate=1e-9, epochs=1.0
    ).run()
    # One that starts as the target's own ends knows nearly all there is to know of a target that walks in cycles.
    assert untrained < 1.6 or method == "gemma4_mtp"
    assert max(values) > max(1.95, untrained), values
    steps = [entry for entry in trainer.folder.entries() if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert steps[-1]["response_tokens"] > steps[0]["response_tokens"] > 0


@pytest.mark.parametrize("method", registry.trainable())
@pytest.mark.parametrize("step", [2, 10])
def test_a_resumed_run_is_an_uninterrupted_one(
    method: str, step: int, whole: Callable[[str], Trainer], llm: LLM, corpus: Corpus, tmp_path: Path
) -> None:
    """Stopped before anything was kept, and between two measurements; stopped twice, too."""
    interrupted(method, llm, corpus, tmp_path, step)
    if step == 10:
        interrupted(method, llm, corpus, tmp_path, 19)
    trainer = lesson.trainer_of(method, llm, corpus, tmp_path)
    best = trainer.run()
    assert_same_run(trainer, whole(method))
    assert best == pytest.approx(max(entry["mean_acceptance_length"] for entry in measured(trainer)), abs=1e-4)


def test_a_run_that_has_ended_does_nothing_more(whole: Callable[[str], Trainer], llm: LLM, corpus: Corpus) -> None:
    before = whole("eagle3")
    calls: list[object] = []
    again = lesson.trainer_of("eagle3", llm, corpus, before.folder.path, progress=lambda *news: calls.append(news))
    best = again.run()
    assert calls == [] and best == pytest.approx(max(e["mean_acceptance_length"] for e in measured(before)), abs=1e-4)


def test_states_from_disk_train_like_states_from_the_target(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    online = lesson.trainer_of("eagle3", llm, corpus, tmp_path / "online", **SHORT)
    kept = lesson.trainer_of("eagle3", llm, corpus, tmp_path / "kept", states=tmp_path / "states", **SHORT)
    online.run()
    kept.run()
    assert kept.capture.missing() == []
    assert_same_run(online, kept)


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("dflash", {}, "method"),
        ("eagle3", {"learning_rate": 0.02}, "learning_rate"),
        ("eagle3", {"epochs": 4.0}, "epochs"),
        ("eagle3", {"seed": 1}, "corpus"),
        ("eagle3", {"draft_vocab_size": 20}, "draft_vocabulary"),
    ],
)
def test_going_on_with_something_else_is_refused(
    method: str, changes: dict[str, Any], named: str, llm: LLM, corpus: Corpus, tmp_path: Path
) -> None:
    lesson.trainer_of("eagle3", llm, corpus, tmp_path)
    with pytest.raises(ConfigError, match=f"holds a run of another {named} .*another folder") as caught:
        lesson.trainer_of(method, llm, corpus, tmp_path, **changes)
    assert caught.value.param == named and "\n" not in str(caught.value)


def test_going_on_with_another_corpus_is_refused(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    lesson.trainer_of("eagle3", llm, corpus, tmp_path)
    with pytest.raises(ConfigError, match="another corpus"):
        lesson.trainer_of("eagle3", llm, Corpus(corpus.samples[:-5]), tmp_path)


@pytest.mark.parametrize("method", registry.trainable())
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_products_of_any_type_learn_from_a_target_of_any_type(
    method: str, served: str, target: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Steps, and a checkpoint that the engine measures."""
    llm = LLM(str(target), dtype=served, max_num_seqs=8, kv_cache_tokens=2048)
    for dtype in ("float32", "bfloat16"):
        trainer = lesson.trainer_of(method, llm, corpus, tmp_path / dtype, dtype=dtype, epochs=0.5, eval_every=50)
        assert trainer.run() >= 1 and len(measured(trainer)) == 1
        (record,) = json.loads((trainer.folder.best / "speculation_profile.json").read_text())["acceptance"].values()
        assert record["dtype"] == served


def scripted(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> list[dict[str, torch.Tensor]]:
    """Measurements that say so; what each was given."""
    seen: list[dict[str, torch.Tensor]] = []

    def fake(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[RequestStats]:
        assert llm.speculative is not None and llm.speculative.model is not None
        seen.append(load_file(Path(llm.speculative.model) / "model.safetensors"))
        return measure(llm, prompts, max_tokens)

    monkeypatch.setattr(training, "measure", fake)
    given = iter(lengths)
    real = Acceptance.of
    calls = {"left": 0}

    def of(requests: Any) -> Acceptance:
        # The first call after a measurement judges; the profile's own come after it.
        found = real(requests)
        if calls["left"] < len(seen):
            calls["left"] = len(seen)
            return Acceptance(next(given), found.per_position_acceptance)
        return found

    monkeypatch.setattr(Acceptance, "of", of)
    return seen


def test_the_best_is_what_was_measured_best_not_what_came_last(
    llm: LLM, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scripted(monkeypatch, [1.5, 2.25, 2.0])
    trainer = lesson.trainer_of("eagle3", llm, corpus, tmp_path, **SHORT)
    assert trainer.run() == 2.25
    kept = load_file(trainer.folder.best / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in seen[1].items())
    assert not all(torch.equal(kept[name], tensor) for name, tensor in seen[2].items())
    profile = json.loads((trainer.folder.best / "speculation_profile.json").read_text())
    assert profile["provenance"]["step"] == 2 * EVERY


@pytest.mark.parametrize("method", registry.trainable())
def test_the_best_reaches_what_its_profile_records(
    method: str, whole: Callable[[str], Trainer], llm: LLM, target: Path
) -> None:
    best = whole(method).folder.best
    profile = read_profile(best)
    assert profile is not None
    assert (profile.method, profile.fingerprint) == (method, fingerprint(llm.engine.model))
    assert (profile.target, profile.num_speculative_tokens) == (str(target), 3)
    (record,) = json.loads((best / "speculation_profile.json").read_text())["acceptance"].values()
    assert len(record["prompts"]) == 6 and record["dtype"] == "float32"
    entry = max(measured(whole(method)), key=lambda entry: entry["mean_acceptance_length"])
    settings = {"model": str(best), "method": method, "num_speculative_tokens": record["num_speculative_tokens"]}
    fresh = LLM(str(target), dtype="float32", speculative_config=settings, max_num_seqs=8, kv_cache_tokens=2048)
    for served in (llm.sibling(settings), fresh):
        found = Acceptance.of(measure(served, record["prompts"], record["max_tokens"]))
        assert round(found.mean_acceptance_length, 4) == record["mean_acceptance_length"]
        assert [round(rate, 4) for rate in found.per_position_acceptance] == record["per_position_acceptance"]
    assert record["mean_acceptance_length"] == entry["mean_acceptance_length"]


def test_acceptance_is_recorded_by_kind_of_conversation(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    kinds = Corpus([replace(sample, kind="ab"[index % 2]) for index, sample in enumerate(corpus.samples)])
    trainer = lesson.trainer_of("eagle3", llm, kinds, tmp_path, **SHORT)
    best = trainer.run()
    records = json.loads((trainer.folder.best / "speculation_profile.json").read_text())["acceptance"]
    assert sorted(records) == ["a", "b"]
    prompts = [prompt for record in records.values() for prompt in record["prompts"]]
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 6
    values = [record["mean_acceptance_length"] for record in records.values()]
    assert min(values) <= round(best, 4) <= max(values)


def test_held_out_prompts_are_not_trained_on(whole: Callable[[str], Trainer], corpus: Corpus) -> None:
    trainer = whole("eagle3")
    (record,) = json.loads((trainer.folder.best / "speculation_profile.json").read_text())["acceptance"].values()
    trained = set()
    for index in range(len(trainer.capture)):
        shard = trainer.capture.shard(index)
        for first, end in zip(shard.starts, shard.starts[1:], strict=False):
            prompt = shard.ids[first:end][~shard.is_response[first:end]]
            trained.add(tuple(prompt.tolist()))
    held = {tuple(prompt) for prompt in record["prompts"]}
    everything = {tuple(sample.ids[~sample.is_response].tolist()) for sample in corpus.samples}
    assert trained and held <= everything - trained


def full(*arguments: object, **settings: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_in_torch(state: object, path: Path) -> None:
    path.write_bytes(b"half")
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nmore of it")


@pytest.mark.parametrize("failing", ["save_file", "save", "promote"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_state(
    failing: str,
    whole: Callable[[str], Trainer],
    llm: LLM,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the same command goes on from them when there is room again."""
    interrupted("eagle3", llm, corpus, tmp_path, 10)
    best = tmp_path / "best"
    before = {path.name: path.read_bytes() for path in best.iterdir()} | {
        "state.pt": (tmp_path / "state.pt").read_bytes()
    }
    with monkeypatch.context() as patch:
        if failing == "save_file":
            patch.setattr(run_folder, "save_file", full)
        elif failing == "save":
            patch.setattr(torch, "save", full_in_torch)
        else:
            patch.setattr(run_folder, "_readable", full)
        with pytest.raises(CapacityError, match="the same command goes on") as caught:
            lesson.trainer_of("eagle3", llm, corpus, tmp_path).run()
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert before["state.pt"] == (tmp_path / "state.pt").read_bytes()
    assert read_profile(best) is not None and load_file(best / "model.safetensors")
    if failing != "save":  # which comes after a better checkpoint has replaced the old one
        assert all((best / name).read_bytes() == content for name, content in before.items() if name != "state.pt")
    assert not list(tmp_path.glob("*.part"))
    trainer = lesson.trainer_of("eagle3", llm, corpus, tmp_path)
    trainer.run()
    assert_same_run(trainer, whole("eagle3"))


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_state_is_named(content: bytes | None, llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    trainer = interrupted("eagle3", llm, corpus, tmp_path, 5)
    path = tmp_path / "state.pt"
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    with pytest.raises(LoadError, match=r"state\.pt cannot be read .*delete it") as caught:
        trainer.run()
    assert "\n" not in str(caught.value)


def test_a_stop_between_the_two_moves_of_a_promotion_loses_nothing(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    interrupted("eagle3", llm, corpus, tmp_path, 5)
    (tmp_path / "best").rename(tmp_path / "best.old")
    trainer = lesson.trainer_of("eagle3", llm, corpus, tmp_path)
    assert read_profile(trainer.folder.best) is not None
    (tmp_path / "best.old").mkdir()
    (tmp_path / "best.old" / "config.json").write_text("{}")
    trainer.run()
    assert sorted(path.name for path in tmp_path.glob("best*")) == ["best"]


def test_a_line_of_the_log_that_was_cut_short_is_forgotten(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    interrupted("eagle3", llm, corpus, tmp_path, 6, **SHORT)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    trainer = lesson.trainer_of("eagle3", llm, corpus, tmp_path, **SHORT)
    trainer.run()
    steps = [entry["step"] for entry in trainer.folder.entries() if "loss" in entry]
    assert steps == list(range(1, trainer.num_steps + 1))
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line)


def test_a_corpus_of_one_prompt_is_refused(llm: LLM, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs more prompts") as caught:
        lesson.trainer_of("eagle3", llm, Corpus(corpus.samples[:1]), tmp_path)
    assert caught.value.param == "held_out"
    assert not (tmp_path / "run.json").exists()


def test_the_most_frequent_response_tokens_can_be_drafted() -> None:
    corpus = lesson.corpus_of([([1, 1, 1, 1], [7, 5, 7, 3]), ([1], [9, 5, 7])])
    assert frequent_ids(corpus.samples, 12, 2).tolist() == [5, 7]
    assert frequent_ids(corpus.samples, 12, 3).tolist() == [3, 5, 7]
    assert frequent_ids(corpus.samples, 12, 5).tolist() == [0, 3, 5, 7, 9]
    assert frequent_ids(corpus.samples, 12, 50).tolist() == list(range(12))
