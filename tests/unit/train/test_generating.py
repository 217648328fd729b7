"""Making a corpus: the responses are the target's own, each on disk as it comes, and a stopped run goes on."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import BackendError, CapacityError, ConfigError, LoadError
from outrider.llm import LLM
from outrider.text.tokenizer import Tokenizer
from outrider.train.conversations import Chat, Refused
from outrider.train.corpus import read_corpus
from outrider.train.generate import Answer, EngineAnswers, Maker, Prompts, Task, settings_of
from outrider.train.responses import ResponseFile, settings_path
from outrider.types import SamplingParams
from tests.kit.talker import END, VOCAB, save_talker

PARAMS = SamplingParams(temperature=0.9, max_tokens=12, seed=5)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
TALK = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}], "kind": "chat"}
LINES: list[Any] = [
    {"prompt": "one one one"},
    TALK,
    {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "old answer"}]},
    {"turns": ["three", "and four"]},
    {"prompt_ids": [5, 6, 7, 5, 6], "kind": "ids"},
]
KEYS = {(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (5, 0)}


class Scripted:
    """Answers with the number of the task and the end token, and keeps the tasks; `fault` comes after `num_good`."""

    def __init__(self, fault: BaseException | None = None, num_good: int = 10**9) -> None:
        self.tasks: list[Task] = []
        self._fault, self._num_good = fault, num_good

    def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer | Refused]]:
        for task in tasks:
            if self._fault is not None and len(self.tasks) == self._num_good:
                raise self._fault
            self.tasks.append(task)
            yield task, Answer([30 + task.line, END], "stop")


def write(folder: Path, lines: list[Any] = LINES) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def make(file: Path, chat: Chat, answerer: Any, params: SamplingParams = PARAMS, **source: Any) -> Maker:
    """Answer what is missing in `out.jsonl` beside the prompts."""
    prompts = Prompts(file, vocab_size=VOCAB)
    maker = Maker(prompts, chat, VOCAB, params)
    settings = settings_of(prompts, params, chat, **source)
    with ResponseFile(file.with_name("out.jsonl"), settings, prompts.of_several_turns) as out:
        maker.run(answerer, out, lambda *told: None)
    return maker


def made(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    found = {(record["line"], record["turn"]): record for record in records}
    assert len(found) == len(records), "the same turn was written twice"
    return found


@pytest.fixture(scope="module")
def llm(talker: Path) -> LLM:
    return LLM(str(talker), dtype="float32", kv_cache_tokens=4096, max_num_seqs=4)


def test_responses_are_the_targets_own_under_the_settings(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    maker = make(write(tmp_path), chat, EngineAnswers(llm, PARAMS))
    records = made(tmp_path)
    assert set(records) == KEYS and maker.num_made == len(KEYS) and not maker.refused
    user = [{"role": "user", "content": "one one one"}]
    for key, prompt in {(1, 0): chat.prompt_ids(user), (2, 0): chat.prompt_ids(TALK["messages"]), (5, 0): None}.items():
        record = records[key]
        assert record["prompt_ids"] == (prompt or [5, 6, 7, 5, 6])
        alone = llm.generate([record["prompt_ids"]], replace(PARAMS, seed=5 + key[0]))[0].outputs[0]
        assert (record["response_ids"], record["finish"]) == (alone.token_ids, alone.finish_reason)
        assert record["temperature"] == 0.9
    assert [records[key]["kind"] for key in ((1, 0), (2, 0), (5, 0))] == ["", "chat", "ids"]
    assert records[3, 0]["prompt_ids"] == chat.prompt_ids([{"role": "user", "content": "two"}]), (
        "old answers are left out"
    )
    assert len({tuple(record["response_ids"]) for record in records.values()}) == len(KEYS)


def test_a_target_without_a_chat_template_goes_on_with_the_prompt(tmp_path: Path) -> None:
    """As it stands, after the begin token if there is one; what would need a template is counted."""
    bare = Chat(Tokenizer.load(save_talker(tmp_path / "bare", template=None)))
    answerer = Scripted()
    maker = make(write(tmp_path, [{"prompt": "one one one"}, TALK]), bare, answerer)
    assert [task.prompt_ids for task in answerer.tasks] == [tuple(bare.tokenizer.encode("one one one"))]
    assert [count for reason, count in maker.refused.items() if "no chat template" in reason] == [1]


def test_a_later_turn_builds_on_the_targets_own_answer(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    make(write(tmp_path), chat, EngineAnswers(llm, PARAMS))
    first, second = made(tmp_path)[4, 0], made(tmp_path)[4, 1]
    said = {"role": "assistant", "content": chat.tokenizer.decode(first["response_ids"])}
    talk = [{"role": "user", "content": "three"}, said, {"role": "user", "content": "and four"}]
    assert second["prompt_ids"] == chat.prompt_ids(talk)


def test_drafts_do_not_change_the_corpus(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    (tmp_path / "plain").mkdir(), (tmp_path / "drafted").mkdir()
    make(write(tmp_path / "plain"), chat, EngineAnswers(llm, PARAMS))
    drafting = llm.sibling(NGRAM)
    make(write(tmp_path / "drafted"), chat, EngineAnswers(drafting, PARAMS))
    assert drafting.engine.stats.speculation.num_draft_tokens > 0
    assert made(tmp_path / "plain") == made(tmp_path / "drafted")


def test_more_prompts_than_the_engine_is_given_at_once(
    tmp_path: Path, chat: Chat, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.generate._AT_ONCE", 2)
    make(write(tmp_path), chat, EngineAnswers(llm, PARAMS))
    assert set(made(tmp_path)) == KEYS


def test_what_was_made_can_be_trained_on(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    make(write(tmp_path), chat, EngineAnswers(llm, PARAMS))
    corpus = read_corpus(tmp_path / "out.jsonl", vocab_size=VOCAB, max_len=512)
    assert len(corpus.samples) == len(KEYS) and not corpus.refused
    expected = sum(len(record["response_ids"]) for record in made(tmp_path).values())
    assert corpus.num_response_tokens == expected


def test_every_response_is_on_disk_before_the_next_is_asked_for(tmp_path: Path, chat: Chat) -> None:
    class Watching(Scripted):
        def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer | Refused]]:
            for number, pair in enumerate(super().answers(tasks)):
                if pair[0].turn == 0:
                    assert len(made(tmp_path)) == number
                yield pair

    make(write(tmp_path), chat, Watching())
    assert set(made(tmp_path)) == KEYS


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), BackendError("gone")], ids=["Ctrl-C", "dead server"])
@pytest.mark.parametrize("num_good", [0, 2, 5])
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, chat: Chat, fault: BaseException, num_good: int) -> None:
    file = write(tmp_path)
    with pytest.raises(type(fault)):
        make(file, chat, Scripted(fault, num_good))
    assert len(made(tmp_path)) == num_good
    with (tmp_path / "out.jsonl").open("a") as out:
        out.write('{"kind":"","temperature":0.9,"prompt_ids":[1,2')
    rest = Scripted()
    maker = make(file, chat, rest)
    assert len(rest.tasks) == maker.num_made == len(KEYS) - num_good
    again = made(tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    make(write(whole), chat, Scripted())
    assert again == made(whole), "prompts and seeds do not depend on where it was stopped"
    finished = Scripted()
    assert make(file, chat, finished).num_made == 0 and not finished.tasks


def test_a_task_has_the_same_seed_in_any_company() -> None:
    task = Task(line=7, turn=0, messages=None, prompt_ids=(1,))
    assert task.seeded(PARAMS) == replace(PARAMS, seed=12)
    assert len({replace(task, line=line, turn=turn).seeded(PARAMS).seed for line in (7, 8) for turn in (0, 1)}) == 4
    assert task.seeded(replace(PARAMS, seed=2**63 - 1)).seed == 6


@pytest.mark.parametrize(
    "name, params, changed",
    [
        *((name, replace(PARAMS, **{name: 3}), None) for name in ("top_k", "max_tokens", "seed")),
        *((name, replace(PARAMS, **{name: 0.5}), None) for name in ("temperature", "top_p")),
        ("prompts", PARAMS, "prompts"),
        ("thinking", PARAMS, "thinking"),
        ("target", PARAMS, "target"),
        ("dtype", PARAMS, "dtype"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, chat: Chat, name: str, params: SamplingParams, changed: str | None
) -> None:
    file = write(tmp_path)
    make(file, chat, Scripted(), target="a")
    before = (tmp_path / "out.jsonl").read_bytes()
    if changed == "prompts":
        write(tmp_path, [*LINES, {"prompt": "more"}])
    told = replace(chat, thinking=True) if changed == "thinking" else chat
    more = {"dtype": "float32"} if changed == "dtype" else {}
    with pytest.raises(ConfigError, match=f"another {name} ") as caught:
        make(file, told, Scripted(), params, target="b" if changed == "target" else "a", **more)
    assert caught.value.param == name and (tmp_path / "out.jsonl").read_bytes() == before


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, chat: Chat) -> None:
    file, out = write(tmp_path), tmp_path / "out.jsonl"
    out.write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    with pytest.raises(ConfigError, match=r"without out\.jsonl\.settings\.json"):
        make(file, chat, Scripted())
    out.unlink()
    make(file, chat, Scripted())
    settings_path(out).write_text("{")
    with pytest.raises(LoadError, match="settings.json: cannot be read"):
        make(file, chat, Scripted())
    out.unlink()
    make(file, chat, Scripted())
    for foreign in ("hello\n", '{"line": 1}\n', "[1]\n"):
        out.write_text(foreign)
        with pytest.raises(LoadError, match="line 1: not a response"):
            make(file, chat, Scripted())
        assert out.read_text() == foreign


def test_a_full_disk_keeps_what_there_is_and_the_run_goes_on_later(tmp_path: Path, chat: Chat) -> None:
    file, limits = write(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    make(file, chat, Scripted())
    size = (tmp_path / "out.jsonl").stat().st_size
    (tmp_path / "out.jsonl").unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 20, limits[1]))
    try:
        with pytest.raises(CapacityError, match=r"out\.jsonl: cannot be written \(.*5 responses in it are kept"):
            make(file, chat, Scripted())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(made(tmp_path)) == 5 and (tmp_path / "out.jsonl").read_bytes().endswith(b"\n")
    rest = Scripted()
    make(file, chat, rest)
    assert len(rest.tasks) == 1 and set(made(tmp_path)) == KEYS


def test_lines_that_cannot_be_answered_are_counted(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    ask = {"role": "user", "content": "x"}
    lines = [
        *LINES[:1],
        "",
        "{",
        {"text": "hello"},
        {"prompt": "  "},
        {"prompt_ids": []},
        {"prompt_ids": [VOCAB]},
        {"messages": [{"role": "tool", "content": "4"}, ask]},
        {"messages": [ask], "tools": [{"name": "f"}]},
        {"turns": ["y" * 600, "and a second turn"]},
        {"prompt": 5},
    ]
    expected = {
        "empty": 1,
        "not JSON": 1,
        "of no known shape": 1,
        "without a question": 2,
        "with ids beyond the vocabulary": 1,
        "with a speaker who is not known": 1,
        "with tools": 1,
        "longer than the context": 2,
        "with a message that is not text": 1,
    }
    maker = make(write(tmp_path, lines), chat, EngineAnswers(llm, PARAMS))
    assert maker.refused == Counter(expected) and set(made(tmp_path)) == {(1, 0)}


def test_text_whose_ids_the_target_does_not_have_is_counted(tmp_path: Path, chat: Chat) -> None:
    prompts = Prompts(write(tmp_path, [{"prompt_ids": [5]}, {"prompt": "x"}]), vocab_size=20)
    maker = Maker(prompts, chat, 20, PARAMS)
    with ResponseFile(tmp_path / "out.jsonl", settings_of(prompts, PARAMS, chat)) as out:
        maker.run(Scripted(), out, lambda *told: None)
    assert maker.refused == Counter({"with ids beyond the vocabulary": 1}) and maker.num_made == 1


def test_no_usable_prompt_and_no_answer_are_errors(tmp_path: Path, chat: Chat, llm: LLM) -> None:
    with pytest.raises(LoadError, match="no usable prompt .1 not JSON"):
        make(write(tmp_path, ["{"]), chat, Scripted())
    with pytest.raises(LoadError, match="no prompt could be answered .1 longer than the context"):
        make(write(tmp_path, [{"prompt": "y" * 600}]), chat, EngineAnswers(llm, PARAMS))


def test_progress_tells_the_count_and_the_speed(tmp_path: Path, chat: Chat) -> None:
    file, told = write(tmp_path), []
    prompts = Prompts(file, vocab_size=VOCAB)
    with ResponseFile(tmp_path / "out.jsonl", settings_of(prompts, PARAMS, chat), prompts.of_several_turns) as out:
        Maker(prompts, chat, VOCAB, PARAMS).run(Scripted(), out, lambda *words: told.append(words))
    assert [(done, total) for _, done, total, _ in told] == [(count, 6) for count in range(7)]
    assert told[-1][3].startswith("6/6, ") and told[-1][3].endswith(" tok/s")
