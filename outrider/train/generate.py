"""Makes a training corpus: the target's own answers to a file of prompts, turn by turn, each on disk as it comes.

Drafters learn what the target says under the sampling that it is deployed with, so answers that come with the prompts
are left out and made again. Who answers is an `Answerer`: the engine here, or any server (served.py). Not here: the
shapes of lines (conversations.py) and the file (responses.py).
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.errors import LoadError
from outrider.train.conversations import Chat, Message, Refused, checked, ids_of, parse, questions_of
from outrider.train.corpus import lines_of
from outrider.train.responses import ResponseFile
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM

_AT_ONCE = 256
"""Requests given to the engine at a time: it batches them as it can, and few run alone at the end of each lot."""

Progress = Callable[[str, int, int, str], None]
"""Called with what is done, how many responses there are, out of how many, and a note on the speed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One turn to answer: where its prompt stands, the messages up to it (None where only ids were given), its ids."""

    line: int
    turn: int
    messages: tuple[Message, ...] | None
    prompt_ids: tuple[int, ...]

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """The sampling of this task: a seed of its own, the same whenever and in whatever company it runs."""
        return replace(params, seed=((params.seed or 0) + self.line + (self.turn << 32)) % 2**63)


@dataclass(frozen=True)
class Answer:
    """What the target said, end-of-turn token included, and why it ended ("stop" or "length")."""

    response_ids: list[int]
    finish: str


class Answerer(Protocol):
    """Whoever makes the target's answers."""

    def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer | Refused]]:
        """Every task's answer, or why there is none, in the order in which they come. Raises BackendError."""


@dataclass
class _Conversation:
    """A line of the prompt file: its questions, each the messages that end with a user turn, or a prompt of ids."""

    kind: str
    turns: list[list[Message]] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()

    @property
    def num_turns(self) -> int:
        return len(self.turns) or 1


class Prompts:
    """The conversations of a prompt file, by line number from 1, and how many lines cannot be used, by reason.

    Raises LoadError if the file cannot be read or nothing in it is usable.
    """

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        self.conversations: dict[int, _Conversation] = {}
        self.refused: Counter[str] = Counter()
        digest = hashlib.sha256()
        for number, line in enumerate(lines_of(path), start=1):
            digest.update(line)
            try:
                self.conversations[number] = _conversation(line, vocab_size)
            except Refused as reason:
                self.refused[str(reason)] += 1
        self.sha256 = digest.hexdigest()
        if not self.conversations:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common(5)) or "it is empty"
            raise LoadError(f"{path}: no usable prompt ({reasons})")

    @property
    def num_turns(self) -> int:
        """Responses that there are to make."""
        return sum(conversation.num_turns for conversation in self.conversations.values())

    @property
    def of_several_turns(self) -> set[int]:
        """Lines whose later turns build on the answers to earlier ones."""
        return {number for number, conversation in self.conversations.items() if conversation.num_turns > 1}


