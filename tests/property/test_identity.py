"""Theorems 1 and 10: drafts change nothing. Greedy text is the target's own for every drafter and every length, and
under coupled verification the same seed gives the same text and logprobs with any drafts or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.models.llama import LlamaModel
from outrider.native import library
from outrider.types import Request
from tests.kit import scripted, tiny
from tests.kit.scripted import Scripted, Truth

MAX_N = 16
PROMPTS = [tiny.random_prompt(seed, length) for seed, length in enumerate((1, 2, 7, 15, 16, 17, 33))]
GREEDY = [tiny.make_request(f"g{i}", prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all filters": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "presence": {"temperature": 0.4, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.4, "frequency_penalty": 1.1},
    "frequency, negative": {"frequency_penalty": -0.7},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 4.0, 26: -100.0, 38: -5.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": (14, 62, 33)},
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.4},
    "greedy, min_tokens": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (36, 23, 14)},
    "greedy, repetition": {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {38: 2.0}},
}
SAMPLED = [
    tiny.make_request(f"{name}-{choice}", PROMPTS[2], **({"temperature": 1.0} | params), seed=11, choice=choice)
    for name, params in SETTINGS.items()
    for choice in (0, 1)
]
SCRIPTS: dict[str, Callable[[Truth], Scripted]] = {
    "oracle": scripted.Oracle,
    "contrarian": scripted.Contrarian,
    "stutterer": scripted.Stutterer,
    "stopper": lambda truth: scripted.Stopper(38),
    "liar": scripted.Liar,
    "mixed, often right": lambda truth: scripted.Mixed(truth, 0.9),
    "mixed, half right": lambda truth: scripted.Mixed(truth, 0.5),
    "sampler": lambda truth: scripted.Sampler(),
    "peeker": lambda truth: scripted.Peeker(),
    "crasher": lambda truth: scripted.Crasher(truth, at=3),
}


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(1)


@pytest.fixture(scope="module")
def greedy_truth(model: LlamaModel) -> Truth:
    return Truth(model, GREEDY)


@pytest.fixture(scope="module")
def greedy_text(model: LlamaModel) -> dict[str, list[int]]:
    return tiny.tokens_of(tiny.make_engine(model), GREEDY)


@pytest.fixture(scope="module")
def sampled_truth(model: LlamaModel) -> dict[str, Truth]:
    # Seed, choice and prompt are the same for all settings, so each setting has a truth of its own.
    return {name: Truth(model, [r for r in SAMPLED if r.request_id.startswith(f"{name}-")]) for name in SETTINGS}


@pytest.fixture(scope="module")
def sampled_plain(model: LlamaModel) -> dict[str, tiny.Result]:
    with_logprobs = [replace(r, params=replace(r.params, logprobs=3)) for r in SAMPLED]
    return tiny.run(tiny.make_engine(model), with_logprobs)


@pytest.mark.parametrize("script", SCRIPTS)
def test_greedy_text_is_the_targets_own_for_every_length(
    script: str, model: LlamaModel, greedy_truth: Truth, greedy_text: dict[str, list[int]]
) -> None:
    for num_tokens in range(1, MAX_N + 1):
        engine = tiny.make_engine(model, SCRIPTS[script](greedy_truth), num_tokens)
        assert tiny.tokens_of(engine, GREEDY[2:3])["g2"] == greedy_text["g2"], f"N = {num_tokens}, alone"
    engine = tiny.make_engine(model, SCRIPTS[script](greedy_truth), 5)
    assert tiny.tokens_of(engine, GREEDY) == greedy_text


@pytest.mark.parametrize("num_tokens", range(1, MAX_N + 1))
def test_one_wrong_draft_at_any_place_changes_nothing(
    num_tokens: int, model: LlamaModel, greedy_truth: Truth, greedy_text: dict[str, list[int]]
) -> None:
    for j in range(num_tokens):
        engine = tiny.make_engine(model, scripted.OracleAt(greedy_truth, j), num_tokens)
        result = tiny.run(engine, GREEDY[3:4])["g3"]
        assert result.tokens == greedy_text["g3"], f"j = {j}"
        counts = result.stats.accepted_histogram if result.stats else ()
        # Only the last round can have fewer than j + 1 drafts, all of them right.
        assert sum(count for accepted, count in enumerate(counts) if accepted != j) <= 1, f"j = {j}: {counts}"


def test_an_oracle_is_always_accepted_and_a_contrarian_never(model: LlamaModel, greedy_truth: Truth) -> None:
    right = tiny.run(tiny.make_engine(model, scripted.Oracle(greedy_truth), 4), GREEDY)
    wrong = tiny.run(tiny.make_engine(model, scripted.Contrarian(greedy_truth), 3), GREEDY)
    for name in right:
        assert right[name].stats.num_accepted == right[name].stats.num_drafted > 0
        # The prompt's token, then rounds of 1 + 4: 24 tokens are 1 + 4 x 5 and a last one of 3 (2 drafts).
        assert right[name].num_outputs == 6
        # 23 rounds after the prompt's; the last three have room for 2, 1 and 0 drafts.
        assert (wrong[name].stats.num_accepted, wrong[name].stats.num_drafted) == (0, 20 * 3 + 2 + 1)


def test_batches_of_right_wrong_and_silent_drafts_do_not_mix(model: LlamaModel, greedy_truth: Truth) -> None:
    class ByRequest(scripted.Scripted):
        """Another script for each request, by its seed."""

        def chain(self, context: Any, index: int) -> tuple[int, ...]:
            tokens, kind = self.true_chain(context, index), context.groups[index].seed % 4
            if kind == 0:
                return tuple(tokens)
            if kind == 1:
                return tuple(self.wrong(token) for token in tokens)
            return tuple(tokens[: self.num_rounds % 3]) if kind == 2 else ()

    plain = tiny.tokens_of(tiny.make_engine(model), GREEDY)
    for num_tokens in range(1, MAX_N + 1):
        assert tiny.tokens_of(tiny.make_engine(model, ByRequest(greedy_truth), num_tokens), GREEDY) == plain


@pytest.mark.parametrize("name", SETTINGS)
def test_same_seed_same_text_and_logprobs_with_any_drafts(
    name: str, model: LlamaModel, sampled_truth: dict[str, Truth], sampled_plain: dict[str, tiny.Result]
) -> None:
    requests = [
        replace(r, params=replace(r.params, logprobs=3)) for r in SAMPLED if r.request_id.startswith(f"{name}-")
    ]
    for script, make in SCRIPTS.items():
        for num_tokens in (1, 2, 5, 16):
            engine = tiny.make_engine(model, make(sampled_truth[name]), num_tokens)
            for key, result in tiny.run(engine, requests).items():
                plain = sampled_plain[key]
                assert (result.tokens, result.finish) == (plain.tokens, plain.finish), f"{script}, N = {num_tokens}"
                assert result.logprobs == plain.logprobs, f"{script}, N = {num_tokens}"


def test_the_settings_above_do_what_they_say(model: LlamaModel, sampled_plain: dict[str, tiny.Result]) -> None:
    texts = {name: sampled_plain[f"{name}-0"].tokens for name in SETTINGS}
    for name, params in SETTINGS.items():
        if name not in ("plain", "hot"):
            neutral = tiny.make_request("neutral", PROMPTS[2], temperature=params.get("temperature", 1.0), seed=11)
            unchanged = tiny.tokens_of(tiny.make_engine(model), [neutral])["neutral"]
            assert texts[name] != unchanged, f"{name}: a setting that changes nothing tests nothing"
    assert all(sampled_plain[f"{name}-0"].tokens != sampled_plain[f"{name}-1"].tokens for name in ("plain", "hot"))
    assert not {14, 62, 33} & set(texts["min_tokens"][:12])
    assert len(texts["greedy, min_tokens"]) >= 9
    assert 26 not in texts["bias"]


def test_one_batch_of_all_settings_equals_each_alone(model: LlamaModel, sampled_plain: dict[str, tiny.Result]) -> None:
    alone = {r.request_id: tiny.tokens_of(tiny.make_engine(model), [r])[r.request_id] for r in SAMPLED}
    drafted = tiny.tokens_of(tiny.make_engine(model, scripted.Sampler(), 4, max_num_seqs=32), SAMPLED)
    assert alone == drafted == {name: result.tokens for name, result in sampled_plain.items()}


def test_ngram_text_is_the_targets_own_and_drafts_are_accepted() -> None:
    model = tiny.tiny_model(3, cyclic=True)
    requests = [
        tiny.make_request(f"{i}", tiny.random_prompt(i, 3 + i), seed=i, temperature=i % 2, max_tokens=60)
        for i in range(8)
    ]
    plain = tiny.tokens_of(tiny.make_engine(model), requests)
    for num_tokens in range(1, MAX_N + 1):
        config = {"method": "ngram", "num_speculative_tokens": num_tokens, "prompt_lookup_min": 2}
        engine = tiny.make_engine(model, speculative=config)
        assert tiny.tokens_of(engine, requests) == plain
        assert engine.stats.speculation.num_accepted_tokens > 60


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)],
    ids=["kernels-fp32", "kernels-bf16", "reference-fp32"],
)
@pytest.mark.parametrize("vocab", [64, 61])
def test_identity_on_every_path(kernels: bool, dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels bit for bit. The reference rounds by the number of rows, too coarsely so in bfloat16."""
    if kernels and library() is None:
        pytest.skip("no C kernels on this machine")
    if not kernels:
        monkeypatch.setattr("outrider.models.linear.library", lambda: None)
    model = tiny.tiny_model(5, dtype, vocab)
    requests = _requests_for(vocab)
    truth = Truth(model, requests)
    plain = tiny.tokens_of(tiny.make_engine(model), requests)
    for script in (scripted.Oracle(truth), scripted.Mixed(truth, 0.7), scripted.Sampler(vocab=vocab)):
        for num_tokens in (1, 4, 11):
            assert tiny.tokens_of(tiny.make_engine(model, script, num_tokens), requests) == plain


def _requests_for(vocab: int) -> Sequence[Request]:
    return [
        tiny.make_request(f"{i}", tiny.random_prompt(i, 5 + 9 * i, vocab), seed=i, temperature=0.8 * (i % 2))
        for i in range(4)
    ]
