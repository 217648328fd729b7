"""The sweep's loop over a backend that makes numbers up: nothing twice, nothing lost, hopeless choices given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.grid import PLAIN, Choice, Grid
from outrider.bench.pairs import in_pairs, whole_rows
from outrider.bench.results import ResultsFile, read
from outrider.bench.sweep import Sweep, missing
from tests.kit import sweeps

SPEED = sweeps.speeds({("ngram", 2): 130.0, ("ngram", 4): 50.0})
QUICK = sweeps.grid(repeats=1, num_prompts=2, lengths={"ngram": [2], "draft_model": [2]})


def sitting(path: Path, grid: Grid, backend: sweeps.FakeBackend) -> list[tuple[str, int, int]]:
    """One run; what was reported of its progress."""
    told: list[tuple[str, int, int]] = []
    file = ResultsFile.open(path, sweeps.header(grid))
    sweep = Sweep(backend, grid, sweeps.prompts_for(grid), sweeps.configs_for(grid), file)
    sweep.run(lambda what, done, total: told.append((what, done, total)))
    return told


def test_a_sweep_measures_all_of_its_grid_once(tmp_path: Path) -> None:
    grid = sweeps.grid(workloads=["math", "code"], concurrency=[1, 2], temperatures=[0.0, 0.8])
    told = sitting(tmp_path / "r.jsonl", grid, sweeps.FakeBackend(SPEED))
    results = read(tmp_path / "r.jsonl")
    num_blocks = len(list(grid.blocks()))
    assert len(whole_rows(results.rows)) == num_blocks * 5 == told[-1][1] == told[-1][2]
    assert len(in_pairs(results.rows)) == 8 * 4 and missing(grid, results) == []
    assert [row.choice for row in results.rows if row.is_anchor] == [PLAIN, grid.choices[0]]


def test_jobs_say_what_is_asked(tmp_path: Path) -> None:
    grid = sweeps.grid(concurrency=[2], temperatures=[0.8], seed=5, num_prompts=4)
    backend = sweeps.FakeBackend(SPEED)
    sitting(tmp_path / "r.jsonl", grid, backend)
    by_prompt = {prompt: params for job in backend.jobs for prompt, params in zip(job.prompts, job.params, strict=True)}
    assert {prompt[0]: params.seed for prompt, params in by_prompt.items()} == {1: 5, 2: 6, 3: 7, 4: 8}
    assert {params.temperature for params in by_prompt.values()} == {0.8}
    assert {job.concurrency for job in backend.jobs} == {2}
    assert {params.max_tokens for job in backend.jobs[3:] for params in job.params} == {100}


@pytest.mark.parametrize("kill_at", range(11))  # warm-up 3, anchor 2, two blocks of 3
def test_a_sweep_that_is_killed_anywhere_goes_on_to_the_same_end(tmp_path: Path, kill_at: int) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sitting(path, QUICK, sweeps.FakeBackend(SPEED, kill_at))
    before = read(path).rows
    path.write_bytes(path.read_bytes() + b'{"kind":"row","sit')  # a record that was being written
    backend = sweeps.FakeBackend(SPEED)
    sitting(path, QUICK, backend)
    results = read(path)
    assert results.rows[: len(before)] == before and len(results.sittings) == 2
    assert {row.sitting for row in results.rows if row.is_anchor} >= {2}, "every sitting has its anchor"
    assert missing(QUICK, results) == []
    for pairs in in_pairs(results.rows).values():
        assert sorted(pair.group for pair in pairs) == [0, 1], "each pair once, within one sitting"
    sitting(path, QUICK, backend := sweeps.FakeBackend(SPEED))
    assert backend.jobs == [], "nothing is left"


def test_a_hopeless_choice_is_given_up_and_the_file_says_why(tmp_path: Path) -> None:
    grid = sweeps.grid(stop_below=0.8, num_prompts=8)
    backend = sweeps.FakeBackend(SPEED)
    sitting(tmp_path / "r.jsonl", grid, backend)
    results = read(tmp_path / "r.jsonl")
    [stopped] = results.stopped
    assert stopped.choice == Choice("ngram", 4) and "0.50x" in stopped.reason and "after 3 pairs" in stopped.reason
    counts = {choice: len(pairs) for (_, choice), pairs in in_pairs(results.rows).items()}
    assert counts.pop(Choice("ngram", 4)) == 3 and set(counts.values()) == {8 * 3}
    assert missing(grid, results) == []


def test_a_drafter_that_fails_is_given_up(tmp_path: Path) -> None:
    class Failing(sweeps.FakeBackend):
        def run(self, job):  # type: ignore[no-untyped-def]
            from dataclasses import replace

            found = super().run(job)
            fails = job.config is not None and job.config.method == "ngram"
            return replace(found, drafting_errors=("it broke",)) if fails else found

    grid = sweeps.grid()
    sitting(tmp_path / "r.jsonl", grid, Failing(SPEED))
    results = read(tmp_path / "r.jsonl")
    assert {stopped.choice.method for stopped in results.stopped} == {"ngram"}
    assert all("it broke" in stopped.reason for stopped in results.stopped) and len(results.stopped) == 2


def test_no_block_begins_after_the_time_is_up(tmp_path: Path) -> None:
    path, backend = tmp_path / "r.jsonl", sweeps.FakeBackend(SPEED)
    file = ResultsFile.open(path, sweeps.header(QUICK))
    sweep = Sweep(backend, QUICK, sweeps.prompts_for(QUICK), sweeps.configs_for(QUICK), file)
    sweep.run(lambda what, done, total: None, until=0.0)
    assert all(row.is_anchor for row in read(path).rows)
    sitting(path, QUICK, backend)
    assert missing(QUICK, read(path)) == [], "the same goes on"
