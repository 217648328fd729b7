"""Reading corpora: every shape of line gives the ids that the target would see, and what is refused is counted."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import LoadError
from outrider.text.tokenizer import Tokenizer
from outrider.train.conversations import Chat, Refused
from outrider.train.corpus import Corpus, limits_of, read_corpus, split_by_prompt
from tests.kit.talker import END, NEWLINES, START, TEMPLATE, VOCAB, save_talker

GOOD = {"prompt_ids": [5, 6], "response_ids": [7, END], "kind": "math"}
ASK = {"role": "user", "content": "Why?"}
TELL = {"role": "assistant", "content": "So."}


def read(tmp_path: Path, lines: list[Any], chat: Chat | None = None, max_len: int = 100) -> Corpus:
    file = tmp_path / "corpus.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return read_corpus(file, vocab_size=VOCAB, max_len=max_len, chat=chat)


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    corpus = read(tmp_path, [GOOD])
    assert corpus.samples[0].ids.tolist() == [5, 6, 7, END]
    assert corpus.samples[0].is_response.tolist() == [False, False, True, True]
    assert corpus.samples[0].kind == "math" and corpus.num_response_tokens == 2 and not corpus.refused


def test_a_gzipped_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(read_corpus(file, vocab_size=VOCAB, max_len=100).samples) == 1
    whole = file.read_bytes()
    for broken in (whole[:-12], whole[:10] + b"\xff" * 20 + whole[30:], b"hello"):
        file.write_bytes(broken)
        with pytest.raises(LoadError, match=r"corpus\.jsonl\.gz: cannot be read"):
            read_corpus(file, vocab_size=VOCAB, max_len=100)


def test_a_chat_is_what_the_server_would_see_with_every_answer_marked(tmp_path: Path, chat: Chat) -> None:
    messages = [{"role": "system", "content": "Be brief."}, ASK, TELL, {"role": "user", "content": "Oh\n\né?"}, TELL]
    sample = read(tmp_path, [{"messages": messages, "kind": "x"}], chat).samples[0]
    tokenizer = chat.tokenizer
    answer = [*tokenizer.encode("So.", add_special_tokens=False), END]
    first, second = tokenizer.encode_chat(messages[:2]), tokenizer.encode_chat(messages[:4])
    assert sample.ids.tolist() == second + answer
    assert sample.ids[: len(first)].tolist() == first
    marked = [place for place, is_response in enumerate(sample.is_response) if is_response]
    expected = [*range(len(first), len(first) + len(answer)), *range(len(second), len(second) + len(answer))]
    assert marked == expected and sample.kind == "x"


def test_what_follows_the_last_answer_is_cut(tmp_path: Path, chat: Chat) -> None:
    corpus = read(tmp_path, [{"messages": [ASK, TELL]}, {"messages": [ASK, TELL, ASK]}], chat)
    assert corpus.samples[0].ids.tolist() == corpus.samples[1].ids.tolist()
    assert corpus.samples[0].ids[-1] == END


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}],
        [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": "So."}],
        [ASK, TELL],
    ],
    ids=["human and gpt", "user and assistant", "role and content"],
)
def test_sharegpt_lines_are_chats(tmp_path: Path, chat: Chat, turns: list[dict[str, str]]) -> None:
    corpus = read(tmp_path, [{"messages": [ASK, TELL]}, {"conversations": turns}], chat)
    assert corpus.samples[0].ids.tolist() == corpus.samples[1].ids.tolist()
    assert corpus.samples[0].is_response.tolist() == corpus.samples[1].is_response.tolist()


def test_a_sharegpt_system_turn_is_a_system_message(tmp_path: Path, chat: Chat) -> None:
    turns = [{"from": "system", "value": "Hm"}, {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    corpus = read(tmp_path, [{"conversations": turns}], chat)
    assert chat.tokenizer.decode(corpus.samples[0].ids.tolist(), False).startswith("<|start|>system\nHm<|end|>")


REFUSED: dict[str, tuple[Any, str]] = {
    "blank": ("   ", "empty"),
    "cut JSON": ('{"prompt_ids": [1', "not JSON"),
    "not UTF-8 JSON": ('{"a": "\\ud8"}', "not JSON"),
    "bottomless": ("[" * 100_000, "not JSON"),
    "a list": ([1, 2], "of no known shape"),
    "other keys": ({"text": "hello"}, "of no known shape"),
    "half the keys": ({"prompt_ids": [1]}, "of no known shape"),
    "id too high": (GOOD | {"response_ids": [VOCAB]}, "with ids beyond the vocabulary"),
    "id below 0": (GOOD | {"prompt_ids": [-1]}, "with ids beyond the vocabulary"),
    "ids as text": (GOOD | {"prompt_ids": ["5"]}, "with ids that are not integers"),
    "ids as bool": (GOOD | {"prompt_ids": [True]}, "with ids that are not integers"),
    "no response": (GOOD | {"response_ids": []}, "without a prompt or a response"),
    "no prompt": (GOOD | {"prompt_ids": []}, "without a prompt or a response"),
    "too many ids": (GOOD | {"response_ids": [7] * 99}, "longer than 100 tokens"),
    "too long a text": ({"messages": [ASK, TELL | {"content": "o" * 100}]}, "longer than 100 tokens"),
    "no messages": ({"messages": []}, "of no known shape"),
    "messages as text": ({"messages": "hello"}, "of no known shape"),
    "a message as text": ({"messages": [ASK, "So."]}, "of no known shape"),
    "unknown speaker": ({"conversations": [{"from": "bing", "value": "x"}]}, "with a speaker who is not known"),
    "no speaker": ({"conversations": [{"value": "x"}]}, "of no known shape"),
    "content of parts": (
        {"messages": [ASK | {"content": [{"type": "image"}]}, TELL]},
        "with a message that is not text",
    ),
    "no content": ({"messages": [ASK, {"role": "assistant", "content": None}]}, "with a message that is not text"),
    "only a question": ({"messages": [ASK]}, "without an answer"),
    "only an answer": ({"messages": [TELL, ASK]}, "beginning with an answer"),
    "tools on offer": ({"messages": [ASK, TELL], "tools": [{"name": "f"}]}, "with tools"),
    "tools called": ({"messages": [ASK, TELL | {"tool_calls": [{}]}]}, "with tools"),
    "a lone surrogate": (
        '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
    )
    + ("not valid Unicode text",),
}


@pytest.mark.parametrize("line, reason", REFUSED.values(), ids=REFUSED)
def test_a_line_that_cannot_be_used_is_counted_by_reason(tmp_path: Path, chat: Chat, line: Any, reason: str) -> None:
    corpus = read(tmp_path, [GOOD, line, GOOD, line], chat)
    assert len(corpus.samples) == 2 and corpus.refused == Counter({reason: 2})


def test_text_whose_ids_the_target_does_not_have_is_refused(tmp_path: Path, chat: Chat) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps({"messages": [ASK, TELL]}) + "\n")
    corpus = read_corpus(file, vocab_size=20, max_len=100, chat=chat)
    assert len(corpus.samples) == 1 and corpus.refused == Counter({"with ids beyond the vocabulary": 1})


def test_the_templates_own_complaint_is_the_reason(tmp_path: Path, chat: Chat) -> None:
    corpus = read(tmp_path, [GOOD, {"messages": [ASK, {"role": "tool", "content": "4"}, TELL]}], chat)
    assert [count for reason, count in corpus.refused.items() if "no tools here" in reason] == [1]


def test_text_without_a_tokenizer_or_a_template_is_refused(tmp_path: Path) -> None:
    line = {"messages": [ASK, TELL]}
    assert read(tmp_path, [GOOD, line]).refused == Counter({"of text, and no tokenizer to read it was given": 1})
    bare = Chat(Tokenizer.load(save_talker(tmp_path / "bare", template=None)))
    assert [reason for reason in read(tmp_path, [GOOD, line], bare).refused if "no chat template" in reason]


def test_a_token_over_the_border_of_an_answer_is_refused(tmp_path: Path, chat: Chat) -> None:
    """Seen again as part of a later prompt, an answer that begins with a newline melts into the template's own."""
    first = {"messages": [ASK, {"role": "assistant", "content": "\nSo."}]}
    again = {"messages": [*first["messages"], ASK, TELL]}
    corpus = read(tmp_path, [first, again], chat)
    assert corpus.refused == Counter({"where a token reaches over the border of an answer": 1})
    assert NEWLINES in chat.tokenizer.encode_chat(again["messages"])
    assert NEWLINES not in corpus.samples[0].ids, "alone, the answer begins where the target begins it"


