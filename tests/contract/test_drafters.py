"""What every registered drafter must do; a drafter passes all of this or is not registered.

Names come from the registry. `PROVIDERS` says how each one gets a checkpoint for the tiny target; a new name without
an entry fails loudly here, and everything below then holds for it without a further line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.base import DraftContext, Drafter
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.llama import LlamaModel
from outrider.sampling import Purpose
from outrider.types import Proposal, Request
from tests.kit import block, books, eagle3, gemma4_mtp, mtp, tiny

SEED = 3


def _no_checkpoint(folder: Path) -> dict[str, Any]:
    return {"prompt_lookup_min": 1, "prompt_lookup_max": 4}


def _other_target(folder: Path) -> dict[str, Any]:
    """The target's own family with slightly other weights: often right, often wrong."""
    return {"model": str(tiny.save_tiny(folder, SEED, cyclic=True, rms_norm_eps=0.3))}


def _dflash(folder: Path) -> dict[str, Any]:
    return {"model": str(block.save_block(folder, markov=False))}


def _dspark(folder: Path) -> dict[str, Any]:
    return {"model": str(block.save_block(folder, markov=True))}


def _eagle3(folder: Path) -> dict[str, Any]:
    return {"model": str(eagle3.save_eagle3(folder))}


def _mtp(folder: Path) -> dict[str, Any]:
    return {"model": str(mtp.save_mtp(folder))}


def _gemma4_mtp(folder: Path) -> dict[str, Any]:
    return {"model": str(gemma4_mtp.save_gemma4_mtp(folder))}


PROVIDERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ngram": _no_checkpoint,
    "draft_model": _other_target,
    "mtp": _mtp,
    "gemma4_mtp": _gemma4_mtp,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "dspark": _dspark,
}


def test_every_registered_name_has_a_provider() -> None:
    assert set(PROVIDERS) == set(registry.names()), "say in PROVIDERS how the new drafter gets its checkpoint"


@pytest.fixture(scope="module", params=registry.names())
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    settings = PROVIDERS[request.param](tmp_path_factory.mktemp(request.param))
    return SpeculativeConfig.parse({"method": request.param, "num_speculative_tokens": 8} | settings)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    """A target that repeats itself, so that every method finds something to propose."""
    return tiny.tiny_model(SEED, cyclic=True)


REQUESTS = [
    tiny.make_request(f"{i}", tiny.random_prompt(i, length), seed=i, temperature=0.6 * (i % 2), max_tokens=40)
    for i, length in enumerate((1, 2, 5, 16, 17, 45))
]


@pytest.fixture(scope="module")
def plain(model: LlamaModel) -> dict[str, list[int]]:
    return tiny.tokens_of(tiny.make_engine(model), REQUESTS)


@dataclass
class Witness:
    """Passes everything on to a drafter and keeps what was asked and answered; sees that the verbs are in order."""

    inner: Drafter
    rounds: list[tuple[DraftContext, Proposal]] = field(default_factory=list)
    live: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.taps = self.inner.taps

    def begin(self, slot: int) -> None:
        self.live.add(slot)
        self.inner.begin(slot)

    def end(self, slot: int) -> None:
        self.live.remove(slot)
        self.inner.end(slot)

    def propose(self, context: DraftContext) -> Proposal:
        proposal = self.inner.propose(context)
        kept = replace(context, histories=tuple(history.copy() for history in context.histories))
        self.rounds.append((kept, proposal))
        return proposal


def witnessed(model: LlamaModel, config: SpeculativeConfig, **settings: Any) -> tuple[Engine, Witness]:
    engine = tiny.make_engine(model, speculative=config, **settings)
    assert engine.safe_drafter is not None
    witness = Witness(engine.safe_drafter.drafter)
    engine.safe_drafter.drafter = witness
    return engine, witness


