"""`outrider check`: the losslessness verdict as a command. Exit code 1 for a divergence or when nothing was drafted."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, verb
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.evaluate.check import CheckReport, Section
    from outrider.evaluate.distribution import DistributionVerdict
    from outrider.evaluate.lossless import TextVerdict
    from outrider.evaluate.workloads import Prompt
    from outrider.llm import LLM


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ModelOptions, SamplingOptions):
    """What `check` takes; the temperature is that of the sampled sections."""

    dataset: Annotated[str, typer.Option(help="A prompt set, as for bench.")] = "mixed"
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the public sets' .jsonl files.")] = None
    num_prompts: Annotated[int, typer.Option(help="Prompts from the start of the set.")] = 20
    prompt_index: Annotated[int | None, typer.Option(help="Only this prompt of the set, from 0.")] = None
    num_samples: Annotated[int, typer.Option(help="Texts a side and prompt for the distribution test; 0: none.")] = 100
    n_range: Annotated[str | None, typer.Option(help="Check every N from:to, e.g. 1:8.")] = None
    acceptance: Annotated[
        bool, typer.Option("--acceptance", help="Instead: does the drafter reach the acceptance that it recorded?")
    ] = False
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128
    temperature: Annotated[float, typer.Option(help="Of the sampled sections.")] = 1.0
    json: Annotated[Path | None, typer.Option(help="Write the verdicts to this file.")] = None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "check", CheckOptions)(run)


def run(options: CheckOptions) -> None:
    """Judge whether speculation changes the text: greedy, under a seed, and in distribution."""
    configs = _configs(options)
    if options.temperature == 0:
        raise ConfigError("temperature is 0: the greedy section is always there, give the sampled ones' temperature")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: there is no such folder", param="json")
    prompts = _prompts(options)
    params = replace(options.params(), seed=options.seed or 0)
    plain = options.load_plain()
    configs = [plain.complete(config) for config in configs]
    if options.acceptance:
        _acceptance(options, plain, configs[0])
        return
    from outrider.cli.progress import ProgressBars
    from outrider.evaluate.check import SECTIONS, Checker, CheckPlan, CheckReport
    from outrider.evaluate.conversation import items_of

    reports: list[CheckReport] = []
    sections = SECTIONS if options.num_samples else SECTIONS[:2]
    try:
        with ProgressBars() as bars:
            items = items_of(plain, prompts, params, bars.show)
            if options.prompt_index is not None:
                items = [replace(item, prompt_index=options.prompt_index) for item in items]
            checker = Checker(plain, items, CheckPlan(params=params, num_samples=options.num_samples), bars.show)
            for config in configs:
                reports.append(CheckReport(config, []))
                reports[-1].sections.extend(
                    _told(options, config, section) for section in checker.sections(config, sections)
                )
    finally:  # after Ctrl-C too: what is known, is kept
        _write(options, reports)
    if any(report.verdict == "divergence" or not report.num_drafted for report in reports):
        sys.exit(1)


def _acceptance(options: CheckOptions, plain: LLM, config: SpeculativeConfig) -> None:
    """Hold the drafter against its own record; exit code 1 if it falls short."""
    from outrider.evaluate.selftest import TOLERANCE, self_test

    tests = []
    for test in self_test(plain, config):
        tests.append(test)
        verdict = "reached" if test.passed else f"COLLAPSED (more than {TOLERANCE:.0%} below)"
        print(
            f"{config.method} {test.workload}: {verdict}, mean acceptance length {test.measured:.3f},"
            f" recorded {test.recorded:.3f}, {test.num_prompts} prompts"
        )
    if options.json is not None:
        found = {"speculative_config": config.as_json(), "acceptance": [test.as_json() for test in tests]}
        options.json.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not all(test.passed for test in tests):
        sys.exit(1)


def _configs(options: CheckOptions) -> list[SpeculativeConfig]:
    config = options.speculative()
    if config is None:
        raise ConfigError("check needs a --speculative-config to check", param="speculative_config")
    if options.n_range is None:
        return [config]
    first, _, last = options.n_range.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"--n-range is {options.n_range!r}, expected FROM:TO, e.g. 1:8", param="n_range")
    return [replace(config, num_speculative_tokens=n) for n in range(int(first), int(last) + 1)]


def _prompts(options: CheckOptions) -> list[Prompt]:
    from outrider.evaluate.workloads import load

    if options.prompt_index is None:
        return load(options.dataset, num_prompts=options.num_prompts, folder=options.data_dir)
    prompts = load(options.dataset, num_prompts=options.prompt_index + 1, folder=options.data_dir)
    if not 0 <= options.prompt_index < len(prompts):
        raise ConfigError(f"--prompt-index is {options.prompt_index}, the set has {len(prompts)}", param="prompt_index")
    return prompts[-1:]


def _told(options: CheckOptions, config: SpeculativeConfig, section: Section) -> Section:
    """Print a section's verdict in a line, and how to see each divergence again."""
    from outrider.evaluate.lossless import TextVerdict

    name = f"{config.method} N={config.num_speculative_tokens} {section.name}"
    drafted = f"drafted {section.num_drafted:,}, accepted {section.num_accepted:,}"
    found = section.result
    if found.reason:
        print(f"{name}: {found.verdict} ({found.reason})")
    elif isinstance(found, TextVerdict):
        print(f"{name}: {_text_line(found)}, {drafted}")
        for item in found.divergences[:5]:
            place = f"prompt {item.prompt_index}, token {item.position}, margin {item.margin:.4f}"
            print(f"  divergence at {place}: plain {item.plain_token}, speculative {item.speculative_token}")
            print(f"  again: {_again(options, config, item.prompt_index)}")
    else:
        print(f"{name}: {_distribution_line(found)}, {drafted}")
    for error in section.drafting_errors:
        print(f"  drafting stopped: {error}")
    if not section.num_drafted and not found.reason:
        print("  nothing was drafted here")
    sys.stdout.flush()
    return section


