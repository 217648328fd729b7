"""Conversations as other people write them, and as the target reads them: messages to ids, the answers marked.

Understood are chat messages ({"role", "content"}), ShareGPT's ({"from", "value"}) and lines that only ask ("turns",
"prompt"). A line that cannot be used is a `Refused` with a reason that can be counted. Every answer is set apart by
rendering the chat template up to it, as a server would, and then with it. Not here: files, and who answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import RequestError
from outrider.text.tokenizer import Tokenizer

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Who speaks in ShareGPT's files, in the words of chat templates."""
_REASONING_KEYS = ("reasoning_content", "reasoning")
_LONGEST_REASON = 100


class Refused(Exception):  # noqa: N818 - nothing failed: the line is counted under this reason, and the next one read
    """This line cannot be used; the text says why, in words that are the same for all lines with that fault."""


@dataclass(frozen=True)
class Chat:
    """How conversations of one target are written: its tokenizer with the chat template, and what the template is told.

    `thinking` reaches the template as enable_thinking; None leaves it to the template.
    """

    tokenizer: Tokenizer
    thinking: bool | None = None

    @property
    def knows_thinking(self) -> bool:
        """Whether the template asks for enable_thinking at all."""
        return "enable_thinking" in (self.tokenizer.chat_template or "")

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that the target is to go on with. Raises Refused.

        A target without a chat template goes on with a lone prompt as it is.
        """
        if self.tokenizer.chat_template is None and len(messages) == 1:
            return self._ids(messages[0]["content"], is_whole=True)
        return self._ids(self._text(messages, is_open=True))

    def read(self, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """(ids [S], is_response [S]) up to the end of the last answer; each answer's end-of-turn token belongs to it.

        Raises Refused where there is no answer, or where the template or the tokenizer would show the target another
        prompt than the one before the answer.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise Refused("without an answer")
        if answers[0] == 0:
            raise Refused("beginning with an answer")
        text = ""
        ids: list[int] = []
        is_response: list[bool] = []
        for index in answers:
            prompt, whole = self._around(messages[:index], messages[index])
            if not prompt.startswith(text):
                raise Refused("where the chat template rewrites earlier answers")
            between, answer = self._ids(prompt[len(text) :]), self._ids(whole[len(prompt) :])
            if ids + between != self._ids(prompt):
                raise Refused("where a token reaches over the border of an answer")
            ids += between + answer
            end = self._end(answer)
            is_response += [False] * len(between) + [True] * end + [False] * (len(answer) - end)
            text = whole
        if True not in is_response:
            raise Refused("without an answer")
        last = len(is_response) - is_response[::-1].index(True)
        return np.array(ids[:last], dtype=np.int32), np.array(is_response[:last], dtype=np.bool_)

    def answer_ids(self, messages: Sequence[Message], answer: Message, *, is_cut: bool) -> list[int]:
        """Ids of the answer to these messages, given as text; without the end-of-turn token where it was cut.

        Raises Refused, also where the template leaves out the reasoning that came with the answer.
        """
        prompt, whole = self._around(messages, answer)
        written = whole[len(prompt) :]
        if any(str(answer[key]).strip() not in written for key in _REASONING_KEYS if key in answer):
            raise Refused("whose reasoning the chat template leaves out")
        ids = self._ids(written)
        ids = ids[: self._end(ids)]
        while is_cut and ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        return ids

    def _around(self, messages: Sequence[Message], answer: Message) -> tuple[str, str]:
        """The text that the answer is to follow, and the same with the answer."""
        prompt, whole = self._text(messages, is_open=True), self._text([*messages, answer])
        if not whole.startswith(prompt):
            raise Refused("where the chat template rewrites the prompt of an answer")
        return prompt, whole

    def _end(self, answer: Sequence[int]) -> int:
        """How many of these tokens the target is to produce: up to its end-of-turn token, not the newline after it."""
        ends = [place for place, token in enumerate(answer) if token in self.tokenizer.eos_ids]
        return ends[-1] + 1 if ends else len(answer)

    def _text(self, messages: Sequence[Message], *, is_open: bool = False) -> str:
        extra = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            return self.tokenizer.apply_chat_template(messages, is_open, **extra)
        except RequestError as error:
            raise Refused(str(error)[:_LONGEST_REASON]) from error

    def _ids(self, text: str, *, is_whole: bool = False) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=is_whole)
        except RequestError as error:
            raise Refused("not valid Unicode text") from error


def parse(line: bytes) -> dict[str, Any]:
    """One line's object. Raises Refused."""
    if not line.strip():
        raise Refused("empty")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused("not JSON") from error
    if not isinstance(entry, dict):
        raise Refused("of no known shape")
    if entry.get("tools"):
        raise Refused("with tools")
    return entry


def messages_of(entry: Mapping[str, Any]) -> list[Message]:
    """The conversation of a line that has messages or conversations. Raises Refused."""
    key = next((key for key in ("messages", "conversations") if key in entry), None)
    values = entry[key] if key else None
    if not isinstance(values, list) or not values:
        raise Refused("of no known shape")
    return [_message(value) for value in values]


def questions_of(entry: Mapping[str, Any]) -> list[Message]:
    """What a line asks: system messages and user turns in order, answers left out. Raises Refused."""
    if "messages" in entry or "conversations" in entry:
        messages = messages_of(entry)
        if any(message["role"] not in _ROLES.values() for message in messages):
            raise Refused("with a speaker who is not known")
        asked = [message for message in messages if message["role"] != "assistant"]
    else:
        turns = entry.get("turns", [entry["prompt"]] if "prompt" in entry else None)
        if not isinstance(turns, list):
            raise Refused("of no known shape")
        asked = [_message({"role": "user", "content": turn}) for turn in turns]
    if not any(message["role"] == "user" and message["content"].strip() for message in asked):
        raise Refused("without a question")
    return asked


def ids_of(values: Any, vocab_size: int) -> npt.NDArray[np.int32]:
    """Token ids as a line has them. Raises Refused."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise Refused("with ids that are not integers")
    return checked(values, vocab_size)


def checked(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """Ids [S] int32 that the target has. Raises Refused."""
    found = list(ids)
    if found and not 0 <= min(found) <= max(found) < vocab_size:
        raise Refused("with ids beyond the vocabulary")
    return np.array(found, dtype=np.int32)


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise Refused("of no known shape")
    role = value.get("role")
    if role is None:
        role = _ROLES.get(str(value.get("from")).lower())
        if role is None:
            raise Refused("with a speaker who is not known" if "from" in value else "of no known shape")
    if value.get("tool_calls"):
        raise Refused("with tools")
    content = value.get("content", value.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise Refused("with a message that is not text")
    return {"role": role, "content": content} | {key: value[key] for key in _REASONING_KEYS if value.get(key)}
