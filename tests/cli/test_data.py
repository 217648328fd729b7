"""`outrider data`: corpora made and inspected from the command line, one line for each fault, nothing lost."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.evaluate import workloads
from tests.kit.command import TIMEOUT_S, Ended, Here, apart, spawn
from tests.kit.fake_server import said, serve
from tests.kit.talker import TEMPLATE, VOCAB, save_talker
from tests.kit.tiny import tiny_config

SMALL = ("--set", "engine.kv_cache_tokens=4096", "--dtype", "float32", "--max-tokens", "8")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_talker(tmp_path_factory.mktemp("talker")))


def write(folder: Path, lines: list[Any]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def one_line(ended: Ended) -> str:
    assert ended.code == 2 and ended.out == "" and ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith("outrider: error: ")
    return ended.err


def test_a_corpus_is_made_goes_on_and_can_be_inspected(here: Here, talker: str, tmp_path: Path) -> None:
    prompts, out = (
        write(tmp_path, [{"prompt": "one", "kind": "a"}, {"turns": ["two", "three"]}, "{"]),
        tmp_path / "o.jsonl",
    )
    words = ("data", "generate", talker, "--prompts", prompts, "--out", str(out), "--json", *SMALL)
    ended = here(*words)
    assert ended.code == 0, ended.err
    counts = json.loads(ended.out)
    num_tokens = sum(len(record["response_ids"]) for record in records(out))
    assert counts == {
        "num_made": 3,
        "num_tokens": num_tokens,
        "num_written": 3,
        "num_wanted": 3,
        "refused": {"not JSON": 1},
    }
    assert "3 responses" in ended.err and "refused: 1 not JSON" in ended.err
    whole = records(out)
    keys = {"kind", "temperature", "prompt_ids", "response_ids", "finish", "line", "turn"}
    assert all(set(record) == keys for record in whole) and max(len(r["response_ids"]) for r in whole) <= 8
    out.write_text("".join(json.dumps(record) + "\n" for record in whole[:1]) + '{"line": 2, "tu')
    again = here(*words, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    assert json.loads(again.out)["num_made"] == 2 and records(out) == whole
    found = json.loads(here("data", "inspect", str(out), "--target", talker, "--json").out)
    assert found["num_conversations"] == 3 and found["num_response_tokens"] == num_tokens


def test_sampling_reaches_the_engine(here: Here, talker: str, tmp_path: Path) -> None:
    prompts, texts = write(tmp_path, [{"prompt": "one"}]), []
    settings = (
        [],
        ["--temperature", "1.5"],
        ["--temperature", "1.5", "--seed", "4"],
        ["--temperature", "1.5", "--top-k", "2"],
    )
    for number, words in enumerate([*settings, ["--temperature", "1.5", "--top-p", "0.2"]]):
        out = tmp_path / f"{number}.jsonl"
        assert here("data", "generate", talker, "--prompts", prompts, "--out", str(out), *SMALL, *words).code == 0
        texts.append(tuple(records(out)[0]["response_ids"]))
    assert len(set(texts)) == 5


def test_thinking_reaches_the_prompt_and_says_where_it_changes_nothing(here: Here, talker: str, tmp_path: Path) -> None:
    prompts, lengths = write(tmp_path, [{"prompt": "one"}]), {}
    for switch in ("on", "off"):
        out = tmp_path / f"{switch}.jsonl"
        words = ("--prompts", prompts, "--out", str(out), "--thinking", switch)
        ended = here("data", "generate", talker, *words, *SMALL)
        assert ended.code == 0 and "changes nothing" not in ended.err
        lengths[switch] = len(records(out)[0]["prompt_ids"])
    assert lengths["on"] - lengths["off"] == len("<think>")
    plain = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "")
    other, out = str(save_talker(tmp_path / "plain", template=plain)), str(tmp_path / "plain.jsonl")
    ended = here("data", "generate", other, "--prompts", prompts, "--out", out, "--thinking", "on", *SMALL)
    assert ended.code == 0 and "--thinking changes nothing" in ended.err


def test_a_server_answers_without_an_engine(talker: str, tmp_path: Path) -> None:
    prompts, out = write(tmp_path, [{"prompt": "one"}, {"prompt": "two"}]), tmp_path / "o.jsonl"
    with serve(lambda body, number: said("Yes.")) as server:
        words = ("data", "generate", talker, "--prompts", prompts, "--out", str(out), "--server", server.url)
        ended = apart(*words, "--served-model", "mine", "--temperature", "0.5")
    assert ended.code == 0, ended.err
    assert {body["model"] for body in server.asked} == {"mine"} and len(records(out)) == 2
    assert {body["temperature"] for body in server.asked} == {0.5}
    ended = apart(*words, "--served-model", "other", "--temperature", "0.5")
    assert "another served_model" in one_line(ended)


def test_a_dead_server_is_one_error_line_and_keeps_what_came(
    here: Here, talker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.served._ATTEMPTS", 1)
    prompts, out = write(tmp_path, [{"prompt": str(number)} for number in range(4)]), tmp_path / "o.jsonl"
    with serve(lambda body, number: said("Yes.") if number < 2 else (500, b"oops")) as server:
        words = ("--prompts", prompts, "--out", str(out), "--server", server.url, "--concurrency", "1")
        ended = here("data", "generate", talker, *words)
    errors = [line for line in ended.err.splitlines() if "error" in line]
    assert ended.code == 2 and len(errors) == 1 and "status 500 (oops)" in errors[0] and "Traceback" not in ended.err
    assert len(records(out)) == 2


def test_ctrl_c_keeps_everything_and_says_how_to_go_on(talker: str, tmp_path: Path) -> None:
    lines = [{"prompt": f"number {number}"} for number in range(3000)]
    prompts, out = write(tmp_path, lines), tmp_path / "o.jsonl"
    words = ("--prompts", prompts, "--out", str(out), *SMALL[:-1], "64")
    with spawn("data", "generate", talker, *words) as process:
        end = time.monotonic() + TIMEOUT_S / 2
        while time.monotonic() < end and not (out.is_file() and out.stat().st_size > 1000):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and b"Traceback" not in err
    kept = records(out)
    said_so = " ".join(err.decode().split())
    assert 0 < len(kept) < 3000
    assert (
        f"stopped: {len(kept):,} of 3,000 responses are in {out}" in said_so and "run the same command again" in said_so
    )


def test_ctrl_c_does_not_wait_for_a_server(talker: str, tmp_path: Path) -> None:
    def behave(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number:
            time.sleep(30)
        return said("Yes.")

    prompts, out = write(tmp_path, [{"prompt": "one"}, {"prompt": "two"}]), tmp_path / "o.jsonl"
    with serve(behave) as server:
        words = ("--prompts", prompts, "--out", str(out), "--server", server.url, "--concurrency", "1")
        with spawn("data", "generate", talker, *words) as process:
            while len(server.asked) < 2 and process.poll() is None:
                time.sleep(0.05)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and time.monotonic() - began < 10 and b"1 of 2 responses" in err
    assert len(records(out)) == 1


@pytest.mark.parametrize(
    "words, part",
    [
        (("--out", "/nowhere/out.jsonl"), "no such folder"),
        (("--out", "out.jsonl.gz"), "plain .jsonl"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--thinking", "maybe"), "expected on or off"),
        (("--served-model", "x"), "needs a --server"),
        (("--server", "localhost:1"), "http://"),
        (("--server", "http://x/v1", "--concurrency", "0"), "concurrency is 0"),
        (("--server", "http://x/v1", "--spec-method", "ngram", "--spec-tokens", "2"), "drafts by its own settings"),
        (
            (
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",'
                ' "synthetic_acceptance_length": 2}',
            ),
            "would not be the target's",
        ),
        (("--set", "engine.blok_size=1"), "engine.block_size"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(
    here: Here, talker: str, tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    out = tmp_path / "o.jsonl"
    usual = ("--prompts", write(tmp_path, [{"prompt": "one"}]), "--out", str(out))
    assert part in one_line(here("data", "generate", talker, *usual, *words))
    assert not out.exists()


def test_other_settings_than_the_files_are_refused(here: Here, talker: str, tmp_path: Path) -> None:
    usual = ("--prompts", write(tmp_path, [{"prompt": "one"}]), "--out", str(tmp_path / "o.jsonl"), *SMALL)
    assert here("data", "generate", talker, *usual).code == 0
    assert "another temperature (0.0, now 0.5)" in one_line(
        here("data", "generate", talker, *usual, "--temperature", "0.5")
    )


def corpus(folder: Path) -> str:
    leaked = workloads.load("chat")[0].turns[0]
    good = {"prompt_ids": [5, 6], "response_ids": [7, 8, 8], "kind": "math"}
    chats = [
        {"messages": [{"role": "user", "content": leaked}, {"role": "assistant", "content": "Yes."}], "kind": "chat"},
        {"conversations": [{"from": "human", "value": "Hm"}, {"from": "gpt", "value": "No."}]},
    ]
    file = folder / "corpus.jsonl"
    lines = [good, good, *chats, {"text": "x"}, {"prompt_ids": [VOCAB], "response_ids": [1]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n{\n")
    return str(file)


def test_inspect_counts(here: Here, talker: str, tmp_path: Path) -> None:
    ended = here("data", "inspect", corpus(tmp_path), "--target", talker, "--json")
    found = json.loads(ended.out)
    refused = {"of no known shape": 1, "with ids beyond the vocabulary": 1, "empty": 1, "not JSON": 1}
    assert found["refused"] == refused and found["num_conversations"] == 4
    assert found["num_response_tokens"] == 3 + 3 + len("Yes.") + 1 + len("No.") + 1
    assert found["kinds"] == {"math": 2, "chat": 1, "": 1} and found["num_repeated_prompts"] == 1
    assert found["evaluation_prompts"]["chat"] == 1 and sum(found["evaluation_prompts"].values()) == 1
    assert set(found["coverage"]) == {"1024", "2048", "4096", "8192", "16384", "32768"}


def test_inspect_fits_a_terminal_and_warns(here: Here, talker: str, tmp_path: Path) -> None:
    file = corpus(tmp_path)
    with open(file, "a") as more:
        more.write(json.dumps({"prompt_ids": [1], "response_ids": [2], "kind": "a kind " * 20}) + "\n")
    ended = here("data", "inspect", file, "--target", talker)
    assert ended.code == 0 and max(map(len, ended.out.splitlines())) <= 80
    for text in ("refused: not JSON", "math", "40.0%", "draft vocabulary", "32k", "longest", "100.00%", "(none)"):
        assert text in ended.out
    assert "evaluation prompts are in it (1 of chat)" in ended.err


def test_max_len_and_the_targets_context_refuse_what_is_longer(here: Here, talker: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    longest = tiny_config().max_position_embeddings
    lines = [{"prompt_ids": [5], "response_ids": [6] * length} for length in (2, 9, longest)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = json.loads(here("data", "inspect", str(file), "--target", talker, "--json").out)
    assert own["refused"] == {f"longer than {longest} tokens": 1}
    less = here("data", "inspect", str(file), "--target", talker, "--max-len", "5", "--json")
    assert json.loads(less.out)["refused"] == {"longer than 5 tokens": 2}


@pytest.mark.parametrize(
    "words, part",
    [
        (("nowhere.jsonl",), "nowhere.jsonl"),
        (("README.md",), "no usable conversation"),
        (("README.md", "--max-len", "1"), "max_len is 1"),
        (("README.md", "--thinking", "yes"), "expected on or off"),
    ],
)
def test_what_cannot_be_inspected_is_one_line(
    here: Here, talker: str, tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    (tmp_path / "README.md").write_text("# Hello\n")
    path = str(tmp_path / words[0])
    assert part in one_line(here("data", "inspect", path, "--target", talker, *words[1:]))


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_each_of_its_verbs_has_help(here: Here, verb: str) -> None:
    ended = here("data", verb, "--help")
    assert ended.code == 0 and ended.out.startswith(f"Usage: outrider data {verb}")
