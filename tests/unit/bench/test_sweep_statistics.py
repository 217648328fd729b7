"""Speedups, intervals and rankings on results whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.cells import cells_of
from outrider.bench.grid import PLAIN, Block, Choice
from outrider.bench.pairs import in_pairs, rank, speedup, user_speedup
from outrider.bench.recommend import fixed_choices, of_place, pareto
from outrider.bench.results import Results
from tests.kit import sweeps

TRUE = {("ngram", 2): 120.0, ("ngram", 4): 90.0, ("draft_model", 2): 150.0, ("draft_model", 4): 152.0}


def pairs_of(results: Results) -> dict[Choice, list]:
    return {choice: pairs for (_, choice), pairs in in_pairs(results.rows).items()}


def test_without_noise_the_speedup_is_exact() -> None:
    results = sweeps.results(sweeps.grid(), sweeps.speeds(TRUE))
    for (method, length), speed in TRUE.items():
        found = speedup(pairs_of(results)[Choice(method, length)])
        assert (found.ratio, found.low, found.high) == pytest.approx((speed / 100,) * 3)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    grid = sweeps.grid(num_prompts=10, repeats=2, methods={"ngram": {"method": "ngram"}}, lengths={"ngram": [2]})
    hits = 0
    for seed in range(60):
        results = sweeps.results(grid, sweeps.speeds(TRUE), noise=0.1, seed=seed)
        found = speedup(pairs_of(results)[Choice("ngram", 2)])
        assert found.low is not None and found.high is not None and found.low <= found.ratio <= found.high
        hits += found.low <= 1.2 <= found.high
    assert 49 <= hits <= 60, "nominally 57 of 60; ten groups make it somewhat fewer"


def test_one_measurement_has_no_interval_and_one_group_has_that_of_its_repeats() -> None:
    alone = sweeps.results(sweeps.grid(num_prompts=1, repeats=1), sweeps.speeds(TRUE), noise=0.1)
    found = speedup(pairs_of(alone)[Choice("ngram", 2)])
    assert found.low is None and found.high is None
    repeated = sweeps.results(sweeps.grid(num_prompts=1, repeats=5), sweeps.speeds(TRUE), noise=0.1)
    found = speedup(pairs_of(repeated)[Choice("ngram", 2)])
    assert found.low is not None and found.high is not None and found.low < found.ratio < found.high


def test_sittings_of_different_speed_do_not_mix() -> None:
    """The second sitting is five times slower and measured only one choice, plain decoding beside it."""
    grid = sweeps.grid()
    late = Choice("draft_model", 4)
    first = [row for row in sweeps.rows_of(grid, sweeps.speeds(TRUE)) if row.choice != late]
    second = sweeps.rows_of(grid, sweeps.speeds(TRUE), sitting=2, slow=5.0)
    header = sweeps.header(grid)
    rows = first + [row for row in second if row.choice in (late, PLAIN)]
    results = Results(header=header, sittings=[header.conditions] * 2, rows=rows)
    assert speedup(pairs_of(results)[late]).ratio == pytest.approx(1.52)
    assert speedup(pairs_of(results)[Choice("draft_model", 2)]).ratio == pytest.approx(1.5)
    cells = {cell.choice: cell for cell in cells_of(results)}
    assert cells[late].tok_s / cells[PLAIN].tok_s == pytest.approx(1.52)
    assert cells[late].tok_s > cells[Choice("draft_model", 2)].tok_s, "though measured on a slow day"


def test_a_row_without_its_plain_partner_counts_nowhere() -> None:
    grid = sweeps.grid(repeats=1)
    rows = [row for row in sweeps.rows_of(grid, sweeps.speeds(TRUE)) if (row.group, row.choice) != (0, PLAIN)]
    found = {choice: {pair.group for pair in pairs} for (_, choice), pairs in in_pairs(rows).items()}
    assert all(groups == {1, 2, 3} for groups in found.values()) and len(found) == 4


def test_anchors_count_nowhere() -> None:
    grid = sweeps.grid(repeats=1)
    block = Block(grid.settings[0], 0, 0)
    odd = [sweeps.row(block, choice, sweeps.measured(50, 9.0, choice), is_anchor=True) for choice in [PLAIN]]
    rows = sweeps.rows_of(grid, sweeps.speeds(TRUE))
    assert in_pairs(odd + rows) == in_pairs(rows)


def test_the_ranking_is_sure_of_what_is_far_apart_and_not_of_what_is_near() -> None:
    grid = sweeps.grid(num_prompts=12)
    found = rank(pairs_of(sweeps.results(grid, sweeps.speeds(TRUE), noise=0.04)))
    assert found is not None and found.best.method == "draft_model"
    assert sum(found.probability.values()) == pytest.approx(1)
    assert found.probability[Choice("ngram", 2)] == 0
    assert {found.best, *found.as_good} == {Choice("draft_model", 2), Choice("draft_model", 4)}
    assert rank(pairs_of(sweeps.results(sweeps.grid(num_prompts=1), sweeps.speeds(TRUE)))) is None


def test_intervals_of_ranking_and_speedup_are_of_one_kind() -> None:
    """An independent bootstrap over groups, written out, gives about the same interval."""
    results = sweeps.results(sweeps.grid(num_prompts=9), sweeps.speeds(TRUE), noise=0.1)
    pairs = pairs_of(results)[Choice("ngram", 2)]
    found, random = speedup(pairs), np.random.default_rng(7)
    groups = sorted({pair.group for pair in pairs})
    ratios = []
    for _ in range(1500):
        own = [pair for group in random.choice(groups, len(groups)) for pair in pairs if pair.group == group]
        plain = sum(pair.plain.num_tokens for pair in own) / sum(pair.plain.seconds for pair in own)
        ratios.append(sum(p.chosen.num_tokens for p in own) / sum(p.chosen.seconds for p in own) / plain)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), abs=0.015)


def test_plain_decoding_is_recommended_unless_something_is_surely_faster() -> None:
    grid = sweeps.grid(num_prompts=12)

    def recommended(speeds: dict[tuple[str, int], float], noise: float) -> str:
        results = sweeps.results(grid, sweeps.speeds(speeds), noise=noise)
        cells = cells_of(results)
        found = of_place(cells, rank(pairs_of(results)))
        return f"{found.method} {found.num_speculative_tokens}: {' '.join(found.reasons)}"

    assert recommended(TRUE, 0.01).startswith("draft_model 4: ")
    assert "nothing is faster" in recommended(dict.fromkeys(TRUE, 80.0), 0.01)
    assert "not surely faster" in recommended(dict.fromkeys(TRUE, 100.5), 0.2)


def test_the_one_choice_for_all_places_is_the_best_by_geometric_mean() -> None:
    grid = sweeps.grid(workloads=["math", "code"])
    by_workload = {"math": {("ngram", 2): 200.0, ("draft_model", 2): 150.0}, "code": {("ngram", 2): 60.0}}
    results = sweeps.results(
        grid, lambda setting, choice: sweeps.speeds(by_workload[setting.workload])(setting, choice)
    )
    [found] = fixed_choices(cells_of(results))
    assert (found.method, found.num_speculative_tokens) == ("draft_model", 2)
    assert found.mean_speedup == pytest.approx(1.5**0.5)
    assert found.mean_loss == pytest.approx((1 - 1.5 / 2 + 0) / 2)


def test_time_adds_up_to_the_throughput_and_the_front_has_no_dominated_cell() -> None:
    grid = sweeps.grid(concurrency=[1, 4])
    cells = cells_of(sweeps.results(grid, sweeps.speeds(TRUE), noise=0.05))
    for cell in cells:
        assert cell.time is not None
        assert cell.time.draft_s + cell.time.verify_s + cell.time.other_s == pytest.approx(1 / cell.tok_s)
        if cell.choice != PLAIN:
            assert cell.mean_acceptance_length == pytest.approx(1 + sum(cell.per_position_acceptance))
            assert sum(cell.acceptance_shares) == pytest.approx(1)
    front = pareto(cells)
    for cell in cells:
        beaten = any(other.tok_s >= cell.tok_s and other.user_tok_s > cell.user_tok_s for other in cells)  # type: ignore[operator]
        assert (cell in front) == (not beaten)


def test_a_readers_speed_is_compared_apart() -> None:
    results = sweeps.results(sweeps.grid(), sweeps.speeds(TRUE))
    pairs = pairs_of(results)[Choice("ngram", 2)]
    assert user_speedup(pairs).ratio == pytest.approx(1.2)
