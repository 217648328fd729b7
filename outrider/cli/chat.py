"""`outrider chat`: a conversation in the terminal. Earlier turns stay in the cache, so only the new turn is read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, verb

if TYPE_CHECKING:
    from outrider.llm import LLM

_HELP = "/new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions, SamplingOptions):
    """What `chat` takes."""

    system: Annotated[str | None, typer.Option(help="System message.")] = None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "chat", ChatOptions)(run)


def run(options: ChatOptions) -> None:
    """Talk with a model in the terminal."""
    options.params()  # what is wrong with them is said before the model is loaded
    llm = options.load(options.seed)
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    print(_HELP, file=sys.stderr)
    while (text := _read()) is not None:
        if text == "/quit":
            break
        if text == "/new":
            messages = list(opening)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(llm, messages, options)})


def _read() -> str | None:
    """The next line of the user, None at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(llm: LLM, messages: list[dict[str, str]], options: ChatOptions) -> str:
    """Stream one answer; Ctrl-C ends the answer, not the conversation, when a person types."""
    generation = llm.start([llm.tokenizer.encode_chat(messages)], options.params(), options.drafting())
    try:
        for delta in generation:
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            print()
            raise
        print(" [stopped]", end="", file=sys.stderr)
    choice = generation.outputs[0].outputs[0]
    print()
    if choice.stats is not None:
        cached, total = choice.stats.num_cached_tokens, choice.stats.num_prompt_tokens
        print(f"[{total} prompt tokens, {cached} from the cache]", file=sys.stderr)
    return choice.text
