"""Results of sweeps that never ran: rows made from a speed and an acceptance that the test knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.backends import Job, Measured
from outrider.bench.grid import PLAIN, Block, Choice, Grid, Setting
from outrider.bench.results import Header, Results, ResultsFile, Row, Stopped
from outrider.config import SpeculativeConfig
from outrider.metrics import SpeculationCounters
from tests.kit.source import ROOT

PUBLISHED = ROOT.parent / "shared" / "data" / "amd_blog_sweep.csv"
"""The published measurements, which a checkout may have beside it."""
HEADER = "model,method,dataset,baseline_tok_s,N,speedup,tok_s,MAL,AR_pct,per_position_pct\n"
TABLE = (
    HEADER + "org/m,Some <b>method</b>,GSM8K,100,1,1.5,150,1.90,90.0,90\n"
    "org/m,Some <b>method</b>,GSM8K,100,2,0.9,90,2.40,70.0,90 50\n"
    "org/m,Other,MBPP,200,3,1.2,240,2.50,50.0,80 50 20\n"
)
IDENTITY = "0123456789abcdef"
Speed = Callable[[Setting, Choice], float]


def grid(**changes: Any) -> Grid:
    """Two methods at two N in one setting, four groups, three repeats, nothing given up; `changes` are its fields."""
    fields: dict[str, Any] = {
        "methods": {"ngram": {"method": "ngram"}, "draft_model": {"method": "draft_model", "model": "some"}},
        "lengths": {"ngram": [2, 4], "draft_model": [2, 4]},
        "workloads": ["math"],
        "concurrency": [1],
        "temperatures": [0.0],
        "context_lens": [0],
        "num_prompts": 4,
        "max_tokens": 100,
        "repeats": 3,
        "seed": 0,
        "stop_below": 0.0,
    }
    return Grid(**(fields | changes))


def header(of: Grid, **changes: Any) -> Header:
    """A header for the grid; `changes` are its fields."""
    fields: dict[str, Any] = {
        "target": "some-target",
        "identity": IDENTITY,
        "grid": of.as_json(),
        "engine": {"dtype": "float32"},
        "prompts": {workload: f"sha of {workload}" for workload in of.workloads},
        "methods": {},
        "conditions": {"date": "2026-01-01", "cpu": "none", "engine": {"dtype": "float32"}},
    }
    return Header(**(fields | changes))


def measured(
    num_tokens: int, seconds: float, choice: Choice = PLAIN, *, accept: float = 0.7, text: str = "same", **changes: Any
) -> Measured:
    """A group's measurement whose drafts are each accepted with probability `accept`, rounded to whole rounds."""
    counters = SpeculationCounters()
    length, done = choice.num_speculative_tokens, 1
    random = np.random.default_rng(num_tokens + length)
    while done < num_tokens:
        accepted = next((i for i in range(length) if random.random() > accept), length)
        counters.observe_round(length, accepted, min(accepted + 1, num_tokens - done))
        done += min(accepted + 1, num_tokens - done)
    fields: dict[str, Any] = {
        "num_prompts": 1,
        "num_prompt_tokens": 10,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "num_decode_tokens": num_tokens - 1,
        "decode_s": 0.9 * seconds,
        "ttft_s": (0.1 * seconds,),
        "draft_s": 0.05 * seconds * length,
        "verify_s": 0.5 * seconds,
        "speculation": counters,
        "by_output_position": ((0, 10, 10 * (1 + length // 2)), (64, 10, 10 + 5 * (length // 2))),
        "drafting_errors": (),
        "text_sha256": text,
    }
    return Measured(**(fields | changes))


def rows_of(
    of: Grid, speed: Speed, *, noise: float = 0.0, sitting: int = 1, slow: float = 1.0, seed: int = 0
) -> list[Row]:
    """Every row of a grid: `speed` in tokens a second, each measurement off by a log-normal factor of width `noise`.

    `slow` divides every speed of the sitting, plain decoding's as well.
    """
    random = np.random.default_rng(seed)
    rows = []
    for block in of.blocks():
        for choice in of.order(block):
            num_tokens = 80 + 5 * block.group
            seconds = num_tokens / speed(block.setting, choice) * slow * np.exp(noise * random.standard_normal())
            rows.append(row(block, choice, measured(num_tokens, float(seconds), choice), sitting=sitting))
    return rows


def row(block: Block, choice: Choice, result: Measured, *, sitting: int = 1, is_anchor: bool = False) -> Row:
    """One row."""
    return Row(
        sitting=sitting,
        is_anchor=is_anchor,
        setting=block.setting,
        choice=choice,
        repeat=block.repeat,
        group=block.group,
        measured=result,
    )


def results(of: Grid, speed: Speed, **how: Any) -> Results:
    """A whole file's content, from one sitting."""
    made = header(of)
    return Results(header=made, sittings=[made.conditions], rows=rows_of(of, speed, **how))


def speeds(by_choice: Mapping[tuple[str, int], float], plain: float = 100.0) -> Speed:
    """Speeds by method and N, whatever the setting; plain decoding's for what is not in it."""
    return lambda setting, choice: by_choice.get((choice.method, choice.num_speculative_tokens), plain)


class FakeBackend:
    """Answers with made-up measurements. `kill_at`: the job, counted from 0, at which it is interrupted."""

    target, max_len = "some-target", 4096

    def __init__(self, speed: Speed, kill_at: int | None = None) -> None:
        self.speed, self.kill_at = speed, kill_at
        self.jobs: list[Job] = []

    def identity(self) -> str:
        return IDENTITY

    def conditions(self) -> dict[str, Any]:
        return {"date": "2026-01-01"}

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def methods(self) -> list[str]:
        return ["ngram"]

    def prepare(self, configs: list[SpeculativeConfig]) -> list[SpeculativeConfig]:
        return list(configs)

    def run(self, job: Job) -> Measured:
        if len(self.jobs) == self.kill_at:
            raise KeyboardInterrupt
        self.jobs.append(job)
        choice = PLAIN
        if job.config is not None:
            choice = Choice(job.config.method, job.config.num_speculative_tokens)
        setting = Setting("math", job.concurrency, job.params[0].temperature, 0)
        num_tokens = 10 * len(job.prompts)
        return measured(num_tokens, num_tokens / self.speed(setting, choice), choice)


def prompts_for(of: Grid) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """Prompts of some ids for every workload and length of context."""
    ids = [(index + 1, 2, 3) for index in range(of.num_prompts)]
    return {(workload, length): ids for workload in of.workloads for length in of.context_lens}


def configs_for(of: Grid) -> dict[Choice, SpeculativeConfig]:
    """Each choice's drafting settings."""
    return {choice: of.config(choice) for choice in of.choices}


def swept(path: Path, **changes: Any) -> Path:
    """A results file of a made-up sweep in four places."""
    of = grid(workloads=["math", "code"], concurrency=[1, 4], **changes)
    speed = speeds({("ngram", 2): 130.0, ("ngram", 4): 70.0, ("draft_model", 2): 120.0})
    file = ResultsFile.open(path, header(of))
    for row in rows_of(of, speed, noise=0.03):
        file.add_row(row)
    file.add_stopped(Stopped(setting=of.settings[0], choice=Choice("ngram", 4), reason="it is slow"))
    return path
