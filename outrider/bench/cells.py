"""A report's unit: one choice in one place, with every number that is known of it. Made here from a sweep's results.

A published table (publication.py) gives the same record with less in it. Throughput of a choice is its place's plain
throughput times the speedup that was measured in pairs, so a choice that was measured on a slow day is not the worse
for it. Not here: which cell to take (recommend.py), and how any of it looks (figures.py, page.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.backends import Measured
from outrider.bench.grid import PLAIN, Choice, Grid, Setting
from outrider.bench.pairs import Pair, Ratio, in_pairs, speedup, user_speedup, whole_rows
from outrider.bench.results import Results
from outrider.metrics import SpeculationCounters, percentile


@dataclass(frozen=True)
class Place:
    """Where cells can be compared. What a published table does not say is None."""

    target: str
    workload: str
    concurrency: int | None = None
    temperature: float | None = None
    context_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Seconds of wall time for an output token: drafting, the target's forwards, all else."""

    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One choice in one place; plain decoding is a cell too, at N = 0. None where the source does not say.

    acceptance_shares: rounds that accepted exactly 0, 1, … drafts, as shares. by_output_position: (first position,
    rounds, mean committed length). num_same_text: of num_compared_texts groups, those with plain decoding's very text.
    stopped: why it was not measured to the end.
    """

    place: Place
    method: str
    num_speculative_tokens: int
    plain_tok_s: float
    tok_s: float
    speedup: Ratio
    user_tok_s: float | None = None
    ttft_p50_s: float | None = None
    mean_acceptance_length: float
    mean_committed_length: float | None = None
    acceptance_rate: float
    per_position_acceptance: tuple[float, ...]
    acceptance_shares: tuple[float, ...]
    by_output_position: tuple[tuple[int, int, float], ...] | None = None
    time: TimeSplit | None = None
    num_pairs: int | None = None
    num_groups: int | None = None
    num_same_text: int | None = None
    num_compared_texts: int | None = None
    stopped: str | None = None

    @property
    def choice(self) -> Choice:
        """Method and N."""
        return Choice(self.method, self.num_speculative_tokens)


def cells_of(results: Results) -> list[Cell]:
    """Every cell that has a pair, and plain decoding's of each place, in the order of places and choices."""
    target = results.header.target
    stopped = {(item.setting, item.choice): item.reason for item in results.stopped}
    pairs = in_pairs(results.rows)
    plain = _plain_runs(results)
    made = [_plain_cell(place_of(target, setting), runs) for setting, runs in plain.items()]
    for (setting, choice), found in pairs.items():
        place, reason = place_of(target, setting), stopped.get((setting, choice))
        made.append(_cell(place, choice, found, _total(plain[setting]), reason))
    asked = Grid(**results.header.grid).settings
    order = {place_of(target, setting): index for index, setting in enumerate(asked)}
    return sorted(made, key=lambda cell: (order[cell.place], cell.choice != PLAIN, cell.choice))


def place_of(target: str, setting: Setting) -> Place:
    """A sweep's setting as a place."""
    return Place(target, setting.workload, setting.concurrency, setting.temperature, setting.context_len)


def shares(per_position: Sequence[float]) -> tuple[float, ...]:
    """Shares of rounds that accepted exactly 0, 1, … drafts, of the shares that accepted at least the i-th.

    Published rates are rounded, so a difference below 0 counts as 0.
    """
    reached = [1.0, *per_position, 0.0]
    return tuple(max(0.0, reached[i] - reached[i + 1]) for i in range(len(reached) - 1))


@dataclass(frozen=True)
class _Total:
    tok_s: float
    user_tok_s: float | None


def _plain_runs(results: Results) -> dict[Setting, list[Measured]]:
    found: dict[Setting, list[Measured]] = defaultdict(list)
    for row in whole_rows(results.rows):
        if row.choice == PLAIN:
            found[row.setting].append(row.measured)
    return found


def _total(runs: Sequence[Measured]) -> _Total:
    decoding_s, num_decoded = sum(run.decode_s for run in runs), sum(run.num_decode_tokens for run in runs)
    tok_s = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
    return _Total(tok_s, num_decoded / decoding_s if decoding_s else None)


def _plain_cell(place: Place, runs: Sequence[Measured]) -> Cell:
    total = _total(runs)
    return Cell(
        place=place,
        method=PLAIN.method,
        num_speculative_tokens=0,
        plain_tok_s=total.tok_s,
        tok_s=total.tok_s,
        speedup=Ratio(1.0),
        user_tok_s=total.user_tok_s,
        ttft_p50_s=_ttft(runs),
        mean_acceptance_length=1.0,
        mean_committed_length=1.0,
        acceptance_rate=0.0,
        per_position_acceptance=(),
        acceptance_shares=(),
        time=_time(runs, 1.0),
        num_pairs=len(runs),
    )


def _cell(place: Place, choice: Choice, pairs: Sequence[Pair], plain: _Total, stopped: str | None) -> Cell:
    runs = [pair.chosen for pair in pairs]
    counters = SpeculationCounters()
    for run in runs:
        counters.merge(run.speculation)
    found = speedup(pairs)
    compared = [pair for pair in pairs if pair.chosen.text_sha256]
    return Cell(
        place=place,
        method=choice.method,
        num_speculative_tokens=choice.num_speculative_tokens,
        plain_tok_s=plain.tok_s,
        tok_s=plain.tok_s * found.ratio,
        speedup=found,
        user_tok_s=None if plain.user_tok_s is None else plain.user_tok_s * user_speedup(pairs).ratio,
        ttft_p50_s=_ttft(runs),
        mean_acceptance_length=counters.mean_acceptance_length,
        mean_committed_length=counters.mean_committed_length,
        acceptance_rate=counters.acceptance_rate,
        per_position_acceptance=tuple(counters.per_position_acceptance),
        acceptance_shares=shares(counters.per_position_acceptance),
        by_output_position=_by_position(runs),
        time=_time(runs, _pace(pairs, plain, found)),
        num_pairs=len(pairs),
        num_groups=len({pair.group for pair in pairs}),
        num_same_text=sum(pair.chosen.text_sha256 == pair.plain.text_sha256 for pair in compared),
        num_compared_texts=len(compared),
        stopped=stopped,
    )


def _pace(pairs: Sequence[Pair], plain: _Total, found: Ratio) -> float:
    """How the seconds of these runs are scaled so that they add up to the cell's throughput."""
    runs = [pair.chosen for pair in pairs]
    own_tok_s = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
    return own_tok_s / (plain.tok_s * found.ratio)


def _time(runs: Sequence[Measured], scale: float) -> TimeSplit:
    scale /= sum(run.num_tokens for run in runs)
    draft_s, verify_s = sum(run.draft_s for run in runs), sum(run.verify_s for run in runs)
    other_s = max(0.0, sum(run.seconds for run in runs) - draft_s - verify_s)
    return TimeSplit(draft_s=draft_s * scale, verify_s=verify_s * scale, other_s=other_s * scale)


def _ttft(runs: Sequence[Measured]) -> float:
    return percentile([seconds for run in runs for seconds in run.ttft_s], 0.5)


def _by_position(runs: Sequence[Measured]) -> tuple[tuple[int, int, float], ...]:
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for run in runs:
        for first, num_rounds, num_committed in run.by_output_position:
            sums[first][0] += num_rounds
            sums[first][1] += num_committed
    return tuple((first, rounds, committed / rounds) for first, (rounds, committed) in sorted(sums.items()))
