"""`outrider tune`, and policies as verbs take them: a tiny target tuned, its policy loaded, another model's refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.results import read
from outrider.drafting.policy import kept_path, read_policy
from outrider.llm import LLM
from outrider.models.fingerprint import fingerprint
from tests.kit import talker, threads
from tests.kit.command import Here
from tests.kit.tiny import save_tiny

TIGHT = ("--set", "engine.kv_cache_tokens=2048", "--set", "engine.num_threads=1")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
PROMPT = ("say it say it say it", "--max-tokens", "12", "--ignore-eos", "--json")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, and a cache folder in which nothing is kept."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with threads.one_thread():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that takes chats, another one, and prompts."""
    folder = tmp_path_factory.mktemp("tune")
    talker.save_talker(folder / "target")
    talker.save_talker(folder / "other")
    save_tiny(folder / "other", 7, vocab=talker.VOCAB)
    for name, text in (("a", "say it {0} {0} {0} {0}"), ("b", "what is {0}?")):
        turns = [json.dumps({"prompt": text.format(number)}) for number in range(4)]
        (folder / f"{name}.jsonl").write_text("\n".join(turns))
    return folder


@pytest.fixture(scope="module")
def weights(files: Path) -> str:
    """The target's fingerprint."""
    return fingerprint(LLM(str(files / "target"), kv_cache_tokens=2048).engine.model)


def tune(files: Path, tmp_path: Path) -> list[str]:
    flags = {
        "--out": str(tmp_path / "tune.jsonl"),
        "--policy": str(tmp_path / "policy.json"),
        "--json": str(tmp_path / "tune.json"),
        "--minutes": "0.2",
        "--methods": "ngram",
        "--tokens": "2",
        "--workloads": f"{files / 'a.jsonl'},{files / 'b.jsonl'}",
        "--concurrency": "1,2",
        "--num-prompts": "2",
        "--max-tokens": "8",
        "--repeats": "1",
        "--stop-below": "0",
    }
    return ["tune", str(files / "target"), *(word for pair in flags.items() for word in pair), *TIGHT]


def put_policy(path: Path, weights: str, default: dict[str, Any] | None, **classes: dict[str, Any] | None) -> Path:
    target = {"name": "some", "fingerprint": weights}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 1, "target": target, "default": default, "classes": classes}))
    return path


def stats_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)["outputs"][0]["stats"]
    return found


def test_tune_measures_chooses_writes_and_proves(here: Here, files: Path, tmp_path: Path, weights: str) -> None:
    ended = here(*tune(files, tmp_path))
    assert ended.code == 0, ended.err
    policy = read_policy(tmp_path / "policy.json")
    assert policy.fingerprint == weights and set(policy.classes) == {"a", "b"} and "num_cpus" in policy.conditions
    assert read_policy(kept_path(weights)) == policy
    lines = ended.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    table = lines[lines.index("") + 1 :]
    assert [line.split()[:2] for line in table[1:5]] == [["a", "1"], ["a", "2"], ["b", "1"], ["b", "2"]]
    assert table[5].startswith("all ") and table[6].startswith("The policy is ")
    proof = json.loads((tmp_path / "tune.json").read_text())["proof"]
    assert len(proof["places"]) == 4 and proof["fixed"]["method"] == "ngram" and proof["over_fixed"]["ratio"] > 0
    num_rows = len(read(tmp_path / "tune.jsonl").rows)
    assert here(*tune(files, tmp_path)).code == 0
    assert len(read(tmp_path / "tune.jsonl").rows) == num_rows, "nothing was left to measure but the proof"


def test_generate_takes_the_rule_of_the_requests_class(
    here: Here, files: Path, tmp_path: Path, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = str(put_policy(tmp_path / "policy.json", weights, None, chat=NGRAM))
    words = ("generate", str(files / "target"), *PROMPT, *TIGHT)
    plain = here(*words)
    chat = here(*words, "--policy", policy, "--workload", "chat")
    assert chat.code == 0, chat.err
    assert stats_of(chat.out)["num_drafts"] > 0 and stats_of(chat.out)["workload"] == "chat"
    default = here(*words, "--policy", policy)
    assert default.code == 0 and stats_of(default.out)["num_drafts"] == 0 and "plain decoding here" in caplog.text
    texts = [json.loads(ended.out)["outputs"][0]["token_ids"] for ended in (plain, chat, default)]
    assert texts[0] == texts[1] == texts[2]


def test_an_n_of_zero_at_the_load_drafts_nothing(here: Here, files: Path, tmp_path: Path, weights: str) -> None:
    rule = NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 1, 0], [2, 8, 3]], "guard": False}
    policy = str(put_policy(tmp_path / "policy.json", weights, rule))
    words = ("generate", str(files / "target"), *PROMPT, "--policy", policy, *TIGHT)
    assert stats_of(here(*words).out)["num_drafts"] == 0
    both = here(*words, "--n", "2")
    assert json.loads(both.out)["outputs"][0]["stats"]["num_drafts"] > 0


def test_bench_and_chat_take_a_policy(here: Here, files: Path, tmp_path: Path, weights: str) -> None:
    policy = str(put_policy(tmp_path / "policy.json", weights, NGRAM, quiet=None))
    found = tmp_path / "bench.json"
    words = ("bench", str(files / "target"), "--policy", policy, "--dataset", str(files / "a.jsonl"), "--repeats", "1")
    ended = here(*words, "--max-tokens", "8", "--json", str(found), *TIGHT)
    assert ended.code == 0, ended.err
    assert json.loads(found.read_text())["runs"][0]["speculative_config"]["guard"] is True
    refused = here(*words, "--workload", "quiet", *TIGHT)
    assert refused.code == 2 and "no drafting to run" in refused.err
    assert here("chat", str(files / "target"), "--policy", str(tmp_path / "none.json")).code == 2


def test_auto_takes_what_tune_kept_and_says_what_to_do_without(
    here: Here, files: Path, tmp_path: Path, weights: str
) -> None:
    words = ("generate", str(files / "target"), *PROMPT, "--spec-method", "auto", *TIGHT)
    ended = here(*words)
    assert ended.code == 2 and "outrider tune" in ended.err and ended.err.count("\n") == 1
    put_policy(kept_path(weights), weights, NGRAM)
    ended = here(*words)
    assert ended.code == 0 and stats_of(ended.out)["num_drafts"] > 0


def test_another_models_policy_is_refused(here: Here, files: Path, tmp_path: Path, weights: str) -> None:
    policy = put_policy(tmp_path / "policy.json", weights, NGRAM)
    ended = here("generate", str(files / "other"), *PROMPT, "--policy", str(policy), *TIGHT)
    assert ended.code == 2 and "is a policy for some" in ended.err and ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--minutes", "0"), "minutes is 0"),
        (("--policy", "/nowhere/policy.json"), "there is no such folder"),
        (("--workloads", "maths"), "did you mean math"),
        (("--methods", "auto"), "method is 'auto'"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = here("tune", "smollm2", *words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1


def test_a_bad_policy_is_refused_in_one_line(here: Here, files: Path, tmp_path: Path, weights: str) -> None:
    policy = put_policy(tmp_path / "policy.json", weights, NGRAM | {"method": "ngrm"})
    ended = here("generate", str(files / "target"), "hello", "--policy", str(policy))
    assert ended.code == 2 and "default: method is 'ngrm'" in ended.err and ended.err.count("\n") == 1
