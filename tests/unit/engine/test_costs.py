"""Cost tables: straight lines between places, never falling, moved by what real steps take, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.costs import StepCosts, rising

ROWS, VERIFY_S = [1, 2, 4, 8, 16], [1.0, 1.0, 1.2, 1.2, 2.0]
REQUESTS, DRAFT_S = [1, 4], [[0.1, 0.2, 0.3], [0.2, 0.4, 0.6]]


def make(**changes: Any) -> StepCosts:
    tables: dict[str, Any] = {
        "verify_rows": ROWS,
        "verify_s": VERIFY_S,
        "draft_requests": REQUESTS,
        "draft_s": DRAFT_S,
        "fill_s": 0.01,
    }
    return StepCosts(**(tables | changes))


def curve(costs: StepCosts, rows: Iterable[int]) -> list[float]:
    return [costs.verify(row) for row in rows]


def nearest_rising(values: list[float], weights: list[float]) -> list[float]:
    """The plain definition: at each place the largest, over starts, of the smallest, over ends, mean of a stretch."""
    count = len(values)

    def mean(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    return [max(min(mean(a, b) for b in range(i, count)) for a in range(i + 1)) for i in range(count)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 9), st.floats(0.1, 5)), min_size=1, max_size=9))
def test_rising_is_isotonic_regression(pairs: list[tuple[float, float]]) -> None:
    values, weights = map(list, zip(*pairs, strict=True))
    found = rising(values, weights)
    assert np.allclose(found, nearest_rising(values, weights))
    assert (np.diff(found) >= 0).all()
    assert np.allclose(rising(values), nearest_rising(values, [1.0] * len(values)))


def test_places_are_joined_by_straight_lines() -> None:
    assert np.allclose(curve(make(), [1, 3, 6, 12, 16]), [1.0, 1.1, 1.2, 1.6, 2.0])
    assert np.allclose(make().draft(1), [0, 0.1, 0.2, 0.3])
    assert np.allclose(make().draft(2), [0, 0.1 + 0.1 / 3, 0.2 + 0.2 / 3, 0.4])


def test_the_last_line_goes_on_beyond_the_tables() -> None:
    assert np.allclose(curve(make(), [24, 116]), [2.8, 12.0])
    assert np.allclose(make().draft(7), [0, 0.3, 0.6, 0.9])
    assert make(verify_rows=[2], verify_s=[3.0]).verify(6) == pytest.approx(9.0)
    assert np.allclose(make(draft_requests=[2], draft_s=[[0.1, 0.2]]).draft(9), [0, 0.1, 0.2])


@pytest.mark.parametrize("rows", [[1], [3], ROWS, [2, 5, 11]])
def test_many_costs_at_once_are_the_same(rows: list[int]) -> None:
    costs = make(verify_rows=rows, verify_s=VERIFY_S[: len(rows)])
    for first in range(25):
        assert costs.verify_from(first, 30) == curve(costs, range(first, first + 31))


def test_one_odd_measurement_does_not_hide_those_after_it() -> None:
    assert np.allclose(curve(make(verify_s=[1.0, 2.0, 1.2, 1.3, 2.0]), ROWS), [1.0, 1.5, 1.5, 1.5, 2.0])


def test_a_table_that_is_wrong_is_believed_no_longer_than_a_few_steps() -> None:
    """Measured while something else ran, all of it: the first steps put it right, places that nobody saw included."""
    costs = make(verify_s=[4 * value for value in VERIFY_S])
    assert not costs.knows_plain(1)
    for _ in range(3):
        costs.observe_verify(1, 1.0)
    assert costs.knows_plain(1)
    assert costs.verify(1) == pytest.approx(1.0, rel=0.1)
    assert costs.verify(16) < 0.6 * 8.0
    for _ in range(3):
        costs.observe_verify(16, 2.0)
    assert curve(costs, [1, 16]) == pytest.approx([1.0, 2.0], rel=0.25)


def test_a_machine_that_gets_slower_moves_everything_and_one_place_a_little_more() -> None:
    costs = make()
    for _ in range(60):
        costs.observe_verify(4, 1.2)
    before, drafting = curve(costs, ROWS), costs.draft(1)[1]
    for _ in range(12):
        costs.observe_verify(4, 1.2 * 1.3)
    after = curve(costs, ROWS)
    assert after[2] / before[2] == pytest.approx(1.25, abs=0.04)
    assert 1.12 < after[4] / before[4] < after[2] / before[2]
    assert costs.draft(1)[1] / drafting == pytest.approx(after[4] / before[4])


def test_differences_between_places_stand_still_while_the_machine_does_not() -> None:
    """Its speed wanders, and for long only plain steps are seen; what a row more takes is known."""
    costs, random, speed = make(), np.random.default_rng(0), 1.0
    for index in range(3000):
        speed = min(max(speed * float(np.exp(0.01 * random.standard_normal())), 0.8), 1.25)
        rows = 1 if index % 300 < 250 else 4
        costs.observe_verify(rows, VERIFY_S[ROWS.index(rows)] * speed * float(np.exp(0.05 * random.standard_normal())))
        if index > 600:
            assert costs.verify(4) / costs.verify(1) == pytest.approx(1.2, rel=0.05)


def test_an_interrupted_step_says_little() -> None:
    costs = make()
    for _ in range(20):
        costs.observe_verify(1, 1.0)
    costs.observe_verify(1, 100.0)
    assert costs.verify(1) < 1.1


def test_places_that_contradict_each_other_do_not_run_away() -> None:
    """More rows really take less here; the table settles on a value between, and follows when the world changes."""
    costs = make()
    for _ in range(2000):
        costs.observe_verify(4, 2.0)
        costs.observe_verify(8, 1.0)
    assert 1.0 <= costs.verify(4) <= costs.verify(8) <= 2.0
    for _ in range(400):
        costs.observe_verify(4, 1.0)
        costs.observe_verify(8, 3.0)
    assert curve(costs, [4, 8]) == pytest.approx([1.0, 3.0], rel=0.15)


def test_drafting_and_catching_up_are_learned() -> None:
    costs = make()
    for _ in range(40):
        costs.observe_draft(4, 2, 0.8)
        costs.observe_fill(10, 0.5)
    assert np.allclose(costs.draft(4), [0, 0.4, 0.8, 1.2], rtol=0.05)
    assert costs.fill_s == pytest.approx(0.05, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-9, 1e3)), max_size=60))
def test_whatever_is_observed_costs_stay_positive_and_never_fall(steps: list[tuple[int, float]]) -> None:
    costs = make()
    for num_rows, seconds in steps:
        costs.observe_verify(num_rows, seconds)
        costs.observe_draft(1 + num_rows % 5, 1 + num_rows % 3, seconds)
    found = curve(costs, range(1, 50))
    assert np.isfinite(found).all()
    assert found[0] > 0
    assert (np.diff(found) >= -1e-12 * found[-1]).all()
    drafted = costs.draft(3)
    assert (np.diff(drafted) >= 0).all()
    assert drafted[0] == 0


def test_a_file_gives_the_same_costs_again(tmp_path: Path) -> None:
    costs, path = make(), tmp_path / "new" / "folder" / "costs.json"
    costs.save(path)
    again = StepCosts.load(path)
    assert again is not None
    assert np.array_equal(curve(again, range(1, 30)), curve(costs, range(1, 30)))
    assert np.array_equal(again.draft(3), costs.draft(3))
    assert (again.fill_s, again.num_tokens) == (costs.fill_s, 3)
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"], "nothing temporary stays"


@pytest.mark.parametrize(
    "damage",
    [
        {"verify_rows": [1, 2]},
        {"verify_rows": [1, 2, 4, 16, 8]},
        {"verify_rows": [], "verify_s": []},
        {"verify_s": [1.0, 1.0, float("nan"), 1.2, 2.0]},
        {"verify_s": "fast"},
        {"draft_s": [[0.1, 0.2], [0.1]]},
        {"draft_s": [[], []]},
        {"draft_requests": [4]},
        {"fill_s": None},
        {"another": 1},
    ],
)
def test_a_damaged_file_counts_as_none(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    make().save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | damage), encoding="utf-8")
    assert StepCosts.load(path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"verify_rows": '])
def test_a_file_that_is_cut_or_something_else_counts_as_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert StepCosts.load(path) is None
    path.write_text(text, encoding="utf-8")
    assert StepCosts.load(path) is None
