"""Prompts of a set as token ids for one model: through its chat template where it has one, else as plain text.

A conversation of several turns becomes one item a turn. The answers between the turns are the target's own, made once
by plain decoding before anything is measured, so every run that is compared reads the very same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.errors import RequestError
from outrider.evaluate.workloads import Prompt
from outrider.llm import LLM
from outrider.types import SamplingParams

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and out of how much."""


@dataclass(frozen=True)
class Item:
    """One prompt to answer: where it stands in its set, which turn it is, its ids, and the known answer if any."""

    prompt_index: int
    turn: int
    ids: tuple[int, ...]
    answer: str | None = None


def items_of(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, progress: Progress) -> list[Item]:
    """Every turn of every prompt, in order; the turns before the last are answered by `llm` under `params`.

    Raises RequestError naming the prompt that is too long for the model.
    """
    talks = [_Talk(index, prompt) for index, prompt in enumerate(prompts)]
    num_answers = sum(len(prompt.turns) - 1 for prompt in prompts)
    num_done = 0
    while open_talks := [talk for talk in talks if talk.has_turn_left]:
        for talk in open_talks:
            talk.ask(llm)
        unanswered = [talk for talk in open_talks if talk.has_turn_left]
        outputs = llm.generate([talk.items[-1].ids for talk in unanswered], _seeded(params, unanswered))
        for talk, output in zip(unanswered, outputs, strict=True):
            talk.hear(output.outputs[0].text)
        num_done += len(unanswered)
        if num_answers:
            progress("earlier turns", num_done, num_answers)
    return [item for talk in talks for item in talk.items]


def encode(llm: LLM, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """Ids of a conversation that the model is to go on with."""
    if llm.tokenizer.chat_template is None:
        return tuple(llm.tokenizer.encode("\n\n".join(message["content"] for message in messages)))
    return tuple(llm.tokenizer.encode_chat(messages))


class _Talk:
    """One conversation on its way."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self._prompt = index, prompt
        self.items: list[Item] = []
        self._messages: list[dict[str, str]] = []

    @property
    def has_turn_left(self) -> bool:
        return len(self.items) < len(self._prompt.turns)

    def ask(self, llm: LLM) -> None:
        turn = len(self.items)
        self._messages.append({"role": "user", "content": self._prompt.turns[turn]})
        ids = encode(llm, self._messages)
        if len(ids) >= llm.max_len:
            raise RequestError(
                f"prompt {self.index} has {len(ids)} tokens, the context takes {llm.max_len} with at least one to "
                "generate: leave it out or raise --max-model-len",
                param="prompt",
            )
        is_last = turn + 1 == len(self._prompt.turns)
        self.items.append(Item(self.index, turn, ids, self._prompt.answer if is_last else None))

    def hear(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


def _seeded(params: SamplingParams, talks: Sequence[_Talk]) -> list[SamplingParams]:
    return [replace(params, seed=(params.seed or 0) + talk.index) for talk in talks]
