"""`outrider sweep`: method × N × load × temperature × workload × context, each measured beside plain decoding."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.options import MODEL_HELP, ModelOptions, verb
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.bench.backends import EmbeddedBackend
    from outrider.bench.context import Texts
    from outrider.bench.grid import Grid
    from outrider.bench.results import Header, Results

Value = TypeVar("Value")
_SETS = "math, code, chat, json, summary, copy, mixed, gsm8k, math500, humaneval, mbpp, mt-bench, or files"
OutOption = Annotated[
    Path, typer.Option(help="Results, .jsonl or .parquet; the same command goes on where it was stopped.")
]
PolicyOption = Annotated[Path | None, typer.Option(help="Write what to draft where to this file.")]
MinutesOption = Annotated[float | None, typer.Option(help="Stop after so long; the same command goes on.")]
TokensOption = Annotated[str, typer.Option(help="N to measure, for methods that do not say theirs.")]
ConcurrencyOption = Annotated[str, typer.Option(help="Requests that run at any time.")]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")]
StopBelowOption = Annotated[
    float, typer.Option(help="Give a choice up where its speedup is surely below this; 0 never does.")
]


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What `sweep` takes. Lists are written with commas."""

    model: Annotated[str, typer.Argument(help=MODEL_HELP)]
    out: OutOption
    policy: PolicyOption = None
    minutes: MinutesOption = None
    methods: Annotated[str, typer.Option(help="Drafting methods; none takes all that this model is ready for.")] = ""
    also: Annotated[list[str], typer.Option(help="A method with more settings, as vLLM's JSON; may be repeated.")] = (
        field(default_factory=list)
    )
    tokens: TokensOption = "1,2,3,5,7"
    workloads: Annotated[str, typer.Option(help=f"Prompt sets: {_SETS}.")] = "math,code,chat"
    concurrency: ConcurrencyOption = "1"
    temperatures: Annotated[str, typer.Option(help="0 is greedy.")] = "0"
    context_lens: Annotated[str, typer.Option(help="Prompt lengths to fill up to; 0 leaves prompts as they are.")] = "0"
    num_prompts: Annotated[int, typer.Option(help="Prompts from the start of each set.")] = 8
    max_tokens: MaxTokensOption = 128
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.")] = 2
    seed: Annotated[int, typer.Option(help="Of the order and of the sampling.")] = 0
    stop_below: StopBelowOption = 0.8
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the public sets' .jsonl files.")] = None
    set: Annotated[list[str], typer.Option(help="Any engine setting: --set engine.dtype=float32.")] = field(
        default_factory=list
    )
    json: Annotated[Path | None, typer.Option(help="Write what the results say to this file.")] = None

    def configs(self) -> list[dict[str, Any]]:
        """The drafting settings that were given. Raises ConfigError."""
        found: list[dict[str, Any]] = [{"method": name} for name in _listed("methods", self.methods, str)]
        for text in self.also:
            try:
                settings = json_module.loads(text)
            except ValueError as error:
                raise ConfigError(f"--also is not JSON: {error}", param="also") from error
            if not isinstance(settings, dict):
                raise ConfigError("--also is not a JSON object", param="also")
            found.append(settings)
        return found

    def grid(self, configs: list[dict[str, Any]]) -> Grid:
        """Everything to measure, checked. Raises ConfigError."""
        from outrider.bench.grid import Grid, name_methods

        return Grid(
            **name_methods(configs, _listed("tokens", self.tokens, int)),
            workloads=_listed("workloads", self.workloads, str),
            concurrency=_listed("concurrency", self.concurrency, int),
            temperatures=_listed("temperatures", self.temperatures, float),
            context_lens=_listed("context_lens", self.context_lens, int),
            num_prompts=self.num_prompts,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            seed=self.seed,
            stop_below=self.stop_below,
        )


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "sweep", SweepOptions)(run)


@dataclass(frozen=True)
class Swept:
    """What was measured, in which file, and what measured it, for measuring more."""

    backend: EmbeddedBackend
    grid: Grid
    results: Results
    path: Path