@pytest.mark.parametrize(
    "template, reason",
    [
        (TEMPLATE.replace("<|start|>assistant\n", "<|start|>bot\n"), "rewrites the prompt of an answer"),
        (
            TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '-' }}"),
            "rewrites earlier answers",
        ),
    ],
)
def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path, template: str, reason: str) -> None:
    chat = Chat(Tokenizer.load(save_talker(tmp_path / "other", template=template)))
    corpus = read(tmp_path, [GOOD, {"messages": [ASK, TELL, ASK, TELL]}], chat)
    assert len(corpus.samples) == 1 and [count for text, count in corpus.refused.items() if reason in text] == [1]


def test_a_template_without_an_end_token_marks_the_whole_answer(tmp_path: Path) -> None:
    chat = Chat(Tokenizer.load(save_talker(tmp_path / "open", template=TEMPLATE.replace("<|end|>\n", "\n"))))
    sample = read(tmp_path, [{"messages": [ASK, TELL]}], chat).samples[0]
    assert chat.tokenizer.decode(sample.ids[sample.is_response].tolist(), False) == "So.\n"


def test_thinking_reaches_the_template(talker: Path) -> None:
    tokenizer = Tokenizer.load(talker)
    texts = [tokenizer.decode(Chat(tokenizer, thinking).prompt_ids([ASK])) for thinking in (None, False, True)]
    assert [text.endswith("<think>") for text in texts] == [False, False, True]
    assert Chat(tokenizer).knows_thinking


