"""Nothing leaks: whatever is aborted, preempted, abandoned or shared, all blocks, slots and mail come back.

The block pool itself is held against a naive model of it by drawn sequences of calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.llm import CompletionOutput, Generation, RequestOutput, _Choice
from outrider.models.cache import BlockPool
from outrider.models.llama import LlamaModel
from outrider.types import StepOutput
from tests.kit import books, scripted, tiny

REQUESTS = [
    tiny.make_request(
        f"{i}",
        [*(tiny.random_prompt(9, 32) if i % 2 else ()), *tiny.random_prompt(i, 1 + 3 * i)],
        seed=i,
        temperature=0.8 * (i % 3 == 0),
        max_tokens=8 + 3 * i,
    )
    for i in range(10)
]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(7)


@pytest.fixture(scope="module")
def truth(model: LlamaModel) -> scripted.Truth:
    return scripted.Truth(model, REQUESTS)


@pytest.fixture(scope="module")
def alone(model: LlamaModel) -> dict[str, list[int]]:
    return tiny.tokens_of(tiny.make_engine(model), REQUESTS)


@pytest.mark.parametrize("caching", [True, False])
def test_two_hundred_aborts_and_preemptions_leave_nothing(
    caching: bool, model: LlamaModel, truth: scripted.Truth, alone: dict[str, list[int]]
) -> None:
    """Requests come and go at random steps over a cache that is too small; the survivors' texts are right."""
    random = np.random.default_rng(11)
    drafter = scripted.Mixed(truth, 0.7)
    engine = tiny.make_engine(
        model, drafter, 4, kv_cache_tokens=128, max_num_seqs=5, max_num_batched_tokens=24, enable_prefix_caching=caching
    )
    texts: dict[str, list[int]] = {}
    num_aborts = num_added = 0
    while num_aborts < 100 or engine.scheduler.num_preemptions < 100 or engine.has_work:
        if num_aborts < 100 or engine.scheduler.num_preemptions < 100:
            while len(engine._sequences) < 7:
                request = REQUESTS[random.integers(len(REQUESTS))]
                name = f"{request.request_id}/{num_added}"
                engine.add(replace(request, request_id=name))
                texts[name] = []
                num_added += 1
            if random.random() < 0.25:
                name = list(engine._sequences)[random.integers(len(engine._sequences))]
                assert engine.abort(name) == StepOutput(name, (), "abort")
                assert engine.abort(name) is None
                text = texts.pop(name)
                assert text == alone[name.partition("/")[0]][: len(text)]
                num_aborts += 1
        for output in engine.step():
            texts[output.request_id] += output.token_ids
        books.check_between_steps(engine)
    books.check_at_rest(engine)
    assert drafter.live == set()
    assert {name: text for name, text in texts.items() if text != alone[name.partition("/")[0]]} == {}
    assert len(texts) > 20


def test_every_step_of_a_request_can_be_its_last(model: LlamaModel, truth: scripted.Truth) -> None:
    """Waiting, half read, decoding, preempted: an abort gives everything back, again and again on one engine."""
    engine = tiny.make_engine(model, scripted.Mixed(truth, 0.7), 4, max_num_batched_tokens=8, max_num_seqs=2)
    for request in REQUESTS:
        for num_steps in range(8):
            engine.add(request)
            for _ in range(num_steps):
                if engine.has_work:
                    engine.step()
            if engine.has_work:
                engine.abort(request.request_id)
            books.check_at_rest(engine)


class Blank:
    """A text sink of no text."""

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        return None

    def take(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


def generation(engine: Any, mail: dict[str, deque[StepOutput]], names: list[str]) -> Generation:
    parts = []
    for name in names:
        request = REQUESTS[int(name.partition("/")[0])]
        sink: Any = Blank()
        output = CompletionOutput(0, "", [])
        choice = _Choice(replace(request, request_id=name, sink=sink), output, sink)
        parts.append((RequestOutput(name, None, list(request.prompt_ids), [output]), [choice]))
    return Generation(engine, mail, parts)


def test_abandoned_streams_leave_no_request_and_no_mail(model: LlamaModel, alone: dict[str, list[int]]) -> None:
    """Several streams over one engine are read in turns and left after a random number of deltas."""
    random = np.random.default_rng(2)
    engine, mail = tiny.make_engine(model, kv_cache_tokens=256), {}
    for number in range(60):
        streams = [
            generation(engine, mail, [f"{i}/{number}{reader}" for i in random.permutation(10)[:3]]) for reader in "ab"
        ]
        other = iter(streams[1])
        iterator = iter(streams[0])
        for _ in range(int(random.integers(1, 40))):
            next(iterator, None)
            if random.random() < 0.3:
                next(other, None)
        iterator.close()
        for part in streams[0].outputs:
            text = alone[part.request_id.partition("/")[0]]
            assert part.outputs[0].token_ids == text[: len(part.outputs[0].token_ids)]
        assert all(part.outputs[0].token_ids == alone[part.request_id[0]] for part in streams[1].wait())
        books.check_at_rest(engine)
        assert mail == {}


# ---- the pool against a naive model of it ----

NUM_BLOCKS = 7
KEYS = [bytes([number]) for number in range(5)]


class PoolMachine(RuleBasedStateMachine):
    """Sequences of pool calls, beside a dictionary of users and a dictionary of what each block is known to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.users = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.known: dict[bytes, int] = {}
        self.handed_out = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = {block for block, users in self.users.items() if not users}
        taken = self.pool.allocate(count)
        if count > len(free):
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == count
        assert set(taken) <= free
        remembered = set(self.known.values())
        # What is known to somebody goes last.
        assert not set(taken) & remembered or free - remembered <= set(taken)
        for block in taken:
            self.users[block] = 1
            self.handed_out[block] += 1
        self.known = {key: block for key, block in self.known.items() if block not in taken}
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder)
        for block in holder:
            self.users[block] -= 1

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({block for holder in self.holders for block in holder})))
        self.pool.publish(block, key)
        if key not in self.known and block not in self.known.values():
            self.known[key] = block

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def match(self, keys: list[bytes]) -> None:
        expected = []
        for key in keys:
            if key not in self.known:
                break
            expected.append(self.known[key])
        assert self.pool.match(keys) == expected
        for block in expected:
            self.users[block] += 1
        self.holders.append(expected)

    @invariant()
    def free_blocks_and_generations_agree(self) -> None:
        assert self.pool.num_free == sum(not users for users in self.users.values())
        assert self.pool.generation.tolist() == list(self.handed_out.values())

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder)
        assert self.pool.num_free == NUM_BLOCKS


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase
