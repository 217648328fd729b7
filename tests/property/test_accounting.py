"""Theorem 7: every token and every draft is counted once, as what it was. The books of tests/kit hold after each run of
every other test; here the numbers themselves are known in advance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider.metrics import SpeculationCounters
from outrider.models.llama import LlamaModel
from tests.kit import scripted, tiny
from tests.kit.scripted import Scripted, Truth

REQUESTS = [
    tiny.make_request(f"{i}", tiny.random_prompt(i, 3 + 7 * i), seed=i, temperature=0.8 * (i % 2), max_tokens=33)
    for i in range(6)
]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(6)


@pytest.fixture(scope="module")
def truth(model: LlamaModel) -> Truth:
    return Truth(model, REQUESTS)


def test_wrong_drafts_are_counted_one_by_one(model: LlamaModel, truth: Truth) -> None:
    """Ten rounds of three wrong drafts: drafted is 30, of which 10 were rejected and 20 never tested."""
    engine = tiny.make_engine(model, scripted.Contrarian(truth), 3)
    engine.add(REQUESTS[0])
    for _ in range(11):  # the first step reads the prompt
        engine.step()
    counters = engine.stats.speculation
    assert (counters.num_rounds, counters.num_drafts, counters.num_draft_tokens) == (11, 10, 30)
    assert (counters.num_accepted_tokens, counters.num_rejected_tokens, counters.num_untested_tokens) == (0, 10, 20)
    assert (counters.num_committed, counters.num_discarded) == (11, 0)
    assert counters.acceptance_histogram == [10, 0, 0, 0]
    assert counters.mean_acceptance_length == 1
    engine.abort("0")


def test_right_drafts_are_counted_one_by_one(model: LlamaModel, truth: Truth) -> None:
    engine = tiny.make_engine(model, scripted.Oracle(truth), 3)
    result = tiny.run(engine, [REQUESTS[0]])["0"]
    counters = engine.stats.speculation
    # 1 from the prompt, 8 rounds of 3 + 1.
    assert len(result.tokens) == 33
    assert (counters.num_rounds, counters.num_drafts, counters.num_draft_tokens) == (9, 8, 24)
    assert (counters.num_accepted_tokens, counters.num_committed) == (24, 33)
    assert counters.acceptance_histogram == [0, 0, 0, 8]
    assert counters.mean_acceptance_length == 4
    assert counters.per_position_acceptance == [1, 1, 1]


@pytest.mark.parametrize("j", range(4))
def test_one_wrong_draft_gives_the_known_rates(j: int, model: LlamaModel, truth: Truth) -> None:
    engine = tiny.make_engine(model, scripted.OracleAt(truth, j), 4)
    engine.add(REQUESTS[1])
    for _ in range(6):
        engine.step()
    counters = engine.stats.speculation
    assert counters.num_drafts == 5
    assert counters.per_position_acceptance == [1.0] * j + [0.0] * (4 - j)
    assert (counters.num_accepted_tokens, counters.num_rejected_tokens) == (5 * j, 5)
    assert counters.num_untested_tokens == 5 * (3 - j)
    engine.abort("1")


def test_tokens_after_an_end_are_discarded_not_committed(model: LlamaModel, truth: Truth) -> None:
    """The end stands at draft 2 of 5: accepted counts all five, committed only what the reader gets."""
    text = tiny.tokens_of(tiny.make_engine(model), REQUESTS[:1])["0"]
    place = next(place for place in range(3, 33) if place % 6 == 2 and text[place] not in text[:place])
    request = tiny.make_request("0", REQUESTS[0].prompt_ids, stop_token_ids=(text[place],), max_tokens=33)
    engine = tiny.make_engine(model, scripted.Oracle(truth), 5)
    result = tiny.run(engine, [request])["0"]
    counters = engine.stats.speculation
    assert result.tokens == text[: place + 1]
    assert counters.num_committed == place + 1
    assert counters.num_accepted_tokens == counters.num_draft_tokens == 5 * counters.num_drafts
    # After the prompt's token, rounds commit 6; the last one stops after its second token: 4 of 6 are thrown away.
    assert counters.num_discarded == 4
    assert result.stats is not None
    assert result.stats.num_output_tokens == place + 1


def test_an_empty_proposal_is_a_round_but_no_draft(model: LlamaModel) -> None:
    engine = tiny.make_engine(model, scripted.Stutterer(), 5)
    tiny.run(engine, REQUESTS[:2])
    counters = engine.stats.speculation
    assert (counters.num_rounds, counters.num_drafts, counters.acceptance_histogram) == (66, 0, [])
    assert counters.mean_acceptance_length == counters.mean_committed_length == 1


SCRIPTS: list[Callable[[Truth], Scripted]] = [
    lambda truth: scripted.Mixed(truth, 0.5),
    lambda truth: scripted.Mixed(truth, 0.9),
    lambda truth: scripted.Sampler(),
    lambda truth: scripted.Peeker(),
    lambda truth: scripted.Liar(truth),
    lambda truth: scripted.Crasher(truth, 4, (1, 2)),
]


@pytest.mark.parametrize("make", SCRIPTS)
@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
def test_identities_hold_for_every_method(
    method: str, make: Callable[[Truth], Scripted], model: LlamaModel, truth: Truth
) -> None:
    """`run` itself holds the sums of the requests against the engine's, and all identities."""
    for num_tokens in (1, 3, 8):
        speculative = {
            "method": "scripted",
            "num_speculative_tokens": num_tokens,
            "rejection_sample_method": method,
        }
        drafter = make(truth)
        engine = tiny.make_engine(model, drafter, speculative, kv_cache_tokens=256)
        results = tiny.run(engine, REQUESTS)
        counters = engine.stats.speculation
        if not isinstance(drafter, scripted.Sampler):
            assert counters.num_draft_tokens == sum(map(len, drafter.proposed))
        assert counters.num_committed == sum(len(result.tokens) for result in results.values())
        assert len(counters.acceptance_histogram) <= num_tokens + 1


