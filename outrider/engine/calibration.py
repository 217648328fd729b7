"""Measures what steps cost on this machine before the first request, once for each model, drafter and settings.

Runs the engine's own forward and the drafter's own proposals over made-up texts in blocks of an empty cache, and gives
the blocks back. What was measured is kept in the cache folder, so that a second start costs nothing. Bounded in time: a
target that takes long is measured at fewer places. Short texts and quiet moments flatter; real steps correct the tables
from then on (costs.py). Not a benchmark.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from outrider.config import EngineConfig, SpeculativeConfig, cache_folder
from outrider.drafting.base import TargetInfo
from outrider.engine.costs import StepCosts, rising
from outrider.engine.runner import Runner
from outrider.engine.safe_drafter import SafeDrafter
from outrider.engine.sequence import Entry, Sequence
from outrider.models.fingerprint import fingerprint
from outrider.native import library
from outrider.sampling import greedy
from outrider.types import Request, SamplingParams

_log = logging.getLogger(__name__)

_CONTEXT_LEN = 48
_VERIFY_S, _DRAFT_S = 1.1, 0.5  # seconds that measuring may take; what has begun is finished
_ROUNDS = 3
_LEAST_SLOPE = 1 / 64  # of the cost of a step, for a row more, where nothing was measured
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_REQUESTS, _FEW = (1, 8, 32, 4, 16, 2), 8  # the order in which they are measured
Run = Callable[[], None]


@dataclass(frozen=True)
class Setup:
    """All that a step's cost depends on, ready to run: nothing may be in the cache yet."""

    target: TargetInfo
    config: EngineConfig
    speculative: SpeculativeConfig
    safe_drafter: SafeDrafter
    runner: Runner


def step_costs(setup: Setup) -> StepCosts:
    """The costs of this setup on this machine: read from the cache folder, else measured and kept there."""
    path = cache_folder() / "costs" / f"{_key(setup)}.json"
    costs = StepCosts.load(path)
    _warm_up(setup)
    if costs is None or costs.num_tokens != setup.speculative.num_speculative_tokens:
        costs = measure(setup)
        try:
            costs.save(path)
        except OSError as error:
            _log.warning("step costs cannot be kept in %s: %s", path, error)
    return costs


def _warm_up(setup: Setup) -> None:
    """Draft once: the first proposal of a process takes many times as long as all others, and would be a debit."""
    with contextlib.suppress(Exception), _sequences(setup, 1, _CONTEXT_LEN) as sequences:
        _propose(setup, sequences, setup.speculative.num_speculative_tokens)


def measure(setup: Setup) -> StepCosts:
    """The same, measured now; what cannot be is 0 until real steps say more.

    A cache may be too small for it. A drafter that fails here will be heard of when it is used.
    """
    verify = _verify_costs(setup) or {1: 0.0}
    draft, fill_s = {1: [0.0] * setup.speculative.num_speculative_tokens}, 0.0
    try:
        draft, fill_s = _draft_costs(setup) or (draft, fill_s)
    except Exception as error:
        _log.warning("the drafter's cost cannot be measured: %s", error)
    requests = sorted(draft)
    rows, verify_s = _continued(verify, _most_rows(setup))
    return StepCosts(rows, verify_s, requests, [draft[key] for key in requests], fill_s)


def _most_rows(setup: Setup) -> int:
    config = setup.config
    return min(config.max_num_batched_tokens, config.max_num_seqs * (setup.speculative.num_speculative_tokens + 1))


def _places(most: int) -> list[int]:
    """Numbers of rows to measure; the most that a step can have is one of them, unless it is far away."""
    return sorted({row for row in (*_ROWS, most) if row <= min(most, _ROWS[-1])})


def _continued(measured: dict[int, float], most: int) -> tuple[list[int], list[float]]:
    """The table up to `most` rows; what there was no time to measure goes on in proportion to rows beyond the last."""
    rows = sorted(measured)
    further = [row for row in _places(most) if row > rows[-1]]
    smooth = rising([measured[row] for row in rows])
    slope = max((smooth[-1] - smooth[0]) / max(1, rows[-1] - rows[0]), _LEAST_SLOPE * smooth[-1])
    beyond = [smooth[-1] + slope * (row - rows[-1]) for row in further]
    return [*rows, *further], [*smooth, *beyond]


def _verify_costs(setup: Setup) -> dict[int, float]:
    """Seconds of the target's forward and greedy draws, by rows."""
    context_len = _CONTEXT_LEN if setup.target.model.shares_prefixes else 0
    with _sequences(setup, setup.config.max_num_seqs, context_len) as sequences:
        found = _in_rounds(_forwards(setup, sequences), _VERIFY_S, least=4)
    return {rows: costs[0] for rows, costs in found.items()}


