"""`outrider bench`: plain and speculative decoding of the same prompts, in turns, with every condition beside it."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, verb
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.run import Bench


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions, SamplingOptions):
    """What `bench` takes."""

    dataset: Annotated[
        str,
        typer.Option(
            help="math, code, chat, json, summary, copy, mixed; gsm8k, math500, humaneval, mbpp, mt-bench; a file."
        ),
    ] = "mixed"
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the public sets' .jsonl files.")] = None
    num_prompts: Annotated[int, typer.Option(help="Prompts from the start of the set.")] = 8
    turns: Annotated[str, typer.Option(help="first, or all turns of a conversation.")] = "first"
    concurrency: Annotated[int, typer.Option(help="Requests that run at any time.")] = 1
    repeats: Annotated[int, typer.Option(help="Times that every prompt runs on every side.")] = 3
    also: Annotated[list[str], typer.Option(help="A further speculative config to compare; may be repeated.")] = field(
        default_factory=list
    )
    score: Annotated[bool, typer.Option("--score", help="Compare exact matches where prompts have an answer.")] = False
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "bench", BenchOptions)(run)


def run(options: BenchOptions) -> None:
    """Measure speculative decoding against plain decoding on the same prompts."""
    first = options.speculative()
    if first is None:
        raise ConfigError(
            "bench needs a --speculative-config to compare with plain decoding", param="speculative_config"
        )
    configs = [first, *(SpeculativeConfig.parse(text) for text in options.also)]
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: there is no such folder", param="json")
    from outrider.evaluate.workloads import load

    prompts = load(options.dataset, num_prompts=options.num_prompts, turns=options.turns, folder=options.data_dir)  # type: ignore[arg-type]
    params = replace(options.params(), seed=options.seed or 0)
    # A prompt that is run again must be read again, else the second side profits from the first.
    plain = options.load_plain("engine.enable_prefix_caching=false")
    from outrider.bench.conditions import conditions, fingerprint
    from outrider.bench.run import Bench, BenchPlan
    from outrider.cli.progress import ProgressBars
    from outrider.evaluate.conversation import items_of

    plan = BenchPlan(params=params, concurrency=options.concurrency, repeats=options.repeats)
    settings = {
        "sampling": asdict(params),
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "turns": options.turns,
    }
    read = {
        "dataset": options.dataset,
        "num_prompts": len(prompts),
        "sha256": fingerprint([prompt.turns for prompt in prompts]),
    }
    stated = conditions(plain, read, settings)
    interrupted = False
    with ProgressBars() as bars:
        bench = Bench(plain, configs, items_of(plain, prompts, params, bars.show), plan)
        try:
            bench.run(bars.show)
        except KeyboardInterrupt:
            interrupted = True
    _show(bench, options, stated)
    if interrupted:
        raise KeyboardInterrupt


def _show(bench: Bench, options: BenchOptions, stated: dict[str, Any]) -> None:
    if not bench.rounds:
        print("nothing was measured", file=sys.stderr)
        return
    from rich.console import Console

    from outrider.bench.measure import numbers
    from outrider.bench.table import as_json, headlines, notes, tables

    found = numbers(bench, score=options.score)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for line in headlines(found):
        console.print(line, markup=False, soft_wrap=True)
    for table in tables(found):
        console.print(table)
    for line in notes(found):
        print(line, file=sys.stderr)
    machine = f"{stated['cpu']}, {stated['num_cpus']} CPUs, {stated['kernels']} kernels"
    facts = f"{stated['model']} {stated['dtype']} on {machine}"
    print(
        f"{facts}; {found.num_items} prompts of {options.dataset}, {options.repeats} repeats in turns", file=sys.stderr
    )
    if options.json is not None:
        options.json.write_text(json_module.dumps(as_json(found, stated), indent=1) + "\n", encoding="utf-8")
