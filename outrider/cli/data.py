"""`outrider data`: make a corpus that a drafter can be trained on, and see what is in one; train/ does the work."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import MODEL_HELP, ModelOptions, verb
from outrider.errors import ConfigError
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.text.tokenizer import Tokenizer
    from outrider.train.conversations import Chat
    from outrider.train.describe import Description
    from outrider.train.generate import Maker, Prompts
    from outrider.train.responses import ResponseFile
    from outrider.train.served import Server

app = typer.Typer(help="Make and inspect training corpora.", no_args_is_help=True)
_THINKING_HELP = "on or off: enable_thinking for the chat template."
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """What `data generate` takes."""

    prompts: Annotated[Path, typer.Option(help="JSONL of prompt, turns, messages, conversations or prompt_ids.")]
    out: Annotated[Path, typer.Option(help="JSONL to write; the same command again goes on with it.")]
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 512
    temperature: Annotated[float, typer.Option(help="As deployed; 0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that sum to this.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0
    seed: Annotated[int, typer.Option(help="Same seed, same responses.")] = 0
    thinking: Annotated[str | None, typer.Option(help=_THINKING_HELP)] = None
    server: Annotated[
        str | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server of the target (key: OPENAI_API_KEY), not our engine."
        ),
    ] = None
    served_model: Annotated[str | None, typer.Option(help="The target's name there; the model's own if none.")] = None
    concurrency: Annotated[int, typer.Option(help="Requests that the server has at any time.")] = 8
    json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON at the end.")] = False

    def params(self) -> SamplingParams:
        """How responses are drawn. Raises RequestError naming the field."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def check(self) -> None:
        """Raise ConfigError for what can be seen without a model."""
        if not self.out.absolute().parent.is_dir():
            raise ConfigError(f"--out {self.out}: there is no such folder", param="out")
        if self.out.suffix == ".gz" or self.out.is_dir():
            raise ConfigError(f"--out {self.out}: expected a plain .jsonl file, to be appended to", param="out")
        self.engine_config()
        speculative = self.speculative()
        if self.asked() is None and self.served_model is not None:
            raise ConfigError("--served-model needs a --server", param="served_model")
        if speculative is None:
            return
        if self.server is not None:
            raise ConfigError(
                "a --server drafts by its own settings: leave the speculative config to it", param="server"
            )
        if speculative.rejection_sample_method == "synthetic":
            raise ConfigError(
                "rejection_sample_method is synthetic: the text would not be the target's", param="speculative_config"
            )

    def asked(self) -> Server | None:
        """The server that is asked, if any. Raises ConfigError."""
        from outrider.train.served import Server

        if self.server is None:
            return None
        return Server(url=self.server, model=self.served_model or self.model, concurrency=self.concurrency)

    def source(self) -> dict[str, Any]:
        """Who answers, in those settings that decide the text."""
        if self.server is not None:
            return {"target": self.model, "by": "server", "served_model": self.served_model or self.model}
        return {"target": self.model, "by": "engine", "dtype": self.dtype, "max_model_len": self.max_model_len}


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What `data inspect` takes."""

    corpus: Annotated[Path, typer.Argument(help="JSONL of conversations, gzipped or not.")]
    target: Annotated[str, typer.Option(help=MODEL_HELP)]
    max_len: Annotated[int | None, typer.Option(help="Longest conversation; none takes the target's own limit.")] = None
    thinking: Annotated[str | None, typer.Option(help=_THINKING_HELP)] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def register(parent: typer.Typer) -> None:
    """Add the verb with its own verbs."""
    parent.add_typer(app, name="data")


def generate(options: GenerateOptions) -> None:
    """Answer prompts with the target itself, through the engine or a server; resumable."""
    params, thinking = options.params(), _switch(options.thinking)
    options.check()
    folder, tokenizer = _target(options.model)
    from outrider.train.conversations import Chat
    from outrider.train.corpus import limits_of
    from outrider.train.generate import Maker, Prompts, settings_of
    from outrider.train.responses import ResponseFile

    chat, (vocab_size, _) = Chat(tokenizer, thinking), limits_of(folder, tokenizer)
    if thinking is not None and not chat.knows_thinking:
        print("this chat template has no enable_thinking: --thinking changes nothing", file=sys.stderr)
    prompts = Prompts(options.prompts, vocab_size=vocab_size)
    settings = settings_of(prompts, params, chat, **options.source())
    with ResponseFile(options.out, settings, prompts.of_several_turns) as out:
        maker = Maker(prompts, chat, vocab_size, params)
        try:
            _make(options, maker, out, chat)
        except KeyboardInterrupt:
            place = f"{len(out.written):,} of {prompts.num_turns:,} responses are in {options.out}"
            print(f"stopped: {place}; run the same command again to go on", file=sys.stderr)
            raise
        _tell_made(options, maker, out, prompts)


verb(app, "generate", GenerateOptions)(generate)


def _make(options: GenerateOptions, maker: Maker, out: ResponseFile, chat: Chat) -> None:
    from outrider.cli.progress import ProgressBars
    from outrider.train.generate import EngineAnswers
    from outrider.train.served import ServerAnswers

    server, params = options.asked(), options.params()
    if server is not None:
        with ProgressBars() as bars:
            maker.run(ServerAnswers(server, chat, params), out, bars.show)
        return
    engine = EngineAnswers(options.load(), params)
    with ProgressBars() as bars:
        maker.run(engine, out, bars.show)
    for error in sorted(engine.drafting_errors):
        print(f"drafting stopped: {error}", file=sys.stderr)


def _tell_made(options: GenerateOptions, maker: Maker, out: ResponseFile, prompts: Prompts) -> None:
    line = f"{maker.num_made:,} responses of {maker.num_tokens:,} tokens made, {len(out.written):,} in {options.out}"
    print(line + _refused(maker.refused), file=sys.stderr)
    if options.json:
        counts = {
            "num_made": maker.num_made,
            "num_tokens": maker.num_tokens,
            "num_written": len(out.written),
            "num_wanted": prompts.num_turns,
            "refused": dict(maker.refused.most_common()),
        }
        print(json_module.dumps(counts))


def _refused(refused: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in refused.items())
    return f"; refused: {reasons}" if reasons else ""


def inspect(options: InspectOptions) -> None:
    """Show how much a corpus holds, what was refused, and whether evaluation prompts are in it."""
    thinking = _switch(options.thinking)
    if options.max_len is not None and options.max_len < 2:
        raise ConfigError(f"max_len is {options.max_len}, expected at least 2", param="max_len")
    folder, tokenizer = _target(options.target)
    from outrider.train.conversations import Chat
    from outrider.train.corpus import limits_of, read_corpus
    from outrider.train.describe import describe

    vocab_size, longest = limits_of(folder, tokenizer)
    chat, max_len = Chat(tokenizer, thinking), options.max_len or longest
    corpus = read_corpus(options.corpus, vocab_size=vocab_size, max_len=max_len, chat=chat)
    found = describe(corpus, tokenizer.decode)
    if options.json:
        print(json_module.dumps(found.as_json()))
        return
    from rich.console import Console

    console = Console(width=_WIDTH, highlight=False)
    for table in _tables(found):
        console.print(table)
        console.print()
    _warn(found)


verb(app, "inspect", InspectOptions)(inspect)


def _tables(found: Description) -> list[Table]:
    from rich.markup import escape
    from rich.table import Table

    from outrider.train.describe import QUANTILES

    counts = Table("", "", box=None, pad_edge=False, show_header=False)
    counts.add_row("conversations", f"{found.num_conversations:,}")
    for reason, count in found.refused.items():
        counts.add_row(f"refused: {escape(reason)}", f"{count:,}")
    counts.add_row("response tokens", f"{found.num_response_tokens:,}")
    counts.add_row("prompt tokens", f"{found.num_prompt_tokens:,}")
    counts.add_row("with a prompt that came before", f"{found.num_repeated_prompts:,}")
    counts.add_row("evaluation prompts in it", f"{sum(found.evaluation_prompts.values()):,}")
    names = ["longest" if share == 1 else "median" if share == 0.5 else f"{share:.0%}" for share in QUANTILES]
    lengths = Table("tokens", *names, box=None, pad_edge=False)
    for title, values in (("of prompts", found.prompt_len), ("of responses", found.response_len)):
        lengths.add_row(title, *(f"{value:,.0f}" for value in values))
    kinds = Table("kind", "conversations", "share", box=None, pad_edge=False)
    for kind, count in found.kinds.items():
        kinds.add_row(escape(kind) or "(none)", f"{count:,}", f"{count / found.num_conversations:.1%}")
    coverage = Table("draft vocabulary", *(f"{size // 1024}k" for size in found.coverage), box=None, pad_edge=False)
    coverage.add_row("of response tokens", *(f"{share:.2%}" for share in found.coverage.values()))
    return [counts, lengths, kinds, coverage]


def _warn(found: Description) -> None:
    names = ", ".join(f"{count} of {name}" for name, count in found.evaluation_prompts.items() if count)
    if names:
        print(f"evaluation prompts are in it ({names}): acceptance measured on them would flatter", file=sys.stderr)


def _switch(value: str | None) -> bool | None:
    if value not in (None, "on", "off"):
        raise ConfigError(f"--thinking is {value!r}, expected on or off", param="thinking")
    return None if value is None else value == "on"


def _target(name: str) -> tuple[Path, Tokenizer]:
    """The target's folder and its tokenizer; no weights are read."""
    from outrider.cli.progress import ProgressBars
    from outrider.models.store import resolve
    from outrider.text.tokenizer import Tokenizer

    with ProgressBars() as bars:
        folder = resolve(name, bars.show)
    return folder, Tokenizer.load(folder)
