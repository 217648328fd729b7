"""The verdict on two texts: same, near-tie by the target's own margin, or divergence with its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.evaluate.distribution import compare_distributions
from outrider.evaluate.lossless import TextPair, choice_margin, compare
from outrider.models.llama import LlamaModel
from outrider.sampling import Purpose, RowGroup, distributions, draw
from outrider.types import SamplingParams
from tests.kit import tiny

PROMPT = (3, 9, 4)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return tiny.tiny_model(0)


def pair(plain: Sequence[int], speculative: Sequence[int], params: SamplingParams = GREEDY) -> TextPair:
    return TextPair(
        prompt_index=5, prompt_ids=PROMPT, params=params, plain=tuple(plain), speculative=tuple(speculative)
    )


def test_equal_texts_are_the_same(model: LlamaModel) -> None:
    found = compare(model, [pair([1, 2, 3], [1, 2, 3])])
    assert (found.verdict, found.num_tokens, found.max_margin) == ("same", 3, 0.0)


def test_another_token_is_a_divergence_with_its_place(model: LlamaModel) -> None:
    found = compare(model, [pair([1, 2, 3], [1, 7, 3])])
    assert found.verdict == "divergence" and len(found.divergences) == 1
    place = found.divergences[0]
    assert (place.prompt_index, place.position, place.plain_token, place.speculative_token) == (5, 1, 2, 7)


def test_an_early_end_is_never_a_matter_of_rounding(model: LlamaModel) -> None:
    found = compare(model, [pair([1, 2, 3], [1, 2])])
    assert found.verdict == "divergence" and math.isinf(found.max_margin)


def test_margins_are_gaps_of_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9995, -3.0]])
    group = RowGroup(GREEDY, 0, 0, 4)
    assert choice_margin(logits, group, 1) == 0
    assert choice_margin(logits, group, 2) == pytest.approx(0.0005, abs=1e-5)
    assert choice_margin(logits, group, 3) == pytest.approx(5.0, abs=1e-5)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_the_drawn_token_has_no_margin(filters: dict[str, float]) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(1, 40)).astype(np.float32) * 3)
    for seed in range(50):
        group = RowGroup(SamplingParams(temperature=0.8, **filters), seed, 0, 9)  # type: ignore[arg-type]
        token = draw(distributions(logits, [group]), [group], Purpose.GUMBEL)[0]
        assert choice_margin(logits, group, token) == 0


def sampled(random: np.random.Generator, weights: Sequence[float], length: float) -> list[list[int]]:
    return [random.choice(len(weights), size=1 + random.poisson(length), p=weights).tolist() for _ in range(150)]


def test_equal_distributions_pass_and_others_do_not() -> None:
    random = np.random.default_rng(3)
    one = [sampled(random, (0.5, 0.3, 0.2), 6)]
    assert compare_distributions(one, [sampled(random, (0.5, 0.3, 0.2), 6)], 8).verdict == "same"
    tokens = compare_distributions(one, [sampled(random, (0.3, 0.3, 0.4), 6)], 8)
    assert tokens.verdict == "divergence" and tokens.p_tokens < 1e-3
    lengths = compare_distributions(one, [sampled(random, (0.5, 0.3, 0.2), 12)], 8)
    assert lengths.verdict == "divergence" and lengths.p_lengths < 1e-3


def test_false_alarms_are_as_rare_as_they_should_be() -> None:
    random = np.random.default_rng(4)
    values = [
        compare_distributions([sampled(random, (0.5, 0.3, 0.2), 3)], [sampled(random, (0.5, 0.3, 0.2), 3)], 4).p_tokens
        for _ in range(40)
    ]
    assert 0.25 < float(np.mean(values)) < 0.75 and min(values) > 1e-3
