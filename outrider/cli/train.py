"""`outrider train`: a drafter from a corpus of the target's own responses; train/trainer.py does it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import MODEL_HELP, verb

if TYPE_CHECKING:
    from outrider.cli.progress import ProgressBars
    from outrider.drafting.train_config import TrainConfig
    from outrider.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `train` takes."""

    method: Annotated[str, typer.Argument(help="eagle3, mtp, gemma4_mtp, dflash or dspark.")]
    target: Annotated[str, typer.Option(help=MODEL_HELP)]
    corpus: Annotated[
        Path, typer.Option(help="JSONL of the target's own responses, as `outrider data generate` makes.")
    ]
    output: Annotated[Path, typer.Option(help="Folder of the run; the same command goes on in it.")]
    states: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the target's states, for other runs too. None: they are computed anew."),
    ] = None
    capture: Annotated[
        bool, typer.Option("--capture-first", help="Capture every state before training, not as it goes.")
    ] = False
    set: Annotated[list[str], typer.Option(help="A setting, train.NAME=VALUE; may be repeated.")] = ()  # type: ignore[assignment]
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "train", TrainOptions)(run)


def run(options: TrainOptions) -> None:
    """Train a drafter; the checkpoint with the highest acceptance is kept, and its folder printed."""
    from outrider.cli.progress import ProgressBars
    from outrider.drafting.train_config import TrainConfig
    from outrider.errors import ConfigError
    from outrider.models.store import resolve
    from outrider.train.processes import joined, rank

    config = TrainConfig().with_overrides(options.set)
    if options.capture and options.states is None:
        raise ConfigError("--capture-first keeps states in a folder: give --states too", param="states")
    with joined(), ProgressBars() as bars:
        resolve(options.target, bars.show)
        trainer = _trainer(options, config, bars)
        if options.capture:
            _capture(trainer, bars)
        best = trainer.run()
        if rank() == 0:  # only it has measured
            _report(options, config, trainer, best)


def _report(options: TrainOptions, config: TrainConfig, trainer: Trainer, best: float) -> None:
    import json

    result = {
        "method": options.method,
        "model": str(trainer.folder.best),
        "num_speculative_tokens": config.num_speculative_tokens,
        "mean_acceptance_length": best,
        "num_steps": trainer.num_steps,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    sys.stderr.write(f"mean acceptance length {best:.2f} on held-out prompts at N = {config.num_speculative_tokens}\n")
    print(trainer.folder.best)


def _trainer(options: TrainOptions, config: TrainConfig, bars: ProgressBars) -> Trainer:
    from outrider.drafting import registry
    from outrider.llm import LLM
    from outrider.models.store import resolve
    from outrider.text.tokenizer import Tokenizer
    from outrider.train.conversations import Chat
    from outrider.train.corpus import limits_of, read_corpus
    from outrider.train.processes import rank
    from outrider.train.trainer import Places, Trainer

    registry.trainee(options.method)  # a method that cannot be trained is refused before anything is read
    folder = resolve(options.target)
    tokenizer = Tokenizer.load(folder)
    vocab_size, max_len = limits_of(folder, tokenizer)
    corpus = read_corpus(
        options.corpus, vocab_size=vocab_size, max_len=min(max_len, config.max_len), chat=Chat(tokenizer)
    )
    told = [f"{options.corpus}: lines left out ({reason}): {count}" for reason, count in corpus.refused.most_common()]
    llm = LLM(options.target, max_num_seqs=config.eval_prompts, kv_cache_tokens=32768)
    trainer = Trainer(options.method, llm, corpus, config, Places(run=options.output, states=options.states), bars.show)
    needed = trainer.capture.bytes_needed() if options.states else 0
    told.append(
        f"{len(corpus.samples)} conversations, {corpus.num_response_tokens} response tokens, {trainer.num_steps} steps;"
        f" states still to capture: {needed / 1e9:.1f} GB on disk"
    )
    if rank() == 0:
        sys.stderr.write("\n".join(told) + "\n")
    trainer.capture.check_disk()
    return trainer


def _capture(trainer: Trainer, bars: ProgressBars) -> None:
    from outrider.train.processes import rank, wait, world

    missing = trainer.capture.missing()[rank() :: world()]
    for done, index in enumerate(missing):
        trainer.capture.shard(index)
        bars.show("capturing states", done + 1, len(missing))
    wait()