def test_nothing_usable_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="2 not JSON, 1 empty"):
        read(tmp_path, ["{", "", "["])
    with pytest.raises(LoadError, match="it is empty"):
        read(tmp_path, [])
    with pytest.raises(LoadError, match="cannot be read"):
        read_corpus(tmp_path / "nowhere", vocab_size=VOCAB, max_len=9)


def test_an_answer_alone_is_its_ids_and_a_cut_one_has_no_end(chat: Chat) -> None:
    text = chat.tokenizer.encode("So.", add_special_tokens=False)
    assert chat.answer_ids([ASK], TELL, is_cut=False) == [*text, END]
    assert chat.answer_ids([ASK], TELL, is_cut=True) == text
    thought = chat.answer_ids([ASK], TELL | {"reasoning_content": "Hm"}, is_cut=False)
    assert chat.tokenizer.decode(thought, False) == "<think>Hm</think>So.<|end|>"


def test_reasoning_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    chat = Chat(
        Tokenizer.load(save_talker(tmp_path / "mute", template=TEMPLATE.replace("m.reasoning_content", "false")))
    )
    with pytest.raises(Refused, match="reasoning"):
        chat.answer_ids([ASK], TELL | {"reasoning_content": "Hm"}, is_cut=False)


def test_no_prompt_is_on_both_sides_of_the_split(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [2 + i % 100, 3], "response_ids": [4 + i // 100]} for i in range(200)]
    samples = read(tmp_path, lines).samples
    kept, held_out = split_by_prompt(samples, seed=3, held_out=0.3)
    assert len(kept) + len(held_out) == 200 and 20 < len(held_out) < 110
    assert not {sample.prompt_key for sample in kept} & {sample.prompt_key for sample in held_out}
    again = split_by_prompt(samples, seed=3, held_out=0.3)
    assert [sample.prompt_key for sample in again[0]] == [sample.prompt_key for sample in kept]


def test_limits_are_the_targets(talker: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(talker)
    assert limits_of(talker, tokenizer) == (VOCAB, 512)
    nested = {"model_type": "new", "text_config": {"vocab_size": 7, "max_position_embeddings": 9}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert limits_of(tmp_path, tokenizer) == (7, 9)
    (tmp_path / "config.json").write_text("{}")
    assert limits_of(tmp_path, tokenizer)[0] == tokenizer.vocab_size == NEWLINES + 1
    assert START == 0
