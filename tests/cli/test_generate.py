"""`outrider generate` with the built-in model: text on stdout alone, JSON that is JSON, and clean early ends."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.kit.command import TIMEOUT_S, Here, apart, spawn

pytestmark = pytest.mark.real
SHORT = ("--max-tokens", "8", "--ignore-eos")
ENDLESS = ("--max-tokens", "4000", "--ignore-eos")
PROMPT = "Name three rivers of Europe."


def test_json_is_valid_and_complete(smollm2: str, here: Here) -> None:
    ended = here("generate", smollm2, PROMPT, "Say hello.", "--json", "--n", "2", "--logprobs", "1", *SHORT)
    records = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.code == 0 and len(records) == 2
    for record in records:
        assert [choice["index"] for choice in record["outputs"]] == [0, 1]
        for choice in record["outputs"]:
            assert choice["finish_reason"] == "length"
            assert len(choice["token_ids"]) == len(choice["logprobs"]) == 8


def test_stdout_holds_the_text_alone_and_drafts_do_not_change_it(smollm2: str, here: Here) -> None:
    text = json.loads(here("generate", smollm2, PROMPT, "--json", *SHORT).out)["outputs"][0]["text"]
    plain = here("generate", smollm2, PROMPT, *SHORT)
    drafted = here("generate", smollm2, PROMPT, "--spec-method", "ngram", "--spec-tokens", "4", *SHORT)
    assert plain.out == drafted.out == f"{text}\n"
    assert "8 tokens in" in plain.err


def test_a_prompt_on_stdin_is_as_good_as_an_argument(smollm2: str, here: Here) -> None:
    ended = apart("generate", smollm2, *SHORT, text=PROMPT)
    assert ended.code == 0
    assert ended.out == here("generate", smollm2, PROMPT, *SHORT).out


def test_an_empty_stdin_is_refused(smollm2: str) -> None:
    ended = apart("generate", smollm2, text="\n")
    assert ended.code == 2 and "the prompt is empty" in ended.err


def test_a_prompt_beyond_the_context_is_refused_in_one_line(smollm2: str, here: Here) -> None:
    ended = here("generate", smollm2, "word " * 100, "--max-model-len", "64", "--raw")
    assert ended.code == 2 and ended.out == ""
    assert ended.err.count("\n") == 1 and "the context takes 64" in ended.err


def test_ctrl_c_keeps_what_was_generated_and_exits_with_130(smollm2: str) -> None:
    with spawn("generate", smollm2, PROMPT, *ENDLESS) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIMEOUT_S)
    assert len(first) == 20 and process.returncode == 130
    assert b"Traceback" not in err and b" tokens in " in err
    assert int(err.split(b" tokens in ")[0].split()[-1]) < 4000


def test_ctrl_c_with_json_still_prints_json(smollm2: str) -> None:
    for wait_s in (4, 8, 16, 32):  # stdout is empty until the end; on a slow machine the model may still be loading
        with spawn("generate", smollm2, PROMPT, "--json", *ENDLESS) as process:
            time.sleep(wait_s)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130 and b"Traceback" not in err
        if b" tokens in " in err:
            break
    assert json.loads(out)["outputs"][0]["finish_reason"] == "abort"


def test_a_reader_that_leaves_ends_it_quietly(smollm2: str) -> None:
    with spawn("generate", smollm2, PROMPT, *ENDLESS) as process:
        assert process.stdout is not None and process.stderr is not None
        started = time.monotonic()
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode != 0 and time.monotonic() - started < TIMEOUT_S / 2
    assert b"Traceback" not in err and b"BrokenPipe" not in err


def test_the_last_line_says_what_drafts_saved_or_cost_where_that_was_measured(smollm2: str, here: Here) -> None:
    words = ("generate", smollm2, PROMPT, "--max-tokens", "48", "--ignore-eos", "--speculative-config")
    guarded = here(*words, '{"method": "dspark"}')
    fixed = here(*words, '{"method": "dspark", "guard": false}')
    assert "; drafts saved about " in guarded.err or "; drafts cost about " in guarded.err
    assert "drafts saved" not in fixed.err and "drafts cost" not in fixed.err
    assert guarded.out == fixed.out
