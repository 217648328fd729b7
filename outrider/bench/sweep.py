"""The sweep's loop: block after block, each choice beside plain decoding, a row on disk after every measurement.

A sitting is one run of this process. It begins with a warm-up and an anchor, one choice that every sitting measures
again beside plain decoding, then takes up what is missing. A choice that is surely slower than allowed in a setting, or
whose drafter fails there, is given up there, and the file says so. Not here: what is measured in which order (grid.py),
and every judgement of the numbers (pairs.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.bench.backends import Backend, Job, Measured
from outrider.bench.context import Prompts
from outrider.bench.grid import PLAIN, Block, Choice, Grid, Setting
from outrider.bench.pairs import in_pairs, speedup, whole_rows
from outrider.bench.results import Results, ResultsFile, Row, Stopped
from outrider.config import SpeculativeConfig
from outrider.evaluate.conversation import Progress
from outrider.types import SamplingParams

_WARM_UP_LEN = 16
_LEAST_PAIRS = 3


@dataclass(frozen=True)
class Todo:
    """A block and the choices that are to be measured in it, in this order."""

    block: Block
    choices: tuple[Choice, ...]


class Sweep:
    """Measures what a grid asks for and a results file does not have yet. `configs` are the choices' as completed."""

    def __init__(
        self,
        backend: Backend,
        grid: Grid,
        prompts: Prompts,
        configs: Mapping[Choice, SpeculativeConfig],
        file: ResultsFile,
    ) -> None:
        self.backend, self.grid, self.prompts, self.configs, self.file = backend, grid, prompts, configs, file
        self._sitting = len(file.results.sittings)

    def run(self, progress: Progress, until: float | None = None) -> None:
        """One sitting: everything that is missing, but no block begins after `until`, a time of time.monotonic.

        Rows are kept as they come, so it may be interrupted anywhere.
        """
        todo = missing(self.grid, self.file.results)
        if not todo:
            return
        self._warm_up()
        self._anchor()
        total, done = sum(len(item.choices) for item in todo), 0
        for item in todo:
            if until is not None and time.monotonic() >= until:
                return
            stopped = self._stopped(item.block.setting)
            left = [choice for choice in item.choices if choice not in stopped]
            for choice in left if len(left) > 1 else ():
                self._measure(item.block, choice)
                progress("sweep", done := done + 1, total)
            self._give_up(item.block.setting)
            total -= len(item.choices) - len(left)

    def _stopped(self, setting: Setting) -> set[Choice]:
        return {stopped.choice for stopped in self.file.results.stopped if stopped.setting == setting}

    def _warm_up(self) -> None:
        """Every drafter once, briefly: what is built or fetched on first use is nobody's cost."""
        block = next(self.grid.blocks())
        each = {choice.method: choice for choice in (PLAIN, *self.grid.choices)}
        brief = replace(self.grid, max_tokens=min(_WARM_UP_LEN, self.grid.max_tokens))
        for choice in each.values():
            self.backend.run(job_of(brief, self.prompts, block, self.configs.get(choice)))

    def _anchor(self) -> None:
        block = Block(self.grid.settings[0], 0, 0)
        for choice in (PLAIN, self.grid.choices[0]):
            self._keep(block, choice, self._run(block, choice), is_anchor=True)

    def _measure(self, block: Block, choice: Choice) -> None:
        measured = self._run(block, choice)
        self._keep(block, choice, measured)
        if measured.drafting_errors:
            reason = f"drafting failed: {measured.drafting_errors[0]}"
            self.file.add_stopped(Stopped(setting=block.setting, choice=choice, reason=reason))

    def _run(self, block: Block, choice: Choice) -> Measured:
        return self.backend.run(job_of(self.grid, self.prompts, block, self.configs.get(choice)))

    def _keep(self, block: Block, choice: Choice, measured: Measured, *, is_anchor: bool = False) -> None:
        self.file.add_row(
            Row(
                sitting=self._sitting,
                is_anchor=is_anchor,
                setting=block.setting,
                choice=choice,
                repeat=block.repeat,
                group=block.group,
                measured=measured,
            )
        )

    def _give_up(self, setting: Setting) -> None:
        """Stop choices that are surely below what is allowed in this setting; they need a few pairs to be judged."""
        stopped = self._stopped(setting)
        rows = [row for row in self.file.results.rows if row.setting == setting]
        for (_, choice), pairs in in_pairs(rows).items():
            if choice in stopped or len(pairs) < _LEAST_PAIRS:
                continue
            found = speedup(pairs)
            if found.high is not None and found.high < self.grid.stop_below:
                reason = (
                    f"{found.ratio:.2f}x plain decoding ({found.low:.2f} to {found.high:.2f}) after {len(pairs)} pairs,"
                    f" below {self.grid.stop_below:g}"
                )
                self.file.add_stopped(Stopped(setting=setting, choice=choice, reason=reason))


def job_of(grid: Grid, prompts: Prompts, block: Block, config: SpeculativeConfig | None) -> Job:
    """A block's prompts under some drafting settings, or under none."""
    setting = block.setting
    group = grid.groups(setting)[block.group]
    own = prompts[setting.workload, setting.context_len]
    return Job(
        prompts=tuple(own[index] for index in group),
        params=_params(group, setting.temperature, grid.seed, grid.max_tokens),
        concurrency=setting.concurrency,
        config=config,
        workload=setting.workload,
    )


def missing(grid: Grid, results: Results) -> list[Todo]:
    """What is left to do. Rows that a killed sitting left without their plain partner are measured again."""
    had = {(*_place(row), row.choice) for row in whole_rows(results.rows)}
    given_up = {(stopped.setting, stopped.choice) for stopped in results.stopped}
    found = []
    for block in grid.blocks():
        place = (block.setting, block.repeat, block.group)
        left = {
            choice for choice in grid.choices if (*place, choice) not in had and (block.setting, choice) not in given_up
        }
        if left:
            found.append(Todo(block, tuple(choice for choice in grid.order(block) if choice in left | {PLAIN})))
    return found


def _place(row: Row) -> tuple[Setting, int, int]:
    return row.setting, row.repeat, row.group


def _params(group: Sequence[int], temperature: float, seed: int, max_tokens: int) -> tuple[SamplingParams, ...]:
    """Prompt i has the seed `seed` + i, under every choice and in every repeat."""
    return tuple(SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index) for index in group)
