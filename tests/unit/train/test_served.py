"""Responses from a server: its text becomes the target's ids, faults are met with patience, and nothing is lost."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import BackendError, ConfigError, LoadError
from outrider.train.conversations import Chat
from outrider.train.generate import Maker, Prompts, settings_of
from outrider.train.responses import ResponseFile
from outrider.train.served import KEY_VARIABLE, Server, ServerAnswers
from outrider.types import SamplingParams
from tests.kit.fake_server import Reply, said, serve
from tests.kit.talker import END, VOCAB

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=20, seed=100)
LINES: list[dict[str, Any]] = [{"prompt": f"question {number}"} for number in range(6)]


def write(folder: Path, lines: list[dict[str, Any]] = LINES) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def make(file: Path, chat: Chat, url: str, params: SamplingParams = PARAMS, **settings: Any) -> Maker:
    prompts = Prompts(file, vocab_size=VOCAB)
    maker = Maker(prompts, chat, VOCAB, params)
    server = Server(**({"url": url, "model": "tiny", "concurrency": 2, "pause_s": 0.01} | settings))
    answers = ServerAnswers(server, chat, params)
    with ResponseFile(file.with_name("out.jsonl"), settings_of(prompts, params, chat), prompts.of_several_turns) as out:
        maker.run(answers, out, lambda *told: None)
    return maker


def made(folder: Path) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {record["line"]: record for record in records if record["turn"] == 0}


def echo(body: dict[str, Any], number: int) -> Reply:
    return said("You said " + body["messages"][-1]["content"])


def test_text_becomes_the_targets_ids(tmp_path: Path, chat: Chat) -> None:
    with serve(echo) as server:
        maker = make(write(tmp_path), chat, server.url)
    records = made(tmp_path)
    assert maker.num_made == len(records) == 6 and not maker.refused
    for line, record in records.items():
        question = f"question {line - 1}"
        assert record["prompt_ids"] == chat.prompt_ids([{"role": "user", "content": question}])
        assert record["response_ids"] == [*chat.tokenizer.encode(f"You said {question}"), END]
        assert record["finish"] == "stop"
    assert set(server.paths) == {"/v1/chat/completions"}


def test_the_server_is_asked_as_deployed(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    lines = [{"messages": [{"role": "system", "content": "Hm"}, {"role": "user", "content": "Why?"}]}]
    with serve(echo) as server:
        make(write(tmp_path, lines), chat, server.url)
    assert server.asked[0] == {
        "model": "tiny",
        "messages": lines[0]["messages"],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 20,
        "seed": 101,
    }
    assert "Authorization" not in server.headers[0]


def test_top_k_thinking_and_the_key_reach_the_server(
    tmp_path: Path, talker: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    params = SamplingParams(temperature=0.7, top_k=9, max_tokens=20, seed=0)
    with serve(echo) as server:
        make(write(tmp_path), Chat(chat.tokenizer, thinking=False), server.url, params)
    assert server.asked[0]["top_k"] == 9 and server.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_an_answer_that_was_cut_has_no_end_token(tmp_path: Path, chat: Chat) -> None:
    with serve(lambda body, number: said("So it", "length")) as server:
        make(write(tmp_path, LINES[:1]), chat, server.url)
    assert (
        made(tmp_path)[1]["response_ids"] == chat.tokenizer.encode("So it") and made(tmp_path)[1]["finish"] == "length"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_beside_the_answer_is_part_of_it(tmp_path: Path, chat: Chat, key: str) -> None:
    with serve(lambda body, number: said("So.", **{key: "Hm"})) as server:
        make(write(tmp_path, LINES[:1]), chat, server.url)
    assert chat.tokenizer.decode(made(tmp_path)[1]["response_ids"], False) == "<think>Hm</think>So.<|end|>"


def test_ids_go_to_the_plain_endpoint(tmp_path: Path, chat: Chat) -> None:
    choice = {"text": "abc", "finish_reason": "stop"}
    with serve(lambda body, number: (200, {"choices": [choice]})) as server:
        make(write(tmp_path, [{"prompt_ids": [5, 6]}]), chat, server.url)
    assert server.paths == ["/v1/completions"] and server.asked[0]["prompt"] == [5, 6]
    assert made(tmp_path)[1]["response_ids"] == [*chat.tokenizer.encode("abc"), END]
    choice["stop_reason"] = 9  # type: ignore[assignment]
    (tmp_path / "out.jsonl").unlink()
    with serve(lambda body, number: (200, {"choices": [choice]})) as server:
        make(write(tmp_path, [{"prompt_ids": [5, 6]}]), chat, server.url)
    assert made(tmp_path)[1]["response_ids"][-1] == 9, "the server says which token ended it"


def test_a_later_turn_has_the_servers_own_answer(tmp_path: Path, chat: Chat) -> None:
    with serve(echo) as server:
        make(write(tmp_path, [{"turns": ["one", "two"]}]), chat, server.url)
    assert [message["content"] for message in server.asked[1]["messages"]] == ["one", "You said one", "two"]


def test_requests_run_side_by_side_and_not_more_than_allowed(tmp_path: Path, chat: Chat) -> None:
    lock, running, seen = threading.Lock(), [0], []

    def slow(body: dict[str, Any], number: int) -> Reply:
        with lock:
            running[0] += 1
            seen.append(running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return echo(body, number)

    lines = [{"prompt": f"question {number}"} for number in range(12)]
    with serve(slow) as server:
        make(write(tmp_path, lines), chat, server.url, concurrency=3)
    assert max(seen) == 3 and len(made(tmp_path)) == 12


PASSING: dict[str, Any] = {
    "status 500": (500, {"error": {"message": "out of luck"}}),
    "status 429": (429, {"error": "slow down"}),
    "no JSON": (200, b"<html>proxy</html>"),
    "cut JSON": (200, b'{"choices": [{"mess'),
    "another object": (200, {"object": "list"}),
    "no choices": (200, {"choices": []}),
    "text missing": (200, {"choices": [{"message": {}}]}),
    "text is a number": (200, {"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}),
}


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_costs_nothing(tmp_path: Path, chat: Chat, reply: Reply) -> None:
    with serve(lambda body, number: reply if number in (1, 2, 4) else echo(body, number)) as server:
        maker = make(write(tmp_path), chat, server.url)
    assert len(made(tmp_path)) == maker.num_made == 6 and not maker.refused and len(server.asked) == 9


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING)
def test_a_fault_that_stays_is_one_line_and_keeps_what_came(tmp_path: Path, chat: Chat, reply: Reply) -> None:
    file = write(tmp_path)
    with (
        serve(lambda body, number: echo(body, number) if number < 3 else reply) as server,
        pytest.raises(BackendError, match=r"run the same again") as caught,
    ):
        make(file, chat, server.url, concurrency=1)
    assert "\n" not in str(caught.value) and server.url in str(caught.value)
    assert len(server.asked) == 3 + 4 and set(made(tmp_path)) == {1, 2, 3}
    with serve(echo) as server:
        make(file, chat, server.url)
    assert len(server.asked) == 3 and len(made(tmp_path)) == 6


def test_answers_on_their_way_are_kept_when_another_request_fails(tmp_path: Path, chat: Chat) -> None:
    good = threading.Event()

    def behave(body: dict[str, Any], number: int) -> Reply:
        if body["messages"][-1]["content"] == "question 0":
            good.wait(5)
            return 404, {"error": {"message": "no such model"}}
        good.set()
        time.sleep(0.3)
        return echo(body, number)

    with serve(behave) as server, pytest.raises(BackendError, match="404 .no such model"):
        make(write(tmp_path), chat, server.url)
    assert 2 in made(tmp_path)


def test_nobody_there(tmp_path: Path, chat: Chat) -> None:
    with serve(echo) as server:
        pass
    with pytest.raises(BackendError, match="cannot be reached") as caught:
        make(write(tmp_path), chat, server.url)
    assert "\n" not in str(caught.value)


def test_no_answer_in_time(tmp_path: Path, chat: Chat) -> None:
    def sleep(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.3)
        return echo(body, number)

    with serve(sleep) as server, pytest.raises(BackendError, match=r"no answer within 0.05 s"):
        make(write(tmp_path), chat, server.url, timeout_s=0.05)


def test_a_request_that_is_refused_is_counted_and_the_others_go_on(tmp_path: Path, chat: Chat) -> None:
    def behave(body: dict[str, Any], number: int) -> Reply:
        if body["messages"][-1]["content"] in ("question 1", "question 2"):
            return 400, {"error": {"message": f"the prompt has {5000 + number} tokens"}}
        return echo(body, number)

    with serve(behave) as server:
        maker = make(write(tmp_path), chat, server.url)
    assert maker.refused == {"refused by the server: the prompt has … tokens": 2}
    assert set(made(tmp_path)) == {1, 4, 5, 6} and len(server.asked) == 6


def test_a_server_that_refuses_everything_is_not_asked_for_ever(tmp_path: Path, chat: Chat) -> None:
    def refuse(body: dict[str, Any], number: int) -> Reply:
        return 400, {"error": {"message": "unknown field seed"}}

    lines = [{"prompt": f"question {number}"} for number in range(200)]
    with serve(refuse) as server, pytest.raises(BackendError, match="first 20 prompts: .*unknown field seed"):
        make(write(tmp_path, lines), chat, server.url)
    assert len(server.asked) < 40
    (tmp_path / "few").mkdir()
    with serve(refuse) as server, pytest.raises(LoadError, match="no prompt could be answered .*unknown field seed"):
        make(write(tmp_path / "few"), chat, server.url)


@pytest.mark.parametrize(
    "reply, reason",
    [(said("", "length"), "answered with nothing"), (said("x", "tool_calls"), "ended by tool_calls")],
)
def test_an_answer_that_teaches_nothing_is_counted(tmp_path: Path, chat: Chat, reply: Reply, reason: str) -> None:
    with serve(lambda body, number: reply if number == 0 else echo(body, number)) as server:
        maker = make(write(tmp_path), chat, server.url)
    assert maker.refused == {reason: 1} and len(made(tmp_path)) == 5


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x:port/v1", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--server") as caught:
        Server(url=url, model="tiny")
    assert caught.value.param == "server"


def test_no_concurrency_is_refused() -> None:
    with pytest.raises(ConfigError, match="concurrency is 0"):
        Server(url="http://x/v1", model="tiny", concurrency=0)


def test_pauses_between_attempts_grow(tmp_path: Path, chat: Chat) -> None:
    times: list[float] = []

    def behave(body: dict[str, Any], number: int) -> Reply:
        times.append(time.monotonic())
        return (503, {}) if number < 3 else echo(body, number)

    with serve(behave) as server:
        make(write(tmp_path, LINES[:1]), chat, server.url, pause_s=0.05)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert len(gaps) == 3 and all(gap >= least for gap, least in zip(gaps, (0.05, 0.1, 0.2), strict=True))