def run(options: SweepOptions) -> None:
    """Measure drafting methods and lengths beside plain decoding, and say what to take where."""
    check(options)
    from outrider.bench.policy import policy_of
    from outrider.bench.summary import lines, summarize

    with measured(options) as swept:
        found = summarize(swept.path)
    for line in lines(found):
        print(line)
    if options.policy is not None:
        policy_of(swept.results).save(options.policy)
    print(f"results are in {swept.path}: see `outrider report {swept.path} --html report.html`", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")


def check(options: SweepOptions) -> None:
    """Refuse what can be refused before anything is loaded. Raises ConfigError, LoadError."""
    from outrider.bench.parquet import SUFFIX, check_pyarrow

    for name in ("out", "policy", "json"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder", param=name)
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"minutes is {options.minutes}, expected more than 0", param="minutes")
    if options.out.suffix == SUFFIX:
        check_pyarrow()


@contextmanager
def measured(options: SweepOptions) -> Iterator[Swept]:
    """Measure what is missing, and give everything there is; the file is this process's meanwhile."""
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    from outrider.bench.context import read_texts

    # What drafts by itself is known only when the model is loaded.
    configs = options.configs()
    asked = options.grid(configs or [{"method": "ngram"}])
    texts = read_texts(asked.workloads, asked.num_prompts, options.data_dir)
    # A prompt that is measured again must be read again, else the second choice profits from the first.
    plain = ModelOptions(model=options.model, set=options.set).load_plain("engine.enable_prefix_caching=false")
    from outrider.bench.backends import EmbeddedBackend

    backend = EmbeddedBackend(plain)
    grid = asked if configs else options.grid([{"method": name} for name in backend.methods()])
    with _locked(options.out):
        results, path = _sweep(options.out, _Sweep(backend, grid, texts, asdict(plain.config)), until)
        yield Swept(backend, grid, results, path)


@dataclass(frozen=True)
class _Sweep:
    """What a sweep is made of."""

    backend: EmbeddedBackend
    grid: Grid
    texts: Texts
    engine: dict[str, Any]


def _sweep(out: Path, asked: _Sweep, until: float | None) -> tuple[Results, Path]:
    """Everything that is measured by `until`, and the file it is in."""
    from outrider.bench.context import encode_prompts
    from outrider.bench.parquet import SUFFIX, write_parquet
    from outrider.bench.results import ResultsFile
    from outrider.bench.sweep import Sweep, missing
    from outrider.cli.progress import ProgressBars

    backend, grid = asked.backend, asked.grid
    prompts = encode_prompts(grid, asked.texts, backend.encode, backend.max_len)
    complete = dict(zip(grid.choices, backend.prepare([grid.config(choice) for choice in grid.choices]), strict=True))
    header = _header(asked, {choice.method: config for choice, config in complete.items()})
    is_parquet = out.suffix == SUFFIX
    growing = out.with_name(f"{out.name}.part") if is_parquet else out
    if is_parquet and out.exists() and not growing.exists():
        return _finished(out, header), out
    file = ResultsFile.open(growing, header)
    if file.results.is_cut:
        print(f"{growing} ended in a cut record, which was removed", file=sys.stderr)
    try:
        with ProgressBars() as bars:
            Sweep(backend, grid, prompts, complete, file).run(bars.show, until)
    except KeyboardInterrupt:
        print(f"interrupted: {len(file.results.rows)} measurements are in {growing}; ", end="", file=sys.stderr)
        print("the same command goes on with them", file=sys.stderr)
        raise
    if left := sum(len(item.choices) for item in missing(grid, file.results)):
        print(f"the time is up, {left} measurements are missing: the same command goes on with them", file=sys.stderr)
    elif is_parquet:
        write_parquet(out, file.results)
        growing.unlink()
        return file.results, out
    return file.results, growing


def _header(asked: _Sweep, methods: dict[str, Any]) -> Header:
    from outrider.bench.conditions import fingerprint
    from outrider.bench.results import Header

    return Header(
        target=asked.backend.target,
        identity=asked.backend.identity(),
        grid=asked.grid.as_json(),
        engine=asked.engine,
        prompts={name: fingerprint([(text,) for text in found]) for name, found in asked.texts.items()},
        methods={name: config.as_json() for name, config in methods.items()},
        conditions=asked.backend.conditions(),
    )


def _finished(path: Path, header: Header) -> Results:
    """A Parquet file is a finished sweep: it may only be asked for again, not gone on with."""
    from outrider.bench.parquet import read_parquet
    from outrider.bench.results import check_same

    results = read_parquet(path)
    check_same(results.header, header, path)
    return results


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the results file for this process. Raises ConfigError where another sweep holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        with lock:
            try:
                yield
            finally:
                Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout as error:
        raise ConfigError(f"{path}: another sweep is writing it", param="out") from error


def _listed(name: str, text: str, kind: Callable[[str], Value]) -> list[Value]:
    """Values written with commas, each once. Raises ConfigError naming the option."""
    try:
        return list(dict.fromkeys(kind(word.strip()) for word in text.split(",") if word.strip()))
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, expected numbers with commas between them", param=name) from error
