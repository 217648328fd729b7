"""`outrider train`: a drafter's folder on stdout, one line where it cannot be, and a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.progress import ProgressBars
from outrider.drafting import registry
from outrider.drafting.profile import read_profile
from outrider.train import trainer as training
from tests.kit import lesson, threads
from tests.kit.command import Here

SETTINGS = {
    **lesson.SETTINGS,
    "seed": 0,
    "epochs": 1.0,
    "eval_every": 2,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(training, "can_draw", lambda: False)
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a corpus with three lines that cannot be used."""
    folder = tmp_path_factory.mktemp("lesson")
    target = lesson.save_target(folder / "target")
    corpus = lesson.write_corpus(lesson.answers(lesson.load_target(target), 60), folder / "corpus.jsonl")
    with corpus.open("a", encoding="utf-8") as file:
        file.write('{"prompt_ids": [1], "response_ids": []}\n' * 2)
        file.write(json.dumps({"prompt_ids": [1], "response_ids": [5] * 100}) + "\n")
    return str(target), str(corpus)


def words(files: tuple[str, str], output: Path, *, method: str = "eagle3") -> list[str]:
    target, corpus = files
    settings = [f"--set=train.{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    return ["train", method, "--target", target, "--corpus", corpus, "--output", str(output), *settings]


@pytest.mark.parametrize("method", registry.trainable())
def test_a_drafter_is_trained_and_serves(here: Here, files: tuple[str, str], tmp_path: Path, method: str) -> None:
    ended = here(*words(files, tmp_path / "run", method=method), "--states", str(tmp_path / "states"))
    assert ended.code == 0, ended.err
    best = Path(ended.out.strip())
    assert best == tmp_path / "run" / "best"
    profile = read_profile(best)
    assert profile is not None and (profile.method, profile.num_speculative_tokens) == (method, 3)
    assert "lines left out (without a prompt or a response): 2" in ended.err
    assert "lines left out (longer than 64 tokens): 1" in ended.err
    assert "60 conversations, 1200 response tokens" in ended.err and "mean acceptance length" in ended.err
    spec = json.dumps({"model": str(best)})
    texts = [
        here("generate", files[0], "Hello", "--raw", "--max-tokens", "8", "--dtype", "float32", *more).out
        for more in ([], ["--speculative-config", spec])
    ]
    assert texts[0] == texts[1] != ""


def test_json_is_the_result_alone_and_captured_states_are_read(
    here: Here, files: tuple[str, str], tmp_path: Path
) -> None:
    more = ["--states", str(tmp_path / "states"), "--capture-first", "--json"]
    ended = here(*words(files, tmp_path / "run"), *more)
    result = json.loads(ended.out)
    assert (result["method"], result["model"]) == ("eagle3", str(tmp_path / "run" / "best"))
    assert result["mean_acceptance_length"] >= 1 and result["num_speculative_tokens"] == 3
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"loss"' in line]) == result["num_steps"] > 2
    assert list((tmp_path / "states").glob("*.safetensors"))
    # The same command again has nothing left to do, and says the same.
    again = here(*words(files, tmp_path / "run"), *more)
    assert json.loads(again.out) == result
    assert (tmp_path / "run" / "log.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("eagle3", "eagle9"), "eagle9"),
        (("eagle3", "ngram"), "ngram"),
        (("corpus.jsonl", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
        (("train.seed", "train.sead"), "did you mean train.seed?"),
        (("train.seed=0", "train.seed=-1"), "seed is -1, expected a whole number of at least 0"),
        (("train.seed=0", "train.taps=[0, 9]"), "taps"),
    ],
)
def test_a_refusal_is_one_line(
    here: Here, files: tuple[str, str], tmp_path: Path, given: tuple[str, str], said: str
) -> None:
    wrong = [word.replace(*given) for word in words(files, tmp_path / "run")]
    assert wrong != words(files, tmp_path / "run")
    ended = here(*wrong)
    last = ended.err.splitlines()[-1]
    assert ended.code == 2 and last.startswith("outrider: error: ") and said in last
    assert len([line for line in ended.err.splitlines() if "left out" not in line]) == 1
    assert ended.out == "" and not (tmp_path / "run").exists()


def test_capturing_first_needs_a_folder(here: Here, files: tuple[str, str], tmp_path: Path) -> None:
    ended = here(*words(files, tmp_path / "run"), "--capture-first")
    assert ended.code == 2 and ended.err.count("\n") == 1 and "--states" in ended.err


def test_ctrl_c_exits_with_130_and_the_same_command_goes_on(
    here: Here, files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ProgressBars.show

    def stop(bars: ProgressBars, what: str, done: int, total: int, note: str = "") -> None:
        show(bars, what, done, total, note)
        if done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBars, "show", stop)
        ended = here(*words(files, tmp_path / "run"), "--json")
    assert (ended.code, ended.out) == (130, "")
    assert "Traceback" not in ended.err
    resumed = here(*words(files, tmp_path / "run"), "--json")
    whole = here(*words(files, tmp_path / "whole"), "--json")
    assert json.loads(resumed.out) | {"model": ""} == json.loads(whole.out) | {"model": ""}
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("run", "whole")]
    assert logs[0] == logs[1]
