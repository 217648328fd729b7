"""From the rounds of a benchmark to its numbers: throughput, speedup with its interval, latency, acceptance, time.

A group's typical run is the middle one of its repeats by wall time; throughput, acceptance and the split of time are
those of one pass over the prompts made of typical runs, so they add up. Latencies are of every request of every repeat.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.run import Bench, GroupRun
from outrider.bench.score import num_right
from outrider.config import SpeculativeConfig
from outrider.evaluate.lossless import TextVerdict
from outrider.metrics import SpeculationCounters, bootstrap_ratio, percentile
from outrider.types import RequestStats


@dataclass(frozen=True)
class Spread:
    """The middle and the far end of some measured seconds; nan where there were none."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The percentiles of values."""
        return cls(percentile(values, 0.5), percentile(values, 0.99))


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one engine did in a pass over the prompts.

    tok_s: output tokens by wall time, reading of prompts included. decode_tok_s: what one reader sees after the first
    token. ttft_s: from leaving the queue to the first token. tpot_s: seconds per token after it, request by request.
    draft_s, verify_s: drafting; the target's forwards, prompts included. num_right: exact matches where asked for.
    """

    num_tokens: int
    seconds: float
    decode_tok_s: float
    ttft_s: Spread
    tpot_s: Spread
    draft_s: float
    verify_s: float
    counters: SpeculationCounters
    drafting_errors: tuple[str, ...]
    num_right: int | None

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def other_s(self) -> float:
        """Scheduling, sampling, verification's own arithmetic, text."""
        return max(0.0, self.seconds - self.draft_s - self.verify_s)


@dataclass(frozen=True)
class Speedup:
    """Speculative over plain tokens per second, and its bootstrap interval over groups of prompts."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Compared:
    """One drafting configuration against plain decoding."""

    config: SpeculativeConfig
    side: Side
    speedup: Speedup
    lossless: TextVerdict


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """All that a benchmark found. `num_answers` items have a known answer; 0 where scores were not asked for."""

    plain: Side
    runs: tuple[Compared, ...]
    num_items: int
    num_groups: int
    num_rounds: int
    is_complete: bool
    num_answers: int
    peak_memory_bytes: int


def numbers(bench: Bench, *, score: bool = False) -> Numbers:
    """Every number of the rounds that were completed; at least one is needed."""
    done = sorted({item.group for item in bench.rounds})
    typical = [[_typical(bench, group, side) for group in done] for side in range(len(bench.engines))]
    sides = [_side(bench, side, runs, score) for side, runs in enumerate(typical)]
    return Numbers(
        plain=sides[0],
        runs=tuple(
            Compared(config, sides[side], _speedup(typical[0], typical[side]), bench.lossless(side))
            for side, config in enumerate(bench.configs, start=1)
        ),
        num_items=sum(len(bench.groups[group]) for group in done),
        num_groups=len(done),
        num_rounds=len(bench.rounds),
        is_complete=bench.is_complete,
        num_answers=sum(item.answer is not None for item, _ in bench.outputs(0)) if score else 0,
        peak_memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has held, weights and every engine's cache included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _typical(bench: Bench, group: int, side: int) -> GroupRun:
    runs = sorted((item.runs[side] for item in bench.rounds if item.group == group), key=lambda run: run.seconds)
    return runs[(len(runs) - 1) // 2]


def _speedup(plain: Sequence[GroupRun], speculative: Sequence[GroupRun]) -> Speedup:
    seconds = [[run.seconds for run in runs] for runs in (plain, speculative)]
    tokens = [[float(run.num_tokens) for run in runs] for runs in (speculative, plain)]
    return Speedup(*bootstrap_ratio(seconds[0], seconds[1], factor=(tokens[0], tokens[1])))


def _side(bench: Bench, side: int, typical: Sequence[GroupRun], score: bool) -> Side:
    every = [output.stats for item in bench.rounds for output in item.runs[side].outputs if output.stats is not None]
    counters = SpeculationCounters()
    for run in typical:
        counters.merge(run.stats.speculation)
    decoding = [stats for stats in every if stats.num_output_tokens > 1]
    return Side(
        num_tokens=sum(run.num_tokens for run in typical),
        seconds=sum(run.seconds for run in typical),
        decode_tok_s=_decode_tok_s(decoding),
        ttft_s=Spread.of([stats.first_token_s - stats.queued_s for stats in every]),
        tpot_s=Spread.of([_decode_s(stats) / (stats.num_output_tokens - 1) for stats in decoding]),
        draft_s=sum(run.stats.draft_s for run in typical),
        verify_s=sum(run.stats.verify_s for run in typical),
        counters=counters,
        drafting_errors=tuple(sorted({stats.drafting_error for stats in every if stats.drafting_error})),
        num_right=num_right((item.answer, output.text) for item, output in bench.outputs(side)) if score else None,
    )


def _decode_s(stats: RequestStats) -> float:
    return stats.total_s - stats.first_token_s


def _decode_tok_s(decoding: Sequence[RequestStats]) -> float:
    seconds = sum(map(_decode_s, decoding))
    return sum(stats.num_output_tokens - 1 for stats in decoding) / seconds if seconds else float("nan")
