"""Which choice to take in each place, why, and how sure that is; plain decoding wherever nothing is surely faster.

A recommendation is what a policy is made of: a place, a method, an N, and the speedup to expect. It rests on cells and,
where there are measurements in pairs, on how choices rank when groups of prompts are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.cells import Cell, Place
from outrider.bench.grid import PLAIN, Choice
from outrider.bench.pairs import Ranking, Ratio

_FEW_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The choice for one place. probability: of being the fastest, if groups of prompts were drawn again.

    as_good: choices that these measurements cannot tell from it.
    """

    place: Place
    method: str
    num_speculative_tokens: int
    speedup: Ratio
    plain_tok_s: float
    tok_s: float
    probability: float | None
    as_good: tuple[str, ...]
    reasons: tuple[str, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FixedChoice:
    """The one choice for all places of a target, if there may be only one: the best by geometric mean of speedups.

    mean_loss: speedup given away against each place's best choice, on average. worst: where it does least.
    """

    target: str
    method: str
    num_speculative_tokens: int
    mean_speedup: float
    mean_loss: float
    worst: Place
    worst_speedup: float


def label(choice: Choice) -> str:
    """A choice for people."""
    return choice.method if choice == PLAIN else f"{choice.method} N={choice.num_speculative_tokens}"


def of_place(cells: Sequence[Cell], ranking: Ranking | None) -> Recommendation:
    """The recommendation for the place of these cells, plain decoding's among them."""
    plain = next(cell for cell in cells if cell.choice == PLAIN)
    others = sorted((cell for cell in cells if cell.choice != PLAIN), key=lambda cell: -cell.speedup.ratio)
    able = [cell for cell in others if cell.stopped is None]
    best = able[0] if able else None
    refusal = _why_plain(best)
    taken = plain if best is None or refusal else best
    ranked = ranking if ranking is not None and ranking.best == taken.choice else None
    as_good = [] if ranked is None else [label(choice) for choice in ranked.as_good]
    return Recommendation(
        place=taken.place,
        method=taken.method,
        num_speculative_tokens=taken.num_speculative_tokens,
        speedup=taken.speedup,
        plain_tok_s=taken.plain_tok_s,
        tok_s=taken.tok_s,
        probability=None if ranked is None else ranked.probability[taken.choice],
        as_good=tuple(as_good),
        reasons=tuple([refusal] if refusal else _reasons(taken, able)),
        doubts=tuple(_doubts(taken, others, as_good)),
    )


def fixed_choices(cells: Sequence[Cell]) -> list[FixedChoice]:
    """For each target with several places, the best choice among those that were measured in all of them."""
    by_target: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.choice != PLAIN:
            by_target.setdefault(cell.place.target, []).append(cell)
    found = []
    for target, own in by_target.items():
        places = {cell.place for cell in own}
        by_choice: dict[Choice, list[Cell]] = {}
        for cell in own:
            by_choice.setdefault(cell.choice, []).append(cell)
        complete = {choice: items for choice, items in by_choice.items() if len(items) == len(places)}
        if len(places) > 1 and complete:
            found.append(_fixed(target, complete, _best_by_place(own)))
    return found


def best_of_methods(cells: Sequence[Cell]) -> list[Cell]:
    """Each method's best cell in each place, in the order of the cells."""
    best: dict[tuple[Place, str], Cell] = {}
    for cell in cells:
        if cell.choice == PLAIN:
            continue
        key = (cell.place, cell.method)
        if key not in best or cell.speedup.ratio > best[key].speedup.ratio:
            best[key] = cell
    return list(best.values())


def pareto(cells: Sequence[Cell]) -> list[Cell]:
    """Cells than which no other is faster both for one reader and in all; slowest for all first."""
    known = [cell for cell in cells if cell.user_tok_s is not None]
    known.sort(key=lambda cell: (-(cell.user_tok_s or 0), -cell.tok_s))
    front: list[Cell] = []
    for cell in known:
        if not front or cell.tok_s > front[-1].tok_s:
            front.append(cell)
    return front


def times(ratio: float) -> str:
    """A speedup for people: two decimals, three where two would hide that it is below 1."""
    short = f"{ratio:.2f}"
    return f"{ratio:.3f}" if ratio < 1 and short == "1.00" else short


def interval(ratio: Ratio) -> str:
    """A speedup for people, with its interval where it is known."""
    if ratio.low is None or ratio.high is None:
        return f"{times(ratio.ratio)}x"
    return f"{times(ratio.ratio)}x ({times(ratio.low)} to {times(ratio.high)})"


def _why_plain(best: Cell | None) -> str:
    """Why nothing should be drafted; empty if something should."""
    if best is None:
        return "every choice was given up here"
    if best.speedup.ratio <= 1:
        return f"nothing is faster than plain decoding; the best is {label(best.choice)} at {interval(best.speedup)}"
    if best.speedup.low is not None and best.speedup.low <= 1:
        return f"the best, {label(best.choice)} at {interval(best.speedup)}, is not surely faster than plain decoding"
    return ""


def _reasons(taken: Cell, able: Sequence[Cell]) -> list[str]:
    reasons = [
        f"{taken.mean_acceptance_length:.2f} tokens a round, {taken.acceptance_rate:.0%} of drafts accepted",
    ]
    if taken.time is not None:
        whole = taken.time.draft_s + taken.time.verify_s + taken.time.other_s
        reasons.append(f"drafting takes {taken.time.draft_s / whole:.0%} of the time")
    rivals = [cell for cell in best_of_methods(able) if cell is not taken]
    if rivals:
        reasons.append(f"next method: {label(rivals[0].choice)} at {rivals[0].speedup.ratio:.2f}x")
    return reasons


def _doubts(taken: Cell, others: Sequence[Cell], as_good: Sequence[str]) -> list[str]:
    doubts = []
    if as_good:
        doubts.append(f"not to be told from it by these measurements: {', '.join(as_good)}")
    if taken.speedup.low is None and taken.num_pairs is not None and taken.choice != PLAIN:
        doubts.append("measured once, so no interval")
    elif taken.num_groups is not None and taken.num_groups < _FEW_GROUPS:
        doubts.append(f"the interval rests on {taken.num_groups} groups of prompts only")
    doubts += [f"{label(cell.choice)} was given up: {cell.stopped}" for cell in others if cell.stopped]
    return doubts


def _fixed(target: str, by_choice: Mapping[Choice, Sequence[Cell]], best: Mapping[Place, float]) -> FixedChoice:
    def mean(cells: Sequence[Cell]) -> float:
        return math.exp(sum(math.log(max(cell.speedup.ratio, 1e-9)) for cell in cells) / len(cells))

    choice = max(by_choice, key=lambda choice: mean(by_choice[choice]))
    cells = by_choice[choice]
    worst = min(cells, key=lambda cell: cell.speedup.ratio)
    return FixedChoice(
        target=target,
        method=choice.method,
        num_speculative_tokens=choice.num_speculative_tokens,
        mean_speedup=mean(cells),
        mean_loss=sum(1 - cell.speedup.ratio / best[cell.place] for cell in cells) / len(cells),
        worst=worst.place,
        worst_speedup=worst.speedup.ratio,
    )


def _best_by_place(cells: Sequence[Cell]) -> dict[Place, float]:
    best: dict[Place, float] = {}
    for cell in cells:
        best[cell.place] = max(best.get(cell.place, 0.0), cell.speedup.ratio)
    return best
