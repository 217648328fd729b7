"""`outrider generate`: continue prompts and stream the text to stdout, or print JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, verb
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.llm import LLM, Generation, Prompt, RequestOutput


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions, SamplingOptions):
    """What `generate` takes."""

    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none reads one from stdin.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False
    system: Annotated[str | None, typer.Option(help="System message for the chat template.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt at the end.")] = False


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "generate", GenerateOptions)(run)


def run(options: GenerateOptions) -> None:
    """Continue prompts: stream the text, or print JSON with --json."""
    params = options.params()
    prompts = options.prompts or [sys.stdin.read()]
    if not all(prompt.strip() for prompt in prompts):
        raise RequestError("the prompt is empty: give some text, as an argument or on stdin", param="prompt")
    llm = options.load(options.seed)
    encoded = [_encode(llm, prompt, options) for prompt in prompts]
    generation, started = llm.start(encoded, params, options.drafting()), time.perf_counter()
    try:
        (_print_json if options.json else _print_stream)(generation)
    finally:
        seconds, saved_s = time.perf_counter() - started, llm.engine.stats.saved_s
        print(_summary(generation.outputs, seconds, saved_s), file=sys.stderr)


def _encode(llm: LLM, prompt: str, options: GenerateOptions) -> Prompt:
    if options.raw or llm.tokenizer.chat_template is None:
        return prompt
    system = [{"role": "system", "content": options.system}] if options.system else []
    return llm.tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])


def _print_json(generation: Generation) -> None:
    try:
        generation.wait()
    finally:  # after Ctrl-C too: what there is, is printed
        for output in generation.outputs:
            print(json.dumps(as_json(output), ensure_ascii=False), flush=True)


def _print_stream(generation: Generation) -> None:
    """All choices run together; their text is shown one after the other, live for the first that is unfinished."""
    choices = [choice for output in generation.outputs for choice in output.outputs]
    current, shown = 0, 0
    for _ in generation:
        while True:
            choice = choices[current]
            print(choice.text[shown:], end="", flush=True)
            shown = len(choice.text)
            if choice.finish_reason is None or current == len(choices) - 1:
                break
            current, shown = current + 1, 0
            print("\n")
    print()


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One prompt's outputs as plain data."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [asdict(choice) for choice in output.outputs],
    }


def _summary(outputs: list[RequestOutput], seconds: float, saved_s: float) -> str:
    choices = [choice for output in outputs for choice in output.outputs]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    stats = [choice.stats for choice in choices if choice.stats is not None]
    line = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tok/s"
    rounds = sum(item.num_drafts for item in stats)
    if rounds:
        accepted, drafted = (sum(getattr(item, name) for item in stats) for name in ("num_accepted", "num_drafted"))
        line += f"; mean acceptance length {1 + accepted / rounds:.2f}, acceptance rate {accepted / drafted:.0%}"
    if any(item.saved_s is not None for item in stats):
        line += f"; drafts {'saved' if saved_s >= 0 else 'cost'} about {abs(saved_s):.2f} s"
    errors = {item.drafting_error for item in stats if item.drafting_error}
    return line + "".join(f"; drafting stopped: {error}" for error in errors)
