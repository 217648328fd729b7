"""Who runs, with how many rows and drafts: the scheduler alone, with committed tokens written in by hand."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.budget import draft_budget
from outrider.engine.lengths import FixedLengths
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Entry, Sequence
from outrider.models.cache import BlockPool
from tests.kit import tiny

MAX_LEN = 200


class Bench:
    """A scheduler with a pool, and hands that do what the engine does after a step."""

    def __init__(self, num_blocks: int = 64, speculative: dict[str, Any] | int | None = None, **settings: Any) -> None:
        config = EngineConfig(**({"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings))
        if isinstance(speculative, int):
            speculative = {"num_speculative_tokens": speculative}
        parsed = None if speculative is None else SpeculativeConfig(method="scripted", **speculative)
        self.pool = BlockPool(num_blocks, 16)
        self.preempted: list[Sequence] = []
        self.scheduler = Scheduler(config, FixedLengths(parsed), self.pool, self.preempted.append)

    def add(self, length: int, seed: int = 0, **params: Any) -> Sequence:
        prompt = tiny.random_prompt(seed, length)
        params = {"max_tokens": 100} | params
        sequence = Sequence(tiny.make_request(f"{seed}-{length}", prompt, **params), MAX_LEN, tiny.VOCAB)
        self.scheduler.add(sequence)
        return sequence

    def step(self, num_accepted: int = 0) -> list[Entry]:
        """Plan, compute and commit: every sampling entry gets its accepted drafts and one token more."""
        entries = self.scheduler.plan()
        for entry in entries:
            sequence = entry.sequence
            assert len(sequence.blocks) * 16 >= sequence.num_computed + entry.num_rows + entry.budget
            sequence.num_computed += entry.num_rows
            if entry.samples:
                accepted = min(num_accepted, entry.budget)
                for _ in range(accepted + 1):
                    sequence.commit(1)
                sequence.num_computed += accepted
            sequence.publish_blocks(self.pool)
        return entries


def parts(entries: list[Entry]) -> list[tuple[int, int, bool]]:
    return [(entry.num_rows, entry.budget, entry.samples) for entry in entries]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert Bench().step() == []


def test_a_prompt_is_read_in_one_step_and_then_decoded_row_by_row() -> None:
    bench = Bench()
    bench.add(20)
    assert parts(bench.step()) == [(20, 0, True)]
    assert parts(bench.step()) == [(1, 0, True)]


def test_a_long_prompt_is_cut_and_only_its_end_samples() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(40)
    assert [parts(bench.step()) for _ in range(4)] == [
        [(16, 0, False)],
        [(16, 0, False)],
        [(8, 0, True)],
        [(1, 0, True)],
    ]


def test_decoding_requests_come_before_prompts_and_prompts_take_what_is_left() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(5)
    bench.step()
    bench.add(30, seed=1)
    bench.add(30, seed=2)
    assert parts(bench.step()) == [(1, 0, True), (15, 0, False)]
    assert parts(bench.step()) == [(1, 0, True), (15, 0, True)]
    assert parts(bench.step()) == [(1, 0, True), (1, 0, True), (14, 0, False)]


def test_no_more_requests_run_than_allowed_and_the_line_is_kept() -> None:
    bench = Bench(max_num_seqs=2)
    sequences = [bench.add(3, seed=i) for i in range(4)]
    assert [entry.sequence for entry in bench.step()] == sequences[:2]
    bench.scheduler.remove(sequences[0])
    assert [entry.sequence for entry in bench.step()] == [sequences[1], sequences[2]]


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_only_a_decoding_request_drafts(num_tokens: int) -> None:
    bench = Bench(speculative=num_tokens)
    bench.add(20)
    assert parts(bench.step()) == [(20, 0, True)]
    assert parts(bench.step()) == [(1, num_tokens, True)]


def test_rows_of_a_step_are_never_exceeded_and_prompts_keep_a_quarter() -> None:
    bench = Bench(speculative=20, max_num_batched_tokens=32)
    for seed in range(2):
        bench.add(4, seed=seed)
    bench.step()
    # Nobody waits: drafts may fill the step. 32 rows are 2 anchors and 30 drafts.
    assert parts(bench.step()) == [(1, 20, True), (1, 10, True)]
    bench.add(50, seed=9)
    assert parts(bench.step()) == [(1, 20, True), (1, 2, True), (8, 0, False)]


def test_a_failed_drafter_is_not_asked_again() -> None:
    bench = Bench(speculative=4)
    sequence = bench.add(4)
    bench.step()
    sequence.drafting_error = "it failed"
    assert parts(bench.step()) == [(1, 0, True)]


def test_drafts_go_before_blocks_are_taken_from_others() -> None:
    """One block each and none free: a draft that would need another is not made, and nobody is put back."""
    bench = Bench(num_blocks=2, speculative=4)
    bench.add(13)
    bench.add(13, seed=1)
    bench.step()
    assert parts(bench.step()) == [(1, 0, True), (1, 0, True)]
    assert bench.preempted == []


def test_the_youngest_is_put_back_when_blocks_run_out() -> None:
    bench = Bench(num_blocks=2)
    old, young = bench.add(15), bench.add(15, seed=1)
    bench.step()
    bench.step()
    assert [entry.sequence for entry in bench.step()] == [old]
    assert bench.preempted == [young]
    assert (young.blocks, young.num_computed) == ([], 0)
    assert list(bench.scheduler.waiting) == [young]
    assert bench.scheduler.num_preemptions == 1


def test_a_preempted_request_goes_first_and_continues_where_it_was() -> None:
    bench = Bench(num_blocks=2)
    old, young = bench.add(15), bench.add(15, seed=1)
    third = bench.add(3, seed=2)
    for _ in range(3):
        bench.step()
    written = young.tokens.tolist()
    bench.scheduler.remove(old)
    entries = bench.step()
    assert [entry.sequence for entry in entries] == [young]
    assert parts(entries) == [(17, 0, True)] or parts(entries) == [(1, 0, True)]
    assert young.tokens.tolist()[: len(written)] == written
    assert third in bench.scheduler.waiting


def test_a_step_that_puts_somebody_back_starts_nobody() -> None:
    """The younger one owns a block for drafts only, so it would fit again at once, and be put back again soon."""
    bench = Bench(num_blocks=3, speculative=4)
    old, young = bench.add(15), bench.add(12, seed=1)
    old.drafting_error = "so it takes no blocks for drafts"
    bench.step()
    bench.step()
    assert [len(sequence.blocks) for sequence in (old, young)] == [1, 2]
    assert [entry.sequence for entry in bench.step()] == [old]
    assert bench.pool.num_free == 1
    assert [entry.sequence for entry in bench.step()] == [old, young]


def test_one_request_alone_is_never_put_back_while_it_fits() -> None:
    bench = Bench(num_blocks=4)
    bench.add(10, max_tokens=54)
    for _ in range(54):
        assert len(bench.step()) == 1
    assert bench.preempted == []


def test_a_request_beyond_the_pool_plans_nothing() -> None:
    bench = Bench(num_blocks=2)
    bench.add(33)
    assert bench.step() == []
    assert bench.pool.num_free == 2


def test_a_shared_prefix_is_not_computed_again() -> None:
    bench = Bench()
    first = bench.add(40)
    bench.step()
    second = Sequence(tiny.make_request("twin", first.request.prompt_ids), MAX_LEN, tiny.VOCAB)
    bench.scheduler.add(second)
    assert parts(bench.step())[1] == (8, 0, True)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.num_cached == 32


def test_a_prompt_that_is_known_whole_is_left_one_row_to_compute() -> None:
    bench = Bench()
    first = bench.add(33)
    bench.step()
    second = Sequence(tiny.make_request("twin", first.request.prompt_ids[:32]), MAX_LEN, tiny.VOCAB)
    bench.scheduler.add(second)
    assert parts(bench.step())[1] == (16, 0, True)
    third = Sequence(tiny.make_request("third", first.request.prompt_ids[:33]), MAX_LEN, tiny.VOCAB)
    bench.scheduler.add(third)
    assert parts(bench.step())[2] == (1, 0, True)


def test_removal_frees_blocks_wherever_the_request_stands() -> None:
    bench = Bench(num_blocks=2, max_num_batched_tokens=16)
    running, waiting = bench.add(20), bench.add(20, seed=1)
    bench.step()
    bench.scheduler.remove(waiting)
    bench.scheduler.remove(running)
    assert bench.pool.num_free == 2
    assert bench.step() == []


# ---- budgets ----


def budget_of(num_output: int, num_requests: int = 1, max_tokens: int = 100, **speculative: Any) -> int:
    sequence = Sequence(tiny.make_request("a", (1, 2, 3), max_tokens=max_tokens), MAX_LEN, tiny.VOCAB)
    for _ in range(num_output):
        sequence.commit(5)
    config = SpeculativeConfig(method="scripted", **({"num_speculative_tokens": 8} | speculative))
    return draft_budget(sequence, config, num_requests)


def test_a_budget_is_what_is_configured() -> None:
    assert budget_of(1) == 8


@pytest.mark.parametrize("left", range(1, 12))
def test_a_budget_leaves_room_for_the_token_after_the_drafts(left: int) -> None:
    assert budget_of(10, max_tokens=10 + left) == min(8, left - 1)


def test_a_budget_ends_at_the_context() -> None:
    assert [budget_of(n, max_tokens=500) for n in (187, 190, 195, 196)] == [8, 6, 1, 0]


def test_a_budget_ends_at_the_drafters_limit() -> None:
    assert [budget_of(n, max_model_len=20) for n in (0, 9, 12, 16, 17, 40)] == [8, 8, 5, 1, 0, 0]


def test_a_budget_follows_the_schedule() -> None:
    schedule = ((1, 2, 6), (3, 4, 2), (5, 9, 0))
    found = [
        budget_of(1, num_requests=n, num_speculative_tokens_per_batch_size=schedule) for n in (1, 2, 3, 4, 5, 9, 50)
    ]
    assert found == [6, 6, 2, 2, 0, 0, 0]
