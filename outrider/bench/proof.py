"""The proof of a policy: measured afresh against plain decoding and the best fixed choice, in turns, on new prompts.

The policy runs as verbs run it, with its rules by class and load, and guarded; the fixed choice as the sweep measured
it, the same everywhere. What was picked as the best of several looks better than it is, so nothing that is measured
here was there when the policy was made. Not here: making the policy (policy.py).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from textwrap import wrap
from typing import Any

from outrider.bench.backends import Backend
from outrider.bench.cells import cells_of
from outrider.bench.context import Prompts
from outrider.bench.grid import PLAIN, Block, Choice, Grid, Setting
from outrider.bench.pairs import Pair, Ratio, speedup
from outrider.bench.policy import class_of, pooled
from outrider.bench.recommend import fixed_choices, interval, label
from outrider.bench.results import Results
from outrider.bench.sweep import job_of
from outrider.config import SpeculativeConfig
from outrider.drafting.policy import Policy
from outrider.evaluate.conversation import Progress

# Sides of a measurement, and what the policy's pairs are against.
_POLICY, _FIXED = Choice("policy", 0), Choice("fixed", 0)
_WARM_UP_LEN = 16
_MOST_REPEATS = 4
_WIDTH = 80
_NAME_WIDTH, _TAKEN_WIDTH, _RATIO_WIDTH = 10, 16, 21


@dataclass(frozen=True, kw_only=True)
class Proven:
    """What the policy takes at a load of a class, and its speed there over plain decoding's and the fixed choice's."""

    workload: str
    concurrency: int
    taken: Choice
    over_plain: Ratio
    over_fixed: Ratio | None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Every class at every load, and all together. `fixed` is None where no choice was measured everywhere."""

    fixed: Choice | None
    places: tuple[Proven, ...]
    over_plain: Ratio
    over_fixed: Ratio | None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def best_fixed(results: Results) -> Choice | None:
    """The one choice that is best over all places, by geometric mean; None where none was measured in all of them."""
    cells = [cell for cell in cells_of(results) if cell.choice != PLAIN]
    if len({cell.place for cell in cells}) == 1:
        return max(cells, key=lambda cell: cell.speedup.ratio).choice
    found = fixed_choices(cells)
    return Choice(found[0].method, found[0].num_speculative_tokens) if found else None