def test_synthetic_acceptance_is_what_was_asked_for(model: LlamaModel) -> None:
    requests = [
        tiny.make_request(f"{i}", tiny.random_prompt(i, 4), seed=i, temperature=1.0, max_tokens=120) for i in range(24)
    ]
    rates = [0.9, 0.6, 0.2]
    speculative = {
        "method": "scripted",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    engine = tiny.make_engine(model, scripted.Sampler(), speculative, max_num_seqs=24, kv_cache_tokens=8192)
    tiny.run(engine, requests)
    counters = engine.stats.speculation
    assert counters.num_drafts > 900
    # Four standard errors of a share over that many rounds.
    error = 4 * np.sqrt(0.25 / counters.num_drafts)
    assert np.abs(np.array(counters.per_position_acceptance) - rates).max() < error


def test_rows_and_steps_are_counted(model: LlamaModel, truth: Truth) -> None:
    engine = tiny.make_engine(model, scripted.Contrarian(truth), 3)
    tiny.run(engine, REQUESTS)
    counters, stats = engine.stats.speculation, engine.stats
    prompts = sum(len(request.prompt_ids) for request in REQUESTS)
    # Every committed token but each request's last is a row once, and so is every draft.
    assert stats.num_rows == prompts + counters.num_committed - len(REQUESTS) + counters.num_draft_tokens
    assert stats.num_steps == 33
    assert min(stats.draft_s, stats.verify_s, stats.other_s) > 0


def test_a_request_says_how_long_it_took(model: LlamaModel) -> None:
    results = tiny.run(tiny.make_engine(model, max_num_seqs=1), REQUESTS)
    firsts = [result.stats.first_token_s for result in results.values() if result.stats]
    queued = [result.stats.queued_s for result in results.values() if result.stats]
    totals = [result.stats.total_s for result in results.values() if result.stats]
    assert firsts == sorted(firsts), "one after another"
    assert all(0 <= q < f < t for q, f, t in zip(queued, firsts, totals, strict=True))
    assert queued == sorted(queued)


def test_merged_counters_are_the_sum(model: LlamaModel, truth: Truth) -> None:
    both = SpeculationCounters()
    for num_tokens in (2, 5):
        engine = tiny.make_engine(model, scripted.Mixed(truth, 0.6), num_tokens)
        tiny.run(engine, REQUESTS)
        both.merge(engine.stats.speculation)
    assert both.num_committed == 2 * 33 * 6
    assert both.broken_identities() == []
