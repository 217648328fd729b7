"""What sampling promises: exact filters, order, ties, rows that ignore their neighbours, keyed noise, exact draws."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.errors import RequestError, ShapeError
from outrider.sampling import (
    Purpose,
    RowGroup,
    TokenCounts,
    concatenate,
    distributions,
    draft_group,
    draw,
    greedy,
    gumbel,
    logprobs,
    noise_keys,
    uniform,
    unit_noise,
)
from outrider.types import PAD, Distributions, SamplingParams

SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_k_wide": SamplingParams(top_k=700, temperature=2.0),
    "top_p": SamplingParams(top_p=0.7),
    "top_p_wide": SamplingParams(top_p=0.99, temperature=2.0),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
}


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def group_of(params: SamplingParams, **kwargs) -> RowGroup:
    return RowGroup(params, kwargs.pop("seed", 1), kwargs.pop("choice_index", 0), kwargs.pop("position", 7), **kwargs)


def rows_of(dist: Distributions) -> list[tuple[list[int], np.ndarray]]:
    bounds = itertools.pairwise(dist.starts.tolist())
    return [(dist.ids[first:last].tolist(), dist.probs[first:last].numpy()) for first, last in bounds]


def plain_distribution(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """The filters one after the other over the whole sorted vocabulary, in fp64: the slow truth."""
    scores = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    weights = {token: np.exp(scores[token] - scores[order[0]]) for token in order}
    kept = [token for token in order if weights[token] >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if params.top_p == 1 or before < params.top_p * total:
            nucleus.append(token)
        before += weights[token]
    total = sum(weights[token] for token in nucleus)
    return {token: weights[token] / total for token in nucleus if weights[token] > 2.0**-64}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab_size", [1, 8, 300, 5000])
def test_filters_equal_the_plain_reference(name: str, vocab_size: int) -> None:
    logits = make_logits(4, vocab_size)
    dist = distributions(logits, [group_of(SETTINGS[name])] * 4)
    for (ids, probs), row in zip(rows_of(dist), logits.numpy(), strict=True):
        expected = plain_distribution(row, SETTINGS[name])
        assert ids == sorted(expected)
        np.testing.assert_allclose(probs, [expected[token] for token in ids], rtol=2e-5, atol=1e-12)
        assert abs(probs.sum() - 1) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    logits = make_logits(2 * len(SETTINGS) + 2, 5000).to(dtype)
    groups = [group_of(params, drafts=(3,)) for params in SETTINGS.values()]
    groups.append(group_of(SamplingParams(temperature=0), drafts=(1,)))
    together = rows_of(distributions(logits, groups))
    for i, group in enumerate(groups):
        alone = rows_of(distributions(logits[2 * i : 2 * i + 2], [group]))
        for (ids, probs), (own_ids, own_probs) in zip(together[2 * i : 2 * i + 2], alone, strict=True):
            assert ids == own_ids
            assert probs.tobytes() == own_probs.tobytes()


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [700, 300, 900]] = 2.0
    greedy_params = SamplingParams(temperature=0)
    assert distributions(logits, [group_of(greedy_params)]).ids.tolist() == [300]
    assert distributions(logits, [group_of(replace(greedy_params, logit_bias={5: -1.0}))]).ids.tolist() == [300]
    assert distributions(logits, [group_of(SamplingParams(top_k=2))]).ids.tolist() == [300, 700]
    assert distributions(logits, [group_of(SamplingParams(top_k=5))]).ids.tolist() == [0, 1, 300, 700, 900]
    flat = distributions(torch.zeros(1, 8), [group_of(SamplingParams(top_p=0.5))])
    assert flat.ids.tolist() == [0, 1, 2, 3]


def test_greedy_takes_the_first_of_equals_in_every_row() -> None:
    logits = torch.zeros(20, 4097, dtype=torch.bfloat16)
    logits[torch.arange(20), torch.arange(20) * 100 + 3] = 1.0
    logits[:, 4000] = 1.0
    assert greedy(logits).tolist() == [i * 100 + 3 for i in range(20)]


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)])
def test_the_narrowest_filters_leave_the_argmax(params: SamplingParams) -> None:
    logits = make_logits(3, 300)
    assert distributions(logits, [group_of(params)] * 3).ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-8, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = make_logits(2, 300) * 100
    dist = distributions(logits, [group_of(SamplingParams(temperature=temperature))] * 2)
    assert torch.isfinite(dist.probs).all()
    if temperature < 1:
        assert dist.ids.tolist() == logits.argmax(-1).tolist()


def test_logit_bias_comes_first_and_outside_ids_are_refused() -> None:
    logits = make_logits(2, 50)
    forced = SamplingParams(temperature=0, logit_bias={17: 100.0, 3: -100.0})
    assert distributions(logits, [group_of(forced, drafts=(1,))]).ids.tolist() == [17, 17]
    params = SamplingParams(logit_bias={17: 1.5})
    biased = logits.clone()
    biased[:, 17] += 1.5
    got = distributions(logits, [group_of(params, drafts=(1,))])
    torch.testing.assert_close(got.probs, distributions(biased, [group_of(SamplingParams())] * 2).probs)
    for token in (-1, 50):
        with pytest.raises(RequestError, match=f"names token {token}") as caught:
            distributions(logits, [group_of(SamplingParams(logit_bias={token: 1.0}), drafts=(1,))])
        assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_banned_exactly_until_min_tokens(temperature: float) -> None:
    logits = torch.zeros(5, 10)
    logits[:, [4, 6]] = 9.0
    params = SamplingParams(temperature=temperature, min_tokens=20, max_tokens=30)
    group = group_of(params, drafts=(1, 2, 3, 4), num_output=17, end_ids=(4, 6))
    rows = rows_of(distributions(logits, [group]))
    assert [bool({4, 6} & set(ids)) for ids, _ in rows] == [False, False, False, True, True]
    assert logits[0, 4] == 9.0, "the caller's logits stay as they are"


PENALTIES = [
    SamplingParams(temperature=0.8, repetition_penalty=1.7),
    SamplingParams(temperature=0.8, frequency_penalty=0.9),
    SamplingParams(temperature=0.8, presence_penalty=-1.1),
    SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=-0.4, repetition_penalty=0.6),
]


def plainly_penalised(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    row = row.astype(np.float64)
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


@pytest.mark.parametrize("params", PENALTIES)
def test_penalties_count_earlier_drafts_once_each(params: SamplingParams) -> None:
    prompt, output, drafts = [1, 2, 2, 3], [3, 5, 5], (5, 7, 7, 1)
    logits = make_logits(5, 12)
    counts = TokenCounts(12, prompt)
    for token in output:
        counts.append(token)
    rows = rows_of(distributions(logits, [group_of(params, drafts=drafts, counts=counts)]))
    for i, (ids, probs) in enumerate(rows):
        expected = plain_distribution(
            plainly_penalised(logits[i].numpy(), params, prompt, output + [*drafts[:i]]), params
        )
        np.testing.assert_allclose(probs, [expected[token] for token in ids], rtol=2e-5)


@pytest.mark.parametrize("params", PENALTIES)
def test_penalties_over_drafts_equal_plain_steps_to_the_bit(params: SamplingParams) -> None:
    logits, drafts = make_logits(4, 300), (5, 7, 7)
    counts = TokenCounts(300, [1, 2])
    together = rows_of(distributions(logits, [group_of(params, drafts=drafts, counts=counts)]))
    for i, (ids, probs) in enumerate(together):
        [(own_ids, own_probs)] = rows_of(distributions(logits[i : i + 1], [group_of(params, counts=counts)]))
        assert ids == own_ids
        assert probs.tobytes() == own_probs.tobytes()
        counts.append(drafts[i] if i < len(drafts) else 0)


def test_drafts_that_are_no_tokens_are_not_counted() -> None:
    params, counts = SamplingParams(frequency_penalty=2.0), TokenCounts(10, [])
    logits = make_logits(3, 10)
    dist = distributions(logits, [group_of(params, drafts=(PAD, 10), counts=counts)])
    torch.testing.assert_close(dist.probs, distributions(logits, [group_of(SamplingParams())] * 3).probs)
    assert counts.in_output.sum() == 0


def test_seams_name_what_is_wrong() -> None:
    logits = make_logits(2, 10)
    with pytest.raises(ShapeError, match=r"logits is \(2, 10\)"):
        distributions(logits, [group_of(SamplingParams())])
    with pytest.raises(ShapeError, match="RowGroup.counts is None"):
        distributions(logits, [group_of(SamplingParams(presence_penalty=1.0))] * 2)
    with pytest.raises(ShapeError, match="largest value is nan"):
        distributions(logits * float("nan"), [group_of(SamplingParams())] * 2)
    with pytest.raises(ShapeError, match="dist has 2 rows"):
        draw(distributions(logits, [group_of(SamplingParams())] * 2), [group_of(SamplingParams())], Purpose.GUMBEL)
    with pytest.raises(ShapeError, match="token_ids has 1"):
        logprobs(logits, [3], 0)


def test_concatenate_keeps_rows_in_order() -> None:
    logits = make_logits(3, 300)
    groups = [group_of(SETTINGS["top_p"]), group_of(SETTINGS["top_k"]), group_of(SamplingParams(temperature=0))]
    parts = [distributions(logits[i : i + 1], [group]) for i, group in enumerate(groups)]
    joined, whole = concatenate(parts), distributions(logits, groups)
    assert joined.starts.tolist() == whole.starts.tolist()
    assert joined.ids.tolist() == whole.ids.tolist()
    assert joined.probs.tolist() == whole.probs.tolist()


# ---- keyed noise ----


def test_noise_is_the_same_for_the_same_key_only() -> None:
    tokens = np.arange(1000)
    base = uniform(5, 0, 9, Purpose.ACCEPT, tokens)
    assert (base == uniform(5, 0, 9, Purpose.ACCEPT, tokens)).all()
    assert (base[::-1] == uniform(5, 0, 9, Purpose.ACCEPT, tokens[::-1])).all()
    for other in [
        (6, 0, 9, Purpose.ACCEPT),
        (5, 1, 9, Purpose.ACCEPT),
        (5, 0, 10, Purpose.ACCEPT),
        (5, 0, 9, Purpose.DRAFT),
    ]:
        assert (base != uniform(*other, tokens)).all()


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1, 10**30])
def test_every_seed_works_and_noise_stays_inside(seed: int) -> None:
    noise = uniform(seed, 3, 2**31, Purpose.GUMBEL, np.arange(20_000))
    assert 0 < noise.min() < 1e-3
    assert 1 - 1e-3 < noise.max() < 1


AXES = {
    "token": lambda i: (1, 0, 5, Purpose.GUMBEL, i),
    "position": lambda i: (1, 0, i, Purpose.GUMBEL, 3),
    "seed": lambda i: (i, 0, 5, Purpose.GUMBEL, 3),
    "negative seed": lambda i: (-i, 0, 5, Purpose.DRAFT, 3),
    "choice": lambda i: (1, i, 5, Purpose.ACCEPT, 0),
    "diagonal": lambda i: (i, i, i, Purpose.GUMBEL, i),
}


def series(axis: str, count: int) -> np.ndarray:
    keys, tokens = [], []
    for i in range(count):
        seed, choice, position, purpose, token = AXES[axis](i)
        keys.append((RowGroup(SamplingParams(), seed, choice, position), purpose))
        tokens.append(token)
    purpose = keys[0][1]
    return unit_noise(noise_keys([group for group, _ in keys], purpose), np.array(tokens))


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_and_unrelated_to_its_neighbour(axis: str) -> None:
    noise = series(axis, 20_000)
    assert stats.chisquare(np.bincount((noise * 64).astype(int), minlength=64)).pvalue > 1e-3
    low_bits = np.bincount((noise * 2.0**40).astype(np.int64) % 64, minlength=64)
    assert stats.chisquare(low_bits).pvalue > 1e-3
    pairs = (noise[:-1] * 8).astype(int) * 8 + (noise[1:] * 8).astype(int)
    assert stats.chisquare(np.bincount(pairs[::2], minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_unrelated(one: Purpose, other: Purpose) -> None:
    tokens = np.arange(20_000)
    first, second = uniform(1, 0, 5, one, tokens), uniform(1, 0, 5, other, tokens)
    pairs = (first * 8).astype(int) * 8 + (second * 8).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=64)).pvalue > 1e-3


def test_only_the_coupled_noise_is_the_same_in_every_round() -> None:
    early = group_of(SamplingParams(), position=10, drafts=(1, 2, 3))
    late = group_of(SamplingParams(), position=12, drafts=(1, 2, 3))
    for purpose in Purpose:
        same = noise_keys([early], purpose)[2] == noise_keys([late], purpose)[0]
        assert same == (purpose is Purpose.GUMBEL)


def test_a_drafter_draws_under_the_keys_of_the_round() -> None:
    params = SamplingParams(top_k=3, presence_penalty=1.0, min_tokens=2)
    group = group_of(params, position=10, drafts=(1, 2), counts=TokenCounts(9, []), end_ids=(0,))
    for purpose in (Purpose.GUMBEL, Purpose.DRAFT):
        keys = noise_keys([group], purpose).tolist()
        assert noise_keys([draft_group(group, 0), draft_group(group, 1)], purpose).tolist() == keys[:2]
        assert noise_keys([draft_group(group, 0, num_rows=3)], purpose).tolist() == keys
    drafted = draft_group(group, 1).params
    assert (drafted.top_k, drafted.has_penalties) == (3, False)


# ---- draws ----


def plain_draw(dist: Distributions, groups: list[RowGroup], purpose: Purpose) -> list[int]:
    keys = noise_keys(groups, purpose)
    tokens = []
    for (ids, probs), key in zip(rows_of(dist), keys, strict=True):
        scores = np.log(probs.astype(np.float64)) + gumbel(unit_noise(key, ids))
        tokens.append(ids[int(scores.argmax())])
    return tokens


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 4.0])
def test_the_bounded_draw_equals_the_plain_one(scale: float) -> None:
    logits = make_logits(60, 3000) * scale
    choices = list(SETTINGS.values())
    groups = [group_of(choices[i % len(choices)], seed=i, drafts=(1,)) for i in range(30)]
    dist = distributions(logits, groups)
    drawn = draw(dist, groups, Purpose.GUMBEL)
    assert drawn == plain_draw(dist, groups, Purpose.GUMBEL)
    assert drawn != draw(dist, groups, Purpose.DRAFT)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = make_logits(9, 3000)
    groups = [group_of(params, seed=40) for params in SETTINGS.values()]
    together = draw(distributions(logits, groups), groups, Purpose.GUMBEL)
    alone = [
        draw(distributions(logits[i : i + 1], [group]), [group], Purpose.GUMBEL)[0] for i, group in enumerate(groups)
    ]
    assert together == alone


@pytest.mark.parametrize("vocab_size", [8, 1000])
def test_draws_follow_the_distribution(vocab_size: int) -> None:
    logits = make_logits(1, vocab_size) * 0.4
    groups = [group_of(SamplingParams(), seed=seed) for seed in range(3000)]
    one = distributions(logits, groups[:1])
    dist = concatenate([one] * 3000)
    counts = np.bincount(draw(dist, groups, Purpose.GUMBEL), minlength=vocab_size)
    order = np.argsort(one.probs.numpy())
    cells = np.array_split(order, 8)
    expected = [3000 * one.probs.numpy()[cell].sum(dtype=np.float64) for cell in cells]
    observed = [counts[cell].sum() for cell in cells]
    assert stats.chisquare(observed, np.array(expected) * 3000 / sum(expected)).pvalue > 1e-3


# ---- log-probabilities ----


@pytest.mark.parametrize("vocab_size", [3, 1000])
def test_logprobs_are_those_of_the_raw_distribution(vocab_size: int) -> None:
    logits = make_logits(3, vocab_size)
    expected = torch.log_softmax(logits.double(), -1)
    tokens = [2, int(logits[1].argmax()), 0]
    for i, entry in enumerate(logprobs(logits, tokens, 5)):
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(expected[i, tokens[i]].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[i] > expected[i, tokens[i]]).sum())
        best = expected[i].topk(min(5, vocab_size))
        assert list(entry.top) == best.indices.tolist()
        np.testing.assert_allclose(list(entry.top.values()), best.values.numpy(), atol=1e-5)


def test_logprobs_settle_ties_by_id_and_may_have_no_top() -> None:
    [entry] = logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), [2], 2)
    assert (entry.rank, list(entry.top)) == (2, [1, 2])
    assert logprobs(torch.zeros(1, 200), [3], 0)[0].top == {}