def proposals(witness: Witness) -> dict[tuple[int, tuple[int, ...]], tuple[int, ...]]:
    """What was proposed, by budget and text: those two decide it, and nothing else may."""
    return {
        (budget, tuple(history.tolist())): chain
        for context, proposal in witness.rounds
        for budget, history, chain in zip(context.budgets, context.histories, proposal.tokens, strict=True)
    }


def assert_agree(one: Witness, other: Witness) -> None:
    """Wherever both were asked the same, they said the same; and they were asked the same somewhere."""
    first, second = proposals(one), proposals(other)
    shared = first.keys() & second.keys()
    assert {key: first[key] for key in shared} == {key: second[key] for key in shared}
    assert shared


def said_afresh(model: LlamaModel, config: SpeculativeConfig, text: tuple[int, ...]) -> tuple[int, ...]:
    """What a fresh engine proposes after a greedy text: it reads all but the last token, says that one, and asks."""
    engine, witness = witnessed(model, config)
    tiny.run(engine, [tiny.make_request("fresh", text[:-1], max_tokens=config.num_speculative_tokens + 2)])
    return proposals(witness)[config.num_speculative_tokens, text]


# ---- declarations and configuration ----


def test_declarations_are_there(model: LlamaModel, config: SpeculativeConfig) -> None:
    drafter = tiny.make_engine(model, speculative=config).drafter
    assert drafter is not None
    assert isinstance(drafter.taps, tuple)
    assert all(0 <= layer <= model.config.num_layers for layer in drafter.taps)


def test_an_unknown_name_is_refused_with_the_nearest(config: SpeculativeConfig) -> None:
    name = config.method[:-1] + "x"
    with pytest.raises(ConfigError, match=config.method) as caught:
        registry.check(replace(config, method=name))
    assert caught.value.param == "method"


# ---- proposals ----


@pytest.mark.parametrize("method", ["coupled", "standard"])
@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_proposals_keep_the_contract(sampling: str, method: str, model: LlamaModel, config: SpeculativeConfig) -> None:
    """Within the budget, ids of the vocabulary, one row of draft_probs a draft that gives the draft some weight."""
    changes: dict[str, Any] = {"draft_sample_method": sampling, "rejection_sample_method": method}
    engine, witness = witnessed(model, replace(config, **changes))
    tiny.run(engine, REQUESTS)
    assert sum(len(chain) for _, proposal in witness.rounds for chain in proposal.tokens) > 50
    for context, proposal in witness.rounds:
        assert len(proposal.tokens) == len(context.budgets)
        for chain, budget in zip(proposal.tokens, context.budgets, strict=True):
            assert 0 <= len(chain) <= budget
            assert all(type(token) is int and 0 <= token < tiny.VOCAB for token in chain)
        rows = proposal.draft_probs
        if rows is not None:
            drafts = [token for chain in proposal.tokens for token in chain]
            assert rows.num_rows == len(drafts)
            for index, draft in enumerate(drafts):
                row = rows.row(index)
                assert abs(float(row.probs.sum()) - 1) < 1e-4
                assert float(row.probs[row.ids == draft].sum()) > 0
    assert witness.live == set()


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_text_is_the_targets_own(
    num_tokens: int, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    for sampling in ("greedy", "probabilistic"):
        changes: dict[str, Any] = {"num_speculative_tokens": num_tokens, "draft_sample_method": sampling}
        engine = tiny.make_engine(model, speculative=replace(config, **changes))
        assert tiny.tokens_of(engine, REQUESTS) == plain
        assert engine.stats.speculation.num_accepted_tokens > 20, "a drafter that is never right tests nothing"


def test_a_prompt_of_one_token(model: LlamaModel, config: SpeculativeConfig) -> None:
    for token in range(0, tiny.VOCAB, 7):
        request = tiny.make_request("a", (token,), max_tokens=12)
        expected = tiny.tokens_of(tiny.make_engine(model), [request])
        assert tiny.tokens_of(tiny.make_engine(model, speculative=config), [request]) == expected


def test_no_budget_costs_nothing(model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]) -> None:
    """N = 0 for every batch size: the drafter is not asked once."""
    off = replace(config, num_speculative_tokens_per_batch_size=((1, 64, 0),))
    engine, witness = witnessed(model, off)
    assert tiny.tokens_of(engine, REQUESTS) == plain
    assert witness.rounds == []