def _text_line(found: TextVerdict) -> str:
    size = f"{found.num_prompts} prompts, {found.num_tokens:,} tokens"
    if found.verdict == "same":
        return f"same, {size}"
    ties = len(found.differences) - len(found.divergences)
    rate = f"{ties} near-ties in {size} (rate {found.near_tie_rate:.1e}, bound {found.bound:g})"
    return f"{found.verdict}, margin at most {found.max_margin:.4f}, {rate}"


def _distribution_line(found: DistributionVerdict) -> str:
    return (
        f"{found.verdict}, p {found.p_tokens:.3f} for tokens and {found.p_lengths:.3f} for lengths "
        f"(mean {found.mean_len_plain:.1f} and {found.mean_len_speculative:.1f}), "
        f"{found.num_samples} texts a side on {found.num_prompts} prompts"
    )


def _again(options: CheckOptions, config: SpeculativeConfig, prompt_index: int) -> str:
    """A command that shows one prompt's divergence by itself."""
    settings = json_module.dumps(config.as_json())
    words = ["outrider", "check", options.model, "--speculative-config", settings, "--dataset", options.dataset]
    words += ["--prompt-index", str(prompt_index), "--max-tokens", str(options.max_tokens), "--dtype", options.dtype]
    words += ["--seed", str(options.seed or 0), "--temperature", str(options.temperature), "--num-samples", "0"]
    return shlex.join(words)


def _write(options: CheckOptions, reports: list[CheckReport]) -> None:
    if options.json is None or not reports:
        return
    runs: list[dict[str, Any]] = [
        {
            "speculative_config": report.config.as_json(),
            "verdict": report.verdict,
            "num_drafted": report.num_drafted,
            "sections": {section.name: section.as_json() for section in report.sections},
        }
        for report in reports
    ]
    from outrider.evaluate.lossless import worst

    whole = {"verdict": worst([report.verdict for report in reports]), "model": options.model, "runs": runs}
    options.json.write_text(json_module.dumps(whole, indent=1) + "\n", encoding="utf-8")
