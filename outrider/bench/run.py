"""The benchmark's loop: plain decoding and each drafting configuration on the same prompts, interleaved and repeated.

All engines share one copy of the target's weights. Prompts are taken in groups; a group runs on every engine before the
next one starts, and the order of the engines turns round from group to group and from repeat to repeat, so that a
machine that warms up or slows down is nobody's advantage. With concurrency c a group is started at once and c of it run
at any time, the next as soon as one ends. What the times mean is in bench/measure.py; what is printed, in table.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.config import SpeculativeConfig
from outrider.engine.stats import EngineStats
from outrider.errors import ConfigError
from outrider.evaluate.conversation import Item, Progress
from outrider.evaluate.lossless import TextPair, TextVerdict, compare, why_not_comparable
from outrider.llm import LLM, CompletionOutput
from outrider.types import SamplingParams

_WARM_UP_LEN = 16


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """How prompts are run. The request for item i has the seed `params.seed` + i."""

    params: SamplingParams
    concurrency: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("concurrency", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1", param=name)
        if self.params.n != 1:
            raise ConfigError(f"n is {self.params.n}: a benchmark runs one choice of each prompt", param="n")


@dataclass(frozen=True)
class GroupRun:
    """One group on one engine, once: wall seconds, what the engine counted, and the outputs in the items' order."""

    seconds: float
    stats: EngineStats
    outputs: tuple[CompletionOutput, ...]

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True)
class Round:
    """One group on every engine, once: plain's run first, then one of each drafting configuration."""

    group: int
    runs: tuple[GroupRun, ...]


class Bench:
    """Runs a plan and keeps its rounds. `plain` is an LLM without a drafter; its settings are everybody's.

    `rounds` grows while `run` runs: after Ctrl-C it holds what was completed.
    """

    def __init__(
        self, plain: LLM, configs: Sequence[SpeculativeConfig], items: Sequence[Item], plan: BenchPlan
    ) -> None:
        self.configs, self.items, self.plan = tuple(map(plain.complete, configs)), tuple(items), plan
        made = (plain, *(plain.sibling(config) for config in self.configs))
        self.engines = tuple(llm.retuned(llm.speculative, max_num_seqs=plan.concurrency) for llm in made)
        self.groups = in_groups(len(items), plan.concurrency)
        self.rounds: list[Round] = []

    def run(self, progress: Progress) -> None:
        """Warm up, then every group on every engine, as often as the plan says."""
        total, done = len(self.groups) * self.plan.repeats * len(self.engines), 0
        for engine in self.engines:
            self._run_group(engine, self.groups[0], _WARM_UP_LEN)
        for repeat in range(self.plan.repeats):
            for index, group in enumerate(self.groups):
                runs: dict[int, GroupRun] = {}
                for side in self._order(repeat + index):
                    runs[side] = self._run_group(self.engines[side], group, self.plan.params.max_tokens)
                    done += 1
                    progress("bench", done, total)
                self.rounds.append(Round(index, tuple(runs[side] for side in range(len(self.engines)))))

    @property
    def is_complete(self) -> bool:
        """Whether every round of the plan was run."""
        return len(self.rounds) == len(self.groups) * self.plan.repeats

    def lossless(self, side: int) -> TextVerdict:
        """The verdict on the text of a drafting configuration (counted from 1), over every group that was run."""
        config = self.configs[side - 1]
        reason = why_not_comparable(config, self.plan.params)
        if reason:
            return TextVerdict(verdict="not-applicable", reason=reason)
        pairs = []
        for group, first in self._first_rounds().items():
            both = zip(self.groups[group], first.runs[0].outputs, first.runs[side].outputs, strict=True)
            pairs += [self._pair(number, plain, other) for number, plain, other in both]
        return compare(self.engines[0].engine.model, pairs)

    def outputs(self, side: int) -> list[tuple[Item, CompletionOutput]]:
        """Every item that was run with its first output, for one engine (0 is plain)."""
        rounds = self._first_rounds()
        return [
            (self.items[number], output)
            for group in sorted(rounds)
            for number, output in zip(self.groups[group], rounds[group].runs[side].outputs, strict=True)
        ]

    def _first_rounds(self) -> dict[int, Round]:
        return {item.group: item for item in reversed(self.rounds)}

    def _pair(self, number: int, plain: CompletionOutput, other: CompletionOutput) -> TextPair:
        return TextPair(
            prompt_index=self.items[number].prompt_index,
            prompt_ids=self.items[number].ids,
            params=self._params(number),
            plain=tuple(plain.token_ids),
            speculative=tuple(other.token_ids),
        )

    def _order(self, turn: int) -> list[int]:
        order = list(range(len(self.engines)))
        return order if turn % 2 == 0 else order[::-1]

    def _params(self, number: int) -> SamplingParams:
        return replace(self.plan.params, seed=(self.plan.params.seed or 0) + number)

    def _run_group(self, llm: LLM, group: Sequence[int], max_tokens: int | None) -> GroupRun:
        params = [_limited(self._params(number), max_tokens) for number in group]
        llm.engine.stats = EngineStats()
        began = time.perf_counter()
        outputs = llm.generate([self.items[number].ids for number in group], params)
        seconds = time.perf_counter() - began
        return GroupRun(seconds, llm.engine.stats, tuple(output.outputs[0] for output in outputs))


def in_groups(num_items: int, concurrency: int) -> list[range]:
    """Cut items into groups: single ones at concurrency 1, else up to four times the concurrency, at least once it.

    At least four groups are kept where there are items for them, since a group is what the interval resamples.
    """
    size = 1 if concurrency == 1 else min(max(num_items // 4, concurrency), 4 * concurrency)
    return [range(first, min(first + size, num_items)) for first in range(0, num_items, size)]


def _limited(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """The same request cut to at most that many tokens."""
    if max_tokens is None or (params.max_tokens is not None and params.max_tokens <= max_tokens):
        return params
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