class Maker:
    """Makes what is missing in a response file. `num_made` and `refused` are true at any time, after Ctrl-C too."""

    def __init__(self, prompts: Prompts, chat: Chat, vocab_size: int, params: SamplingParams) -> None:
        self._prompts, self._chat, self._vocab_size, self._params = prompts, chat, vocab_size, params
        self.refused: Counter[str] = Counter(prompts.refused)
        self.num_made = 0
        self.num_tokens = 0
        self._dead: set[int] = set()

    def run(self, answerer: Answerer, out: ResponseFile, progress: Progress) -> None:
        """Every first turn, then every second one, and so on.

        Raises LoadError if every prompt is refused, BackendError and CapacityError with what was made in the file.
        """
        began, total = time.perf_counter(), self._prompts.num_turns
        progress("responses", len(out.written), total, "")
        for turn in range(max(item.num_turns for item in self._prompts.conversations.values())):
            for task, answer in answerer.answers(self._tasks(turn, out)):
                if isinstance(answer, Refused):
                    self._refuse(task.line, task.turn, answer)
                    continue
                out.append(self._record(task, answer))
                self.num_made += 1
                self.num_tokens += len(answer.response_ids)
                speed = self.num_tokens / (time.perf_counter() - began)
                progress("responses", len(out.written), total, f"{len(out.written)}/{total}, {speed:.0f} tok/s")
        if not out.written:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common(5))
            raise LoadError(f"no prompt could be answered ({reasons})")

    def _tasks(self, turn: int, out: ResponseFile) -> Iterator[Task]:
        for line, conversation in self._prompts.conversations.items():
            if turn < conversation.num_turns and (line, turn) not in out.written and line not in self._dead:
                try:
                    yield self._task(line, turn, conversation, out)
                except Refused as reason:
                    self._refuse(line, turn, reason)

    def _task(self, line: int, turn: int, conversation: _Conversation, out: ResponseFile) -> Task:
        if not conversation.turns:
            return Task(line=line, turn=turn, messages=None, prompt_ids=conversation.prompt_ids)
        messages: list[Message] = list(conversation.turns[0])
        for earlier in range(turn):
            answer = self._chat.tokenizer.decode(out.response_ids[line, earlier])
            messages += [{"role": "assistant", "content": answer}, *conversation.turns[earlier + 1]]
        ids = checked(self._chat.prompt_ids(messages), self._vocab_size).tolist()
        return Task(line=line, turn=turn, messages=tuple(messages), prompt_ids=tuple(ids))

    def _refuse(self, line: int, turn: int, reason: Refused) -> None:
        """Count the turn and those that would follow it."""
        self._dead.add(line)
        self.refused[str(reason)] += self._prompts.conversations[line].num_turns - turn

    def _record(self, task: Task, answer: Answer) -> dict[str, Any]:
        return {
            "kind": self._prompts.conversations[task.line].kind,
            "temperature": self._params.temperature,
            "prompt_ids": list(task.prompt_ids),
            "response_ids": answer.response_ids,
            "finish": answer.finish,
            "line": task.line,
            "turn": task.turn,
        }


class EngineAnswers:
    """Answers by our engine. `drafting_errors` says where a drafter failed and the target went on alone."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self.drafting_errors: set[str] = set()

    def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Answer | Refused]]:
        """Answers as requests end, a lot of tasks at a time."""
        waiting = iter(tasks)
        while lot := list(itertools.islice(waiting, _AT_ONCE)):
            fitting: list[Task] = []
            for task in lot:
                if len(task.prompt_ids) < self._llm.max_len:
                    fitting.append(task)
                else:
                    yield task, Refused("longer than the context")
            yield from self._run(fitting)

    def _run(self, tasks: list[Task]) -> Iterator[tuple[Task, Answer | Refused]]:
        params = [task.seeded(self._params) for task in tasks]
        generation = self._llm.start([task.prompt_ids for task in tasks], params)
        pairs = zip(tasks, generation.outputs, strict=True)
        running = {output.request_id: (task, output) for task, output in pairs}
        for delta in generation:
            if delta.finish_reason is None:
                continue
            task, output = running.pop(delta.request_id.partition("-")[0])
            choice = output.outputs[0]
            if choice.stats is not None and choice.stats.drafting_error:
                self.drafting_errors.add(choice.stats.drafting_error)
            yield task, answer_or_reason(choice.token_ids, delta.finish_reason)


def answer_or_reason(ids: list[int], finish: object) -> Answer | Refused:
    """An answer that a drafter can learn from, or why it is none."""
    if finish not in ("stop", "length"):
        return Refused(f"ended by {finish}")
    return Answer(ids, str(finish)) if ids else Refused("answered with nothing")


def _conversation(line: bytes, vocab_size: int) -> _Conversation:
    """One line's questions. Raises Refused."""
    entry = parse(line)
    kind = str(entry.get("kind") or "")
    if "prompt_ids" in entry:
        ids = ids_of(entry["prompt_ids"], vocab_size)
        if not len(ids):
            raise Refused("without a question")
        return _Conversation(kind, prompt_ids=tuple(ids.tolist()))
    turns: list[list[Message]] = [[]]
    for message in questions_of(entry):
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return _Conversation(kind, turns[:-1])


def settings_of(prompts: Prompts, params: SamplingParams, chat: Chat, **source: Any) -> dict[str, Any]:
    """What decides the text of the responses, for the file beside them; `source` is who answers."""
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens")
    sampling = {name: getattr(params, name) for name in names}
    return {"prompts": prompts.sha256, **source, **sampling, "thinking": chat.thinking}