def test_a_batch_proposes_what_each_alone_would(model: LlamaModel, config: SpeculativeConfig) -> None:
    """And a text's proposal does not depend on the slot, the step or what the drafter was asked before."""
    engine, together = witnessed(model, config)
    tiny.run(engine, REQUESTS)
    for request in REQUESTS:
        engine, single = witnessed(model, config)
        tiny.run(engine, [request])
        assert_agree(single, together)


def test_one_round_over_several_requests_equals_rounds_over_one(model: LlamaModel, config: SpeculativeConfig) -> None:
    engine, witness = witnessed(model, config)
    tiny.run(engine, REQUESTS)
    context = max((context for context, _ in witness.rounds), key=lambda context: len(context.slots))
    assert len(context.slots) > 1
    whole = witness.inner.propose(context)
    assert tuple(witness.inner.propose(context.only(i)).tokens[0] for i in range(len(context.slots))) == whole.tokens


def test_slots_begin_and_end_in_any_order(model: LlamaModel, config: SpeculativeConfig) -> None:
    drafter = tiny.make_engine(model, speculative=config).drafter
    assert drafter is not None
    for order in itertools.permutations(range(3)):
        for slot in range(3):
            drafter.begin(slot)
        for slot in order:
            drafter.end(slot)
        drafter.begin(order[0])
        drafter.end(order[0])


def test_a_restart_after_preemption_proposes_as_a_fresh_start_would(
    model: LlamaModel, config: SpeculativeConfig
) -> None:
    requests = [replace(request, params=replace(request.params, temperature=0.0)) for request in REQUESTS]
    for caching in (True, False):
        engine, witness = witnessed(model, config, kv_cache_tokens=112, enable_prefix_caching=caching)
        tiny.run(engine, requests)
        assert engine.scheduler.num_preemptions > 0
        asked = [text for budget, text in proposals(witness) if budget == config.num_speculative_tokens]
        assert len(asked) > 10
        for text in asked[-8:]:
            budget = config.num_speculative_tokens
            assert said_afresh(model, config, text) == proposals(witness)[budget, text]


def test_a_shared_prefix_proposes_as_a_fresh_start_would(model: LlamaModel, config: SpeculativeConfig) -> None:
    """The second run finds all prompts in the cache, filled by the first one."""
    prefix = tiny.random_prompt(77, 64)
    requests = [tiny.make_request(f"{i}", [*prefix, i], max_tokens=20) for i in range(4)]
    seen = []
    for caching in (True, False):
        engine, witness = witnessed(model, config, enable_prefix_caching=caching)
        tiny.run(engine, requests[:1])
        tiny.run(engine, requests)
        seen.append(proposals(witness))
    assert seen[0] == seen[1]


