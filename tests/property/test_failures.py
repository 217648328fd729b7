"""A drafter that fails, at whatever point, costs its requests their drafts and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.models.llama import LlamaModel
from tests.kit import books, scripted, tiny
from tests.kit.scripted import Truth

PROMPT = tiny.random_prompt(6, 9)
N = 5


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(8)


@pytest.fixture(scope="module")
def text(model: LlamaModel) -> list[int]:
    """What the target says after the prompt when nothing stops it."""
    return tiny.tokens_of(tiny.make_engine(model), [tiny.make_request("text", PROMPT, max_tokens=60)])["text"]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_drafter_that_fails_leaves_its_requests_on_plain_decoding(at: int, model: LlamaModel) -> None:
    requests = [
        tiny.make_request(f"{seed}", tiny.random_prompt(seed, 4 + seed), seed=seed, max_tokens=30) for seed in range(4)
    ]
    plain = tiny.tokens_of(tiny.make_engine(model), requests)
    truth = Truth(model, requests)
    for seeds in ((1, 3), None):
        engine = tiny.make_engine(model, scripted.Crasher(truth, at, seeds), N)
        results = tiny.run(engine, requests)
        assert {name: result.tokens for name, result in results.items()} == plain
        for name, result in results.items():
            assert result.stats is not None
            hit = seeds is None or int(name) in seeds
            assert (result.stats.drafting_error is not None) == hit
            if hit:
                assert "RuntimeError" in str(result.stats.drafting_error)


@pytest.mark.parametrize(
    "bad",
    [
        lambda budget: (0,) * (budget + 1),
        lambda budget: (-1,),
        lambda budget: (tiny.VOCAB,),
    ],
    ids=["more than asked for", "no token", "beyond the vocabulary"],
)
def test_an_impossible_proposal_counts_as_a_failure(bad: Any, model: LlamaModel, text: list[int]) -> None:
    class Bad(scripted.Scripted):
        def propose(self, context: Any) -> Any:
            return SimpleNamespace(tokens=tuple(bad(budget) for budget in context.budgets), draft_probs=None)

    engine = tiny.make_engine(model, Bad(), N)
    engine.add(tiny.make_request("a", PROMPT, max_tokens=20))
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [token for output in outputs for token in output.token_ids] == text[:20]
    stats = outputs[-1].stats
    assert stats is not None
    assert "ShapeError" in str(stats.drafting_error)


def test_draft_probs_of_another_length_count_as_a_failure(model: LlamaModel, text: list[int]) -> None:
    class Short(scripted.Liar):
        def draft_probs(self, context: Any, chains: Any) -> Any:
            return super().draft_probs(context, [chain[:-1] for chain in chains])

    for method in ("coupled", "standard", "block"):
        speculative = {"method": "scripted", "num_speculative_tokens": N, "rejection_sample_method": method}
        truth = Truth(model, [tiny.make_request("a", PROMPT, max_tokens=20)])
        engine = tiny.make_engine(model, Short(truth), speculative)
        engine.add(tiny.make_request("a", PROMPT, max_tokens=20))
        outputs = [output for _ in range(20) for output in engine.step()]
        assert [token for output in outputs for token in output.token_ids] == text[:20]


@pytest.mark.parametrize("verb", ["begin", "end"])
def test_a_drafter_that_fails_at_either_end_fails_nobody(verb: str, model: LlamaModel, text: list[int]) -> None:
    class Rude(scripted.Stutterer):
        pass

    def fail(self: Rude, slot: int) -> None:
        raise RuntimeError(books.ON_PURPOSE)

    setattr(Rude, verb, fail)
    engine = tiny.make_engine(model, Rude(), N)
    result = tiny.run(engine, [tiny.make_request("a", PROMPT, max_tokens=20)])["a"]
    assert result.tokens == text[:20]
    assert result.stats is not None
    assert books.ON_PURPOSE in str(result.stats.drafting_error)
