"""Answers by a target that runs in an OpenAI-compatible server: a few requests at a time, repeated where they fail.

The server gives text; its ids are what the target's tokenizer and chat template make of that text. Where the server
drew other tokens for the same text, or the template trims the answer, these ids differ from what it drew. Standard
library only: no redirects are followed and no proxy is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import BackendError, ConfigError
from outrider.train.conversations import Chat, Message, Refused
from outrider.train.generate import Answer, Task, answer_or_reason
from outrider.types import SamplingParams

KEY_VARIABLE = "OPENAI_API_KEY"
_ATTEMPTS = 4
_REFUSALS = (400, 413, 422)
"""Statuses that are about one request, not about the server."""
_FIRST_REFUSALS = 20
"""A server that has refused this many requests, and answered none, is not asked further."""
_LONGEST_QUOTE = 160
_GRACE_S = 20.0
"""How long answers that are on their way are waited for once the server has failed another request."""

Outcome = Answer | Refused


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where the target is served, under which name, and how patiently it is asked. Raises ConfigError.

    `url` is the base that ends in /v1. A failed request is repeated after `pause_s`, then twice that, and so on.
    """

    url: str
    model: str
    concurrency: int = 8
    timeout_s: float = 600.0
    pause_s: float = 1.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"--server {self.url}: expected a URL like http://127.0.0.1:8000/v1", param="server")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}, expected at least 1", param="concurrency")


