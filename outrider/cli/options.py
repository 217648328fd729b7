"""Options that verbs share, as records, and the one function that turns a record into a command.

A verb is a frozen dataclass whose fields are its arguments and options, and a function that takes one of them. The
names are vLLM's. Heavy modules are imported when a verb runs, never here, so that `--help` is instant.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from outrider.config import AUTO, EngineConfig, SpeculativeConfig, apply_overrides
from outrider.errors import ConfigError, RequestError
from outrider.types import DraftParams, SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM

Options = TypeVar("Options")
MODEL_HELP = "smollm2, gemma3-270m, a Hugging Face folder, a GGUF file, or a hub name."


def verb(app: typer.Typer, name: str, options: type[Options]) -> Callable[[Callable[[Options], None]], None]:
    """Register a function of one options record as the command `name`; its docstring is the command's help."""

    def register(run: Callable[[Options], None]) -> None:
        hints = get_type_hints(options, include_extras=True)
        parameters = [
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=_default(item), annotation=hints[item.name]
            )
            for item in fields(options)  # type: ignore[arg-type]
        ]

        def call(**values: Any) -> None:
            run(options(**values))

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__doc__ = run.__doc__
        app.command(name)(call)

    return register


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is MISSING else item.default


def _engine_default(name: str) -> Any:
    return next(item.default for item in fields(EngineConfig) if item.name == name)


def _engine_help(name: str) -> str:
    return str(next(item.metadata["help"] for item in fields(EngineConfig) if item.name == name)).capitalize() + "."


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, with which drafter, in which engine."""

    model: Annotated[str, typer.Argument(help=MODEL_HELP)]
    speculative_config: Annotated[
        str | None, typer.Option(help="vLLM's JSON: method, model, num_speculative_tokens, …")
    ] = None
    spec_method: Annotated[str | None, typer.Option(help="Shorthand for method in the speculative config.")] = None
    spec_model: Annotated[str | None, typer.Option(help="Shorthand for model in the speculative config.")] = None
    spec_tokens: Annotated[int | None, typer.Option(help="Shorthand for num_speculative_tokens.")] = None
    policy: Annotated[Path | None, typer.Option(help="What to draft where, as sweep and tune write it.")] = None
    workload: Annotated[str, typer.Option(help="The class of the requests, by which a policy has its rules.")] = ""
    dtype: Annotated[str, typer.Option(help=_engine_help("dtype"))] = _engine_default("dtype")
    max_model_len: Annotated[int | None, typer.Option(help=_engine_help("max_model_len"))] = None
    max_num_seqs: Annotated[int, typer.Option(help=_engine_help("max_num_seqs"))] = _engine_default("max_num_seqs")
    set: Annotated[list[str], typer.Option(help="Any engine setting: --set engine.block_size=32.")] = field(
        default_factory=list
    )

    def engine_config(self, *defaults: str) -> EngineConfig:
        """The engine's settings, checked; a verb's own `defaults` give way to --set. Raises ConfigError."""
        config = EngineConfig(dtype=self.dtype, max_model_len=self.max_model_len, max_num_seqs=self.max_num_seqs)  # type: ignore[arg-type]
        return apply_overrides(config, [*defaults, *self.set])

    def speculative(self) -> SpeculativeConfig | None:
        """The drafting settings from the JSON and the shorthands, checked; None without any. Raises ConfigError."""
        shorthands = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
            "policy": None if self.policy is None else str(self.policy),
        }
        given = {key: value for key, value in shorthands.items() if value is not None}
        if self.speculative_config is None and not given:
            return None
        try:
            settings = json.loads(self.speculative_config or "{}")
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}", param="speculative_config") from error
        if not isinstance(settings, dict):
            raise ConfigError("--speculative-config is not a JSON object", param="speculative_config")
        for key in given:
            if key in settings or key.replace("_", "-") in settings:
                raise ConfigError(f"{key} is given twice, by shorthand and in --speculative-config", param=key)
        asked = {**settings, **given}
        if self.workload and (asked.get("method") == AUTO or "policy" in asked):
            asked.setdefault("workload", self.workload)
        return SpeculativeConfig.parse(asked)

    def drafting(self) -> DraftParams:
        """How drafts are made for these requests; the guard learns by their class, whatever the method."""
        return DraftParams(workload=self.workload)

    def load(self, seed: int | None = None) -> LLM:
        """Check every setting, then load the model and its drafter, guarded unless the settings say otherwise."""
        speculative = self.speculative()
        if speculative is not None and speculative.guard is None:
            speculative = replace(speculative, guard=True)
        return _load(self.model, self.engine_config(), speculative, seed)

    def load_plain(self, *defaults: str) -> LLM:
        """The same without the drafter, for verbs that compare; `defaults` as in engine_config."""
        return _load(self.model, self.engine_config(*defaults), None, None)


def _load(model: str, config: EngineConfig, speculative: SpeculativeConfig | None, seed: int | None) -> LLM:
    from outrider.cli.progress import ProgressBars
    from outrider.llm import LLM
    from outrider.models.store import resolve

    with ProgressBars() as bars:
        resolve(model, bars.show)
    settings = {item.name: getattr(config, item.name) for item in fields(EngineConfig)}
    return LLM(model, speculative_config=speculative, seed=seed, **settings)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn. The command line is greedy unless told otherwise."""

    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 512
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that sum to this.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")] = 0.0
    presence_penalty: Annotated[float, typer.Option(help="Against tokens that the output has.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="The same, by how often.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: against tokens of prompt and output.")] = 1.0
    logit_bias: Annotated[str, typer.Option(help='JSON of id to bias: {"42": -100}.')] = "{}"
    seed: Annotated[int | None, typer.Option(help="Same seed, same text, drafts or not.")] = None
    stop: Annotated[list[str], typer.Option(help="End before this text; may be repeated.")] = field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[int], typer.Option(help="End at this id; may be repeated.")] = field(
        default_factory=list
    )
    min_tokens: Annotated[int, typer.Option(help="Do not end before this many tokens.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False
    logprobs: Annotated[int | None, typer.Option(help="Report log-probabilities of this many tokens (in --json).")] = (
        None
    )
    n: Annotated[int, typer.Option(help="Choices for each prompt.")] = 1

    def params(self) -> SamplingParams:
        """The same as the library's record. Raises RequestError naming the field."""
        values = {item.name: getattr(self, item.name) for item in fields(SamplingOptions)}
        try:
            bias = {int(key): value for key, value in json.loads(self.logit_bias).items()}
        except (ValueError, AttributeError) as error:
            raise RequestError(
                f"logit_bias is not a JSON object of ids to numbers: {error}", param="logit_bias"
            ) from error
        return SamplingParams(**{**values, "logit_bias": bias})