def _forwards(setup: Setup, sequences: list[Sequence]) -> Iterator[tuple[int, list[Run]]]:
    """A forward of each number of rows, shared out as evenly as drafts can be."""
    for rows in _places(_most_rows(setup)) if sequences else ():
        count = min(rows, len(sequences))
        drafts = [rows // count - 1 + (index < rows % count) for index in range(count)]
        if max(drafts) > setup.speculative.num_speculative_tokens:
            return
        entries = [Entry(sequence, 1, 0, samples=True) for sequence in sequences[:count]]
        yield rows, [partial(_forward, setup, entries, [(0,) * length for length in drafts])]


def _draft_costs(setup: Setup) -> tuple[dict[int, list[float]], float] | None:
    """Seconds of a proposal by requests and length (from 1), and of a row that the drafter has yet to see."""
    longest = setup.speculative.num_speculative_tokens
    lengths = sorted({1, min(2, longest), longest})
    # Where texts cannot share blocks, each has to be read: that of a few will do.
    most = min(setup.config.max_num_seqs, max(_REQUESTS) if setup.target.model.shares_prefixes else _FEW)
    firsts_s: list[float] = []

    def proposals(sequences: list[Sequence]) -> Iterator[tuple[int, list[Run]]]:
        for count in sorted({min(count, len(sequences)) for count in _REQUESTS}, key=_order):
            chosen = sequences[:count]
            firsts_s.append(_seconds(partial(_propose, setup, chosen, 1)))  # catches up on the texts
            yield count, [partial(_propose, setup, chosen, length) for length in lengths]

    with _sequences(setup, most, _CONTEXT_LEN) as sequences:
        if not sequences:
            return None
        costs = _in_rounds(proposals(sequences), _DRAFT_S)
    first = next(iter(costs.values()))
    return {count: _between(lengths, own) for count, own in costs.items()}, max(
        0.0, firsts_s[0] - first[0]
    ) / _CONTEXT_LEN


def _in_rounds(groups: Iterable[tuple[int, list[Run]]], limit_s: float, least: int = 1) -> dict[int, list[float]]:
    """Seconds of each run of each group: the median over a few rounds through all of them.

    Not each some times in succession: a machine's speed drifts, and what was measured in a slow moment would look
    dearer than its neighbours, where only the differences decide. Short of time there are fewer groups (those after
    `least` may be left out), then fewer rounds.
    """
    began = time.perf_counter()
    taken: dict[int, list[list[float]]] = {}
    kept: list[tuple[int, list[Run]]] = []
    for key, runs in groups:
        kept.append((key, runs))
        taken[key] = [[_seconds(run) for run in runs]]
        if key >= least and time.perf_counter() - began > limit_s / _ROUNDS:
            break
    for done in range(1, _ROUNDS):
        if (time.perf_counter() - began) * (done + 1) / done > 1.5 * limit_s:
            break
        for key, runs in kept:
            taken[key].append([_seconds(run) for run in runs])
    return {key: [statistics.median(values) for values in zip(*rounds, strict=True)] for key, rounds in taken.items()}


def _order(count: int) -> int:
    """Ends first: what lies between them can be guessed."""
    return _REQUESTS.index(count) if count in _REQUESTS else 1


def _between(lengths: list[int], costs: list[float]) -> list[float]:
    """Costs of every length from 1 to the last, on straight lines between those measured."""
    found: list[float] = np.interp(np.arange(1, lengths[-1] + 1), lengths, costs).tolist()
    return found


def _forward(setup: Setup, entries: list[Entry], drafts: list[tuple[int, ...]]) -> None:
    greedy(setup.runner.forward(entries, drafts)).tolist()


def _propose(setup: Setup, sequences: list[Sequence], length: int) -> None:
    entries = [Entry(sequence, 1, length, samples=True) for sequence in sequences]
    setup.safe_drafter.propose(entries, None)
    failed = [sequence.drafting_error for sequence in sequences if sequence.drafting_error]
    if failed:
        raise RuntimeError(failed[0])


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextlib.contextmanager
def _sequences(setup: Setup, most: int, context_len: int) -> Iterator[list[Sequence]]:
    """Up to so many sequences of a text of that length and an anchor, the text computed; as many as blocks allow.

    The text's blocks are everybody's where the target shares prefixes. All blocks and slots are given back.
    """
    pool, model = setup.target.pool, setup.target.model
    longest = setup.speculative.num_speculative_tokens
    room = min(setup.target.max_len, pool.num_free * pool.block_size) - longest - 2
    context_len = min(context_len, max(0, room)) // pool.block_size * pool.block_size
    shared = (pool.allocate(context_len // pool.block_size) or []) if model.shares_prefixes else []
    tail_len = longest + 2 + (0 if shared else context_len)
    ids = tuple(index % 7 % model.config.vocab_size for index in range(context_len + 1))
    params = SamplingParams(temperature=0, max_tokens=None)
    sequences: list[Sequence] = []
    for slot in range(most):
        own = pool.allocate(-(-tail_len // pool.block_size))
        if own is None:
            break
        request = Request(request_id=f"costs-{slot}", prompt_ids=ids, params=params)
        sequence = Sequence(request, setup.target.max_len, model.config.vocab_size)
        sequence.slot, sequence.blocks = slot, [*shared, *own]
        sequences.append(sequence)
        setup.safe_drafter.begin(sequence)
    try:
        reading = sequences[:1] if shared else sequences
        if context_len and reading:
            entries = [Entry(sequence, context_len, 0, samples=False) for sequence in reading]
            setup.runner.forward(entries, [()] * len(reading))
        for sequence in sequences:
            sequence.num_computed = context_len
        yield sequences
    finally:
        for sequence in sequences:
            setup.safe_drafter.end(sequence)
            pool.release(sequence.blocks[len(shared) :])
        pool.release(shared)


def _key(setup: Setup) -> str:
    """A name that two setups share only if their steps cost the same."""
    speculative, config, model = setup.speculative, setup.config, setup.target.model
    threads = config.num_threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    parts = (
        *(fingerprint(model), model.embedding.dtype, model.device, threads, library() is not None),
        *(_machine(), torch.__version__, config.max_num_seqs, config.max_num_batched_tokens, config.block_size),
        *(speculative.method, speculative.model, speculative.num_speculative_tokens, speculative.draft_sample_method),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@cache
def _machine() -> str:
    """Which machine this is, as far as its speed goes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        name = platform.processor()
    return f"{platform.node()} {platform.machine()} {name} {os.cpu_count()}"