class Prover:
    """Measures a policy in the places of a grid; `prompts` are new ones for it. Raises as `Backend.prepare` does."""

    def __init__(self, backend: Backend, grid: Grid, prompts: Prompts, policy: Policy, fixed: Choice | None) -> None:
        self._backend, self._grid, self._prompts = backend, grid, prompts
        self._policy, self._fixed = policy, fixed
        always: dict[Choice, SpeculativeConfig | None] = {PLAIN: None}
        if fixed is not None:
            always[_FIXED] = backend.prepare([grid.config(fixed)])[0]
        self._sides = {workload: {**always, **self._rule(workload)} for workload in grid.workloads}
        self._pairs: dict[tuple[Setting, Choice], list[Pair]] = defaultdict(list)

    def _rule(self, workload: str) -> dict[Choice, SpeculativeConfig | None]:
        """The policy's side, guarded; none where it is plain decoding itself."""
        rule = self._policy.rule(class_of(workload))
        if rule is None:
            return {}
        return {_POLICY: self._backend.prepare([replace(rule, guard=True) if rule.guard is None else rule])[0]}

    def run(self, progress: Progress, until: float) -> Proof:
        """Every block once, then again while it is before `until`, a time of time.monotonic."""
        self._warm_up()
        done = 0
        for repeat in range(_MOST_REPEATS):
            grid = replace(self._grid, repeats=1, seed=self._grid.seed + 1 + repeat)
            blocks = list(grid.blocks())
            for block in blocks:
                if repeat and time.monotonic() >= until:
                    return self._proof()
                self._measure(grid, block)
                progress("proof", done := done + 1, len(blocks) * (repeat + 1))
        return self._proof()

    def _warm_up(self) -> None:
        """Every side at every load once, briefly: what is built or measured on first use is nobody's cost."""
        brief = replace(self._grid, max_tokens=min(_WARM_UP_LEN, self._grid.max_tokens))
        for setting in brief.settings:
            for config in self._sides[setting.workload].values():
                self._backend.run(job_of(brief, self._prompts, Block(setting, 0, 0), config))

    def _measure(self, grid: Grid, block: Block) -> None:
        sides = list(self._sides[block.setting.workload].items())
        random.Random(f"{grid.seed} {block}").shuffle(sides)
        found = {side: self._backend.run(job_of(grid, self._prompts, block, config)) for side, config in sides}
        chosen = found.get(_POLICY, found[PLAIN])
        for side in (PLAIN, _FIXED):
            if side in found:
                self._pairs[block.setting, side].append(Pair(block.group, found[side], chosen))

    def _proof(self) -> Proof:
        def place(setting: Setting) -> tuple[str, int]:
            return class_of(setting.workload), setting.concurrency

        every = self._grid.settings
        return Proof(
            fixed=self._fixed,
            places=tuple(
                self._proven(*key, list(settings)) for key, settings in groupby(sorted(every, key=place), key=place)
            ),
            over_plain=speedup(pooled(self._pairs, every, PLAIN)),
            over_fixed=self._over_fixed(every),
        )

    def _proven(self, workload: str, load: int, settings: Sequence[Setting]) -> Proven:
        rule, length = self._policy.rule(workload), self._policy.num_tokens_for(load, workload)
        return Proven(
            workload=workload,
            concurrency=load,
            taken=PLAIN if rule is None or not length else Choice(rule.method, length),
            over_plain=speedup(pooled(self._pairs, settings, PLAIN)),
            over_fixed=self._over_fixed(settings),
        )

    def _over_fixed(self, settings: Collection[Setting]) -> Ratio | None:
        return None if self._fixed is None else speedup(pooled(self._pairs, settings, _FIXED))


def lines(proof: Proof) -> list[str]:
    """The proof as a table, and what it says, in at most 80 columns."""
    fixed = "" if proof.fixed is None else f"over {label(proof.fixed)}"
    table = [_row("workload", "load", "policy", "over plain", fixed)]
    for item in proof.places:
        taken = label(item.taken)
        table.append(_row(item.workload, item.concurrency, taken, _short(item.over_plain), _short(item.over_fixed)))
    table.append(_row("all", "", "", _short(proof.over_plain), _short(proof.over_fixed)))
    return [*table, *wrap(" ".join([_verdict(proof), *_slower(proof)]), _WIDTH)]


def _row(name: str, load: object, taken: str, plain: str, fixed: str) -> str:
    parts = (
        f"{name[:_NAME_WIDTH]:<{_NAME_WIDTH}} {load:>4}",
        f"{taken[:_TAKEN_WIDTH]:<{_TAKEN_WIDTH}}",
        f"{plain:<{_RATIO_WIDTH}}",
        fixed[:_RATIO_WIDTH],
    )
    return "  ".join(parts).rstrip()


def _short(ratio: Ratio | None) -> str:
    return "" if ratio is None else interval(ratio).replace(" to ", "-")


def _verdict(proof: Proof) -> str:
    found = proof.over_plain
    if all(item.taken == PLAIN for item in proof.places):
        return "The policy is plain decoding: nothing was surely faster."
    if found.low is not None and found.low > 1:
        return f"The policy is faster than plain decoding: {interval(found)}."
    if found.high is not None and found.high < 1:
        return f"The policy is slower than plain decoding: {interval(found)}. Better draft nothing."
    return f"The policy is not surely better than plain decoding: {interval(found)}."


def _slower(proof: Proof) -> list[str]:
    places = [
        f"{item.workload} at {item.concurrency}"
        for item in proof.places
        if item.over_plain.high is not None and item.over_plain.high < 1
    ]
    return [f"It is slower than plain decoding in: {', '.join(places)}."] if places else []