def test_aborts_at_any_step_do_not_disturb_others(
    model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    engine, witness = witnessed(model, config, kv_cache_tokens=192)
    for num_steps in range(1, 12):
        for request in REQUESTS[3:]:
            engine.add(replace(request, request_id="gone" + request.request_id))
        for _ in range(num_steps):
            engine.step()
        for name in list(engine._sequences):
            engine.abort(name)
        books.check_at_rest(engine)
        assert witness.live == set()
        assert tiny.tokens_of(engine, REQUESTS[4:]) == {name: plain[name] for name in ("4", "5")}


def test_fresh_drafters_propose_the_same(model: LlamaModel, config: SpeculativeConfig) -> None:
    counts = set()
    for _ in range(5):
        engine, witness = witnessed(model, config)
        tiny.run(engine, REQUESTS)
        counts.add((engine.stats.speculation.num_accepted_tokens, len(witness.rounds)))
    assert len(counts) == 1


def test_a_round_is_repeatable(model: LlamaModel, config: SpeculativeConfig) -> None:
    """Asked again with the same context, a drafter says the same: nothing is used up, sampled drafts included."""
    changes: dict[str, Any] = {"draft_sample_method": "probabilistic"}
    engine, witness = witnessed(model, replace(config, **changes))
    tiny.run(engine, REQUESTS)
    for context, _ in witness.rounds[-3:]:
        first = witness.inner.propose(context)
        assert witness.inner.propose(context).tokens == first.tokens


# ---- failures and limits ----


@pytest.mark.parametrize("at", [1, 3])
def test_a_drafter_that_raises_leaves_its_requests_on_plain_decoding(
    at: int, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    engine, witness = witnessed(model, config)
    propose = witness.propose

    def failing(context: DraftContext) -> Proposal:
        if len(witness.rounds) >= at:
            raise RuntimeError(books.ON_PURPOSE)
        return propose(context)

    witness.propose = failing  # type: ignore[method-assign]
    results = tiny.run(engine, REQUESTS)
    assert {name: result.tokens for name, result in results.items()} == plain
    assert all(books.ON_PURPOSE in str(result.stats and result.stats.drafting_error) for result in results.values())


@pytest.mark.parametrize("limit", [1, 20, 47])
def test_the_configured_length_limit_is_kept(
    limit: int, model: LlamaModel, config: SpeculativeConfig, plain: dict[str, list[int]]
) -> None:
    engine, witness = witnessed(model, replace(config, max_model_len=limit))
    assert tiny.tokens_of(engine, REQUESTS) == plain
    for context, proposal in witness.rounds:
        for history, chain in zip(context.histories, proposal.tokens, strict=True):
            assert len(history) + len(chain) <= limit


@pytest.mark.parametrize("max_len", [33, 48])
def test_the_contexts_edge(max_len: int, model: LlamaModel, config: SpeculativeConfig) -> None:
    requests = [
        tiny.make_request(f"{n}", tiny.random_prompt(n, n), max_tokens=None) for n in (1, max_len - 6, max_len - 1)
    ]
    settings = {"max_model_len": max_len, "kv_cache_tokens": 192}
    expected = tiny.tokens_of(tiny.make_engine(model, **settings), requests)
    assert tiny.tokens_of(tiny.make_engine(model, speculative=config, **settings), requests) == expected


def test_steps_without_drafts_are_caught_up(model: LlamaModel, config: SpeculativeConfig) -> None:
    """N goes 2, 0, 3 while the batch thins out; what is proposed afterwards is what a drafter in use would propose."""
    requests: Sequence[Request] = [
        tiny.make_request(f"{i}", tiny.random_prompt(30 + i, 8), seed=i, max_tokens=length)
        for i, length in enumerate((70, 12, 24, 9, 20))
    ]
    schedule = ((1, 1, 3), (2, 3, 0), (4, 8, 2))
    engine, gaps = witnessed(model, replace(config, num_speculative_tokens_per_batch_size=schedule))
    tiny.run(engine, requests)
    late = [text for budget, text in proposals(gaps) if budget == 3 and len(text) > 45]
    assert late
    for text in late:
        assert said_afresh(model, replace(config, num_speculative_tokens=3), text) == proposals(gaps)[3, text]


def test_contexts_say_what_was_committed(model: LlamaModel, config: SpeculativeConfig) -> None:
    """The engine's side of the contract: histories grow by what was committed, blocks have room for the drafts."""
    engine, witness = witnessed(model, config)
    results = tiny.run(engine, REQUESTS)
    texts = [[*request.prompt_ids, *results[request.request_id].tokens] for request in REQUESTS]
    for context, _ in witness.rounds:
        assert context.purpose is Purpose.GUMBEL
        assert len(set(context.slots)) == len(context.slots)
        for history, blocks, budget in zip(context.histories, context.blocks, context.budgets, strict=True):
            assert any(np.array_equal(history, text[: len(history)]) for text in texts)
            assert len(blocks) * 16 >= len(history) + budget
