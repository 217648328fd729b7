"""The statistics of a sweep: measurements in pairs with plain decoding, speedups with intervals, and which is best.

A pair is one group of prompts under a choice and under plain decoding, in the same block and the same sitting; nothing
else is compared, since a machine is not the same tomorrow. Intervals come from resampling groups of prompts as wholes,
with all their repeats, because repeats of the same prompts say nothing about other prompts; where there is one group
only, its pairs are resampled. Source: Efron and Tibshirani 1993, chapter 13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.bench.backends import Measured
from outrider.bench.grid import PLAIN, Choice, Setting
from outrider.bench.results import Row
from outrider.metrics import bootstrap_ratio

_NUM_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95% interval, which is not known from one item alone."""

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Pair:
    """One group under plain decoding and under a choice, within one block and sitting."""

    group: int
    plain: Measured
    chosen: Measured


@dataclass(frozen=True)
class Ranking:
    """Choices of one setting against each other. probability: how often a choice is the fastest of all, plain decoding
    among them, when groups are resampled. as_good: those that cannot be told from the fastest one.
    """

    best: Choice
    probability: Mapping[Choice, float]
    as_good: tuple[Choice, ...]


def whole_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows that count: no anchors, and none without plain decoding's of the same block and sitting."""
    counted = [row for row in rows if not row.is_anchor]
    plain = {_block(row) for row in counted if row.choice == PLAIN}
    return [row for row in counted if _block(row) in plain]


def in_pairs(rows: Iterable[Row]) -> dict[tuple[Setting, Choice], list[Pair]]:
    """Every pair that the rows make, by setting and choice."""
    counted = whole_rows(rows)
    plain = {_block(row): row.measured for row in counted if row.choice == PLAIN}
    found: dict[tuple[Setting, Choice], list[Pair]] = defaultdict(list)
    for row in counted:
        if row.choice != PLAIN:
            found[row.setting, row.choice].append(Pair(row.group, plain[_block(row)], row.measured))
    return dict(found)


def speedup(pairs: Sequence[Pair]) -> Ratio:
    """Tokens per second over plain decoding's."""
    return _ratio([_throughput_columns(items) for items in _items(pairs)])


def user_speedup(pairs: Sequence[Pair]) -> Ratio:
    """The same of the speed that one reader sees after the first token; pairs without such tokens say nothing."""
    spoken = [pair for pair in pairs if pair.plain.num_decode_tokens and pair.chosen.num_decode_tokens]
    return _ratio([_reader_columns(items) for items in _items(spoken)]) if spoken else Ratio(1.0)


def rank(pairs: Mapping[Choice, Sequence[Pair]]) -> Ranking | None:
    """Compare choices over the groups that all of them answered; None where these are fewer than two."""
    groups = set.intersection(*({pair.group for pair in items} for items in pairs.values())) if pairs else set()
    if len(groups) < 2:
        return None
    choices = [PLAIN, *pairs]
    values = np.stack([_sums(pairs[choice], sorted(groups)) for choice in pairs])
    picks = np.random.default_rng(0).integers(len(groups), size=(_NUM_RESAMPLES, len(groups)))
    resampled = _speedups(values[:, :, picks].sum(axis=3))
    whole = _speedups(values.sum(axis=2, keepdims=True))[:, 0]
    winners = resampled.argmax(axis=0)
    best = int(whole.argmax())
    tail = (1 - _LEVEL) / 2
    as_good = [
        index
        for index in range(len(choices))
        if index != best and np.quantile(resampled[best] / resampled[index], tail) <= 1
    ]
    return Ranking(
        best=choices[best],
        probability={choice: float((winners == index).mean()) for index, choice in enumerate(choices)},
        as_good=tuple(choices[index] for index in sorted(as_good, key=lambda index: -whole[index])),
    )


def _block(row: Row) -> tuple[Setting, int, int, int]:
    return row.setting, row.sitting, row.repeat, row.group


def _items(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """What is resampled: groups of prompts with all their pairs; with one group, its pairs."""
    by_group: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_group[pair.group].append(pair)
    return list(by_group.values()) if len(by_group) > 1 else [[pair] for pair in pairs]


def _throughput_columns(pairs: Sequence[Pair]) -> tuple[float, float, float, float]:
    """Seconds of plain and chosen, tokens of chosen and plain."""
    return (
        sum(pair.plain.seconds for pair in pairs),
        sum(pair.chosen.seconds for pair in pairs),
        sum(pair.chosen.num_tokens for pair in pairs),
        sum(pair.plain.num_tokens for pair in pairs),
    )


def _reader_columns(pairs: Sequence[Pair]) -> tuple[float, float, float, float]:
    return (
        sum(pair.plain.decode_s for pair in pairs),
        sum(pair.chosen.decode_s for pair in pairs),
        sum(pair.chosen.num_decode_tokens for pair in pairs),
        sum(pair.plain.num_decode_tokens for pair in pairs),
    )


def _ratio(items: Sequence[tuple[float, float, float, float]]) -> Ratio:
    plain_s, chosen_s, chosen_tokens, plain_tokens = zip(*items, strict=True)
    ratio, low, high = bootstrap_ratio(
        plain_s, chosen_s, factor=(chosen_tokens, plain_tokens), num_resamples=_NUM_RESAMPLES, level=_LEVEL
    )
    return Ratio(ratio, low, high) if len(items) > 1 else Ratio(ratio)


def _sums(pairs: Sequence[Pair], groups: Sequence[int]) -> npt.NDArray[np.float64]:
    """[4, groups]: a choice's columns, group by group."""
    rows = [_throughput_columns([pair for pair in pairs if pair.group == group]) for group in groups]
    return np.array(rows, dtype=np.float64).T


def _speedups(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[1 + choices, resamples] of sums [choices, 4, resamples]; plain decoding comes first, and is 1."""
    found = sums[:, 0] / sums[:, 1] * sums[:, 2] / sums[:, 3]
    return np.concatenate([np.ones((1, found.shape[1])), found])
