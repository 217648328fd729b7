"""`outrider tune`: a small sweep in a bounded time, a policy of it, and the proof that the policy is any good."""

from __future__ import annotations

import json as json_module
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli.options import verb
from outrider.cli.sweep import (
    ConcurrencyOption,
    MaxTokensOption,
    MinutesOption,
    OutOption,
    PolicyOption,
    StopBelowOption,
    SweepOptions,
    Swept,
    TokensOption,
    check,
    measured,
)

if TYPE_CHECKING:
    from outrider.bench.proof import Proof
    from outrider.drafting.policy import Policy

_SWEEP_SHARE = 0.75  # of the time; the rest is the proof's


@dataclass(frozen=True, kw_only=True)
class TuneOptions(SweepOptions):
    """What `tune` takes: a sweep's options, with defaults for a few minutes."""

    out: OutOption = Path("tune.jsonl")
    policy: PolicyOption = Path("policy.json")
    minutes: MinutesOption = 10.0
    tokens: TokensOption = "2,4"
    concurrency: ConcurrencyOption = "1,4"
    max_tokens: MaxTokensOption = 64
    stop_below: StopBelowOption = 0.9


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "tune", TuneOptions)(run)


def run(options: TuneOptions) -> None:
    """Measure for a few minutes what to draft where, write it as a policy, and prove it by measuring again."""
    check(options)
    assert options.minutes is not None and options.policy is not None, "they have defaults"
    until = time.monotonic() + 60 * options.minutes
    from outrider.bench.policy import lines, policy_of
    from outrider.bench.proof import lines as proof_lines
    from outrider.drafting.policy import kept_path

    with measured(replace(options, minutes=_SWEEP_SHARE * options.minutes)) as swept:
        policy = policy_of(swept.results)
        for path in (options.policy, kept_path(policy.fingerprint)):
            policy.save(path)
        for line in lines(policy):
            print(line)
        proof = _prove(options, swept, policy, until)
    for line in ("", *proof_lines(proof)):
        print(line)
    print(f'the policy is in {options.policy}, and method "auto" takes it from now on', file=sys.stderr)
    if options.json is not None:
        found = {"policy": policy.as_json(), "proof": proof.as_json()}
        options.json.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")


def _prove(options: TuneOptions, swept: Swept, policy: Policy, until: float) -> Proof:
    from outrider.bench.context import encode_prompts, read_texts
    from outrider.bench.proof import Prover, best_fixed
    from outrider.cli.progress import ProgressBars

    grid, backend = swept.grid, swept.backend
    texts = read_texts(grid.workloads, grid.num_prompts, options.data_dir, fresh=True)
    prompts = encode_prompts(grid, texts, backend.encode, backend.max_len)
    with ProgressBars() as bars:
        return Prover(backend, grid, prompts, policy, best_fixed(swept.results)).run(bars.show, until)