class ServerAnswers:
    """Answers by a server, in the order in which they come."""

    def __init__(self, server: Server, chat: Chat, params: SamplingParams) -> None:
        self._server, self._chat, self._params = server, chat, params
        self._stop = threading.Event()
        self._num_answered = self._num_refused = 0

    def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Every task's answer. Raises BackendError once the server has failed, after what had come until then."""
        waiting = iter(tasks)
        inbox: queue.SimpleQueue[Task] = queue.SimpleQueue()
        outbox: queue.SimpleQueue[tuple[Task, Outcome | Exception]] = queue.SimpleQueue()
        self._stop.clear()
        num_open = _feed(inbox, itertools.islice(waiting, 2 * self._server.concurrency))
        # Daemons: Ctrl-C does not wait for answers that may take minutes.
        threads = [
            threading.Thread(target=self._work, args=(inbox, outbox), daemon=True)
            for _ in range(min(self._server.concurrency, num_open))
        ]
        for thread in threads:
            thread.start()
        try:
            while num_open:
                task, outcome = outbox.get()
                num_open += _feed(inbox, itertools.islice(waiting, 1)) - 1
                if isinstance(outcome, Exception) and not isinstance(outcome, Refused):
                    _wait(threads, self._server.timeout_s)
                    yield from _arrived(outbox)
                    raise outcome
                yield task, outcome
                self._judge(outcome)
        finally:
            self._stop.set()

    def _judge(self, outcome: Outcome) -> None:
        """Raise BackendError for a server that refuses everything."""
        self._num_answered += isinstance(outcome, Answer)
        self._num_refused += isinstance(outcome, Refused)
        if not self._num_answered and self._num_refused >= _FIRST_REFUSALS:
            raise BackendError(f"{self._server.url}: no answer to the first {self._num_refused} prompts: {outcome}")

    def _work(
        self, inbox: queue.SimpleQueue[Task], outbox: queue.SimpleQueue[tuple[Task, Outcome | Exception]]
    ) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                task = inbox.get(timeout=0.2)
                try:
                    outbox.put((task, self._answer(task)))
                except Refused as reason:
                    outbox.put((task, reason))
                except Exception as error:  # whatever it is: the thread that waits for this answer is to raise it
                    self._stop.set()
                    outbox.put((task, error))

    def _answer(self, task: Task) -> Outcome:
        params = task.seeded(self._params)
        body: dict[str, Any] = {"model": self._server.model, "max_tokens": params.max_tokens, "seed": params.seed}
        body |= {"temperature": params.temperature, "top_p": params.top_p}
        if params.top_k > 0:
            body["top_k"] = params.top_k
        if task.messages is None:
            return self._completion(task, body | {"prompt": list(task.prompt_ids)})
        if self._chat.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._chat.thinking}
        return self._chat_completion(task.messages, body | {"messages": list(task.messages)})

    def _chat_completion(self, messages: tuple[Message, ...], body: Mapping[str, Any]) -> Outcome:
        choice = self._choice("/chat/completions", body, "message")
        said = choice["message"]
        answer = {"role": "assistant", "content": said.get("content") or ""}
        if reasoning := said.get("reasoning_content") or said.get("reasoning"):
            answer["reasoning_content"] = reasoning
        finish = choice.get("finish_reason")
        return answer_or_reason(self._chat.answer_ids(messages, answer, is_cut=finish == "length"), finish)

    def _completion(self, task: Task, body: Mapping[str, Any]) -> Outcome:
        choice = self._choice("/completions", body, "text")
        ids = self._chat.tokenizer.encode(choice["text"], add_special_tokens=False)
        finish, stop = choice.get("finish_reason"), choice.get("stop_reason")
        if finish == "stop":
            ids += [stop] if isinstance(stop, int) else list(self._chat.tokenizer.eos_ids[:1])
        return answer_or_reason(ids, finish)

    def _choice(self, path: str, body: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The answer's only choice. Raises BackendError after the last attempt, Refused where it is the request."""
        for attempt in range(_ATTEMPTS):
            if attempt and self._stop.wait(self._server.pause_s * 2 ** (attempt - 1)):
                break
            try:
                return _choice_of(self._post(path, body), key)
            except _Passing as error:
                fault = error
        raise BackendError(f"{self._server.url}: {fault}, {_ATTEMPTS} times: see to the server and run the same again")

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        parts = urlsplit(self._server.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._server.timeout_s)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            status, data = response.status, response.read()
        except TimeoutError as error:
            raise _Passing(f"no answer within {self._server.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"cannot be reached ({_one_line(str(error)) or type(error).__name__})") from error
        finally:
            connection.close()
        return self._checked(status, data)

    def _checked(self, status: int, data: bytes) -> bytes:
        if 200 <= status < 300:
            return data
        quote = _quote(data)
        if status in _REFUSALS:
            # Lengths and ids differ from line to line, and the reason is to be counted.
            raise Refused("refused by the server: " + re.sub(r"\d+", "…", quote))
        if status == 429 or status >= 500:
            raise _Passing(f"status {status} ({quote})")
        raise BackendError(f"{self._server.url}: status {status} ({quote}): expected the base URL that ends in /v1")


class _Passing(Exception):  # noqa: N818 - it may pass: the request is repeated
    """A fault that another attempt may not meet."""


def _feed(inbox: queue.SimpleQueue[Task], tasks: Iterable[Task]) -> int:
    """Put tasks in; how many there were."""
    count = 0
    for task in tasks:
        inbox.put(task)
        count += 1
    return count


def _wait(threads: Iterable[threading.Thread], timeout_s: float) -> None:
    """Give answers that are on their way some time to come; their threads begin nothing new."""
    end = time.monotonic() + min(timeout_s, _GRACE_S)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _arrived(outbox: queue.SimpleQueue[tuple[Task, Outcome | Exception]]) -> Iterator[tuple[Task, Outcome]]:
    """Answers that are there already."""
    with contextlib.suppress(queue.Empty):
        while True:
            task, outcome = outbox.get_nowait()
            if isinstance(outcome, Answer):
                yield task, outcome


def _choice_of(data: bytes, key: str) -> dict[str, Any]:
    """The only choice of a completion, its text in place. Raises _Passing for anything else."""
    try:
        choice = json.loads(data)["choices"][0]
        text = choice[key]["content"] if key == "message" else choice[key]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _Passing(f"its answer is no completion ({_quote(data)})") from error
    if not isinstance(text, str | None) or (text is None and key != "message"):
        raise _Passing(f"its answer is no completion ({_quote(data)})")
    return dict(choice)


def _quote(data: bytes) -> str:
    """What the server says, in short: the message of an error object, else the beginning of the body."""
    text = data[:2000].decode("utf-8", errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        entry = json.loads(data)
        text = str(entry["error"]["message"] if isinstance(entry["error"], dict) else entry["error"])
    return _one_line(text)[:_LONGEST_QUOTE] or "nothing"


def _one_line(text: str) -> str:
    return " ".join(text.split())
