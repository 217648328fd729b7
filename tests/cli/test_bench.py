"""`outrider bench`: the JSON that was promised, numbers that add up, and one line for what cannot be measured."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.kit.command import TIMEOUT_S, Here, spawn

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
QUICK = ("--num-prompts", "3", "--max-tokens", "12", "--repeats", "1")


@pytest.mark.real
@pytest.mark.parametrize("concurrency", ["1", "2"])
def test_the_json_has_what_was_promised_and_adds_up(smollm2: str, here: Here, tmp_path: Path, concurrency: str) -> None:
    file = tmp_path / "out.json"
    words = ("--dataset", "copy", "--concurrency", concurrency, "--json", str(file), *QUICK)
    ended = here("bench", smollm2, "--speculative-config", NGRAM, "--also", NGRAM.replace("4", "2"), *words)
    assert ended.code == 0, ended.err
    found = json.loads(file.read_text())
    speculative, plain, speedup = found["speculative"], found["plain"], found["speedup"]
    assert speculative["acceptance_histogram"] and sum(speculative["acceptance_histogram"]) == speculative["num_drafts"]
    accepted = sum(speculative["per_position_acceptance"])
    assert speculative["mean_acceptance_length"] == pytest.approx(1 + accepted)
    assert 0 < speculative["acceptance_rate"] <= 1
    assert speedup["ratio"] == pytest.approx(speculative["tok_s"] / plain["tok_s"])
    assert speedup["low"] <= speedup["ratio"] <= speedup["high"]
    assert found["lossless"]["verdict"] == "same" and found["lossless"]["num_tokens"] == plain["num_tokens"]
    assert found["lossless"]["max_margin"] == 0
    assert sum(found["time"].values()) == pytest.approx(speculative["seconds"])
    assert {"dtype", "cpu", "torch", "prompts", "sampling", "engine", "concurrency"} <= set(found["conditions"])
    assert found["peak_memory_bytes"] > 200e6
    assert [run["speculative_config"]["num_speculative_tokens"] for run in found["runs"]] == [4, 2]
    assert "text: same" in ended.out and max(map(len, ended.out.splitlines())) <= 100


@pytest.mark.real
def test_scores_compare_both_sides(smollm2: str, here: Here, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    ended = here(
        "bench", smollm2, "--speculative-config", NGRAM, "--dataset", "math", "--score", "--json", str(file), *QUICK
    )
    assert ended.code == 0, ended.err
    found = json.loads(file.read_text())
    assert found["num_answers"] == 3
    assert found["plain"]["num_right"] == found["speculative"]["num_right"]


@pytest.mark.real
def test_synthetic_acceptance_says_that_the_text_is_not_the_targets(smollm2: str, here: Here) -> None:
    config = NGRAM[:-1] + ', "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}'
    ended = here("bench", smollm2, "--speculative-config", config, "--dataset", "copy", *QUICK)
    assert ended.code == 0 and "not-applicable" in ended.out and "not the target's" in ended.err


@pytest.mark.real
def test_ctrl_c_shows_what_was_measured(smollm2: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ("--dataset", "copy", "--num-prompts", "4", "--max-tokens", "8", "--repeats", "5000", "--json", str(file))
    with spawn("bench", smollm2, "--speculative-config", NGRAM, *words) as process:
        time.sleep(12)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
    assert b"tok/s" in out and json.loads(file.read_text())["is_complete"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "speculative-config"),
        (("--speculative-config", '{"method": "ngrm", "num_speculative_tokens": 4}'), "ngram"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 0}'), "num_speculative_tokens"),
        (("--speculative-config", NGRAM, "--dataset", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--speculative-config", NGRAM, "--json", "/nowhere/out.json"), "no such folder"),
        (("--speculative-config", NGRAM, "--concurrency", "0"), "concurrency"),
        (("--speculative-config", NGRAM, "--turns", "some"), "turns"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(here: Here, words: tuple[str, ...], said: str) -> None:
    ended = here("bench", "smollm2", *words)
    assert ended.code == 2 and ended.err.count("\n") == 1 and said in ended.err
