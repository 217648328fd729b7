"""The theorem: what is emitted is distributed as the target's own text, however it was drafted and verified.

Whole rounds of propose and verify run over many seeds against a target whose next token depends on the last one only,
so that the exact distribution of a text is a product of rows. Rounds follow each other, because noise that comes back
in a later round shows only there. Drafters that break the rules must fail: a test that cannot tell them is no test.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.sampling import Purpose, RowGroup, TokenCounts, distributions, draft_group, draw, entries_of
from outrider.types import Distributions, Proposal, SamplingParams
from outrider.verify import verify

V, N, LENGTH = 8, 3, 3
FIRST = 2
"""The token before the text."""
START = 10
"""Its absolute position, plus one."""
TRIALS = 3000
LIMIT = 1e-4


def make_logits(seed: int, scale: float) -> torch.Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * scale


TARGET = make_logits(1, 1.2)
NEAR = TARGET + make_logits(2, 0.6)
FAR = make_logits(3, 1.5)
FILTERS = {"none": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.15}}
TEMPERATURES = (0.3, 1.0, 2.0)
RULES = ("coupled", "standard", "block")


def exact_rows(params: SamplingParams) -> np.ndarray:
    """The target's next-token probabilities after each token, [V, V], from the definitions of the filters."""
    rows = []
    for logits in TARGET.double().numpy():
        weights = np.exp((logits - logits.max()) / params.temperature)
        weights[weights < params.min_p] = 0
        order = np.argsort(-weights)
        if params.top_k:
            weights[order[params.top_k :]] = 0
        before = np.cumsum(weights[order]) - weights[order]
        if params.top_p < 1:
            weights[order[before >= params.top_p * weights.sum()]] = 0
        rows.append(weights / weights.sum())
    return np.array(rows)


def rows_after(table: Distributions, tokens: np.ndarray) -> Distributions:
    """The table's row for each token."""
    entries, starts = entries_of(table.starts.numpy(), tokens)
    return Distributions(table.ids[entries], table.probs[entries], torch.from_numpy(starts))


def table_of(logits: torch.Tensor, params: SamplingParams) -> Distributions:
    return distributions(logits, [RowGroup(params, 0, 0, 0)] * V)


class Drafter:
    """Proposes N tokens for each request by its own next-token logits; without chance unless `samples`."""

    def __init__(
        self, logits: torch.Tensor, *, samples: bool, params: SamplingParams, method: str = "standard"
    ) -> None:
        self.logits, self.samples, self.params = logits, samples, params
        self.purpose = Purpose.GUMBEL if method == "coupled" else Purpose.DRAFT

    def key(self, group: RowGroup) -> RowGroup:
        """The group under the key that its noise is to have."""
        return group

    def propose(self, groups: list[RowGroup], last: np.ndarray) -> tuple[np.ndarray, Distributions | None]:
        """Drafts [B, N] and their rows, request by request."""
        params = self.params if self.samples else replace(self.params, temperature=0.0)
        table, drafts = table_of(self.logits, params), []
        for i in range(N):
            rows = rows_after(table, drafts[-1] if drafts else last)
            drafts.append(np.array(draw(rows, [self.key(draft_group(group, i)) for group in groups], self.purpose)))
        before = np.stack([last, *drafts[:-1]], axis=1)
        return np.stack(drafts, axis=1), rows_after(table, before.ravel()) if self.samples else None


class Peeker(Drafter):
    """Withholds its proposal by the value of its own first token, which `standard` and `block` do not allow."""

    def propose(self, groups: list[RowGroup], last: np.ndarray) -> tuple[np.ndarray, Distributions | None]:
        drafts, rows = super().propose(groups, last)
        drafts[drafts[:, 0] % 2 == 0] = -1
        return drafts, rows


class Liar(Drafter):
    """Says that its drafts came from the target's distribution."""

    def propose(self, groups: list[RowGroup], last: np.ndarray) -> tuple[np.ndarray, Distributions | None]:
        drafts, _ = super().propose(groups, last)
        before = np.concatenate([last[:, None], drafts[:, :-1]], axis=1)
        return drafts, rows_after(table_of(TARGET, self.params), before.ravel())


class Forgetter(Drafter):
    """Has all noise of a round keyed by position alone, so that it comes back in the next round."""

    def key(self, group: RowGroup) -> RowGroup:
        return replace(group, round_start=0)


def rounds(method: str, drafter: Drafter, params: SamplingParams, trials: int = TRIALS) -> tuple[np.ndarray, float]:
    """Texts [trials, LENGTH], one a seed, and the mean number of drafts accepted in the first round."""
    texts: list[list[int]] = [[FIRST] for _ in range(trials)]
    table, first_accepted = table_of(TARGET, params), None
    while active := [seed for seed in range(trials) if len(texts[seed]) <= LENGTH]:
        groups = [RowGroup(params, seed, 0, START + len(texts[seed]) - 1) for seed in active]
        last = np.array([texts[seed][-1] for seed in active])
        drafts, draft_probs = drafter.propose(groups, last)
        groups = [
            drafter.key(replace(group, drafts=tuple(row))) for group, row in zip(groups, drafts.tolist(), strict=True)
        ]
        target = rows_after(table, np.concatenate([last[:, None], np.maximum(drafts, 0)], axis=1).ravel())
        verdicts = verify(method, Proposal(tuple(group.drafts for group in groups), draft_probs), target, groups)
        for seed, group, verdict in zip(active, groups, verdicts, strict=True):
            texts[seed] += [*group.drafts[: verdict.num_accepted], verdict.next_token]
        if first_accepted is None:
            first_accepted = float(np.mean([verdict.num_accepted for verdict in verdicts]))
    return np.array([text[1 : LENGTH + 1] for text in texts]), first_accepted or 0.0


def pvalue(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of counts against probabilities, cells that expect fewer than 5 thrown together."""
    expected = probs.ravel() * counts.sum()
    observed = counts.ravel()
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    keep = expected > 0
    if keep.sum() < 2:
        return 1.0
    return float(stats.chisquare(observed[keep], expected[keep] * observed.sum() / expected[keep].sum()).pvalue)


def pvalues(texts: np.ndarray, params: SamplingParams) -> list[float]:
    """Of the first token, the first and second jointly, and the second and third jointly."""
    rows = exact_rows(params)
    second = np.diag(rows[FIRST] @ rows)
    cells = [rows[FIRST], np.diag(rows[FIRST]) @ rows, second @ rows]
    pairs = [np.bincount(texts[:, i] * V + texts[:, i + 1], minlength=V * V).reshape(V, V) for i in (0, 1)]
    return [pvalue(counts, probs) for counts, probs in zip([pairs[0].sum(1), *pairs], cells, strict=True)]


DRAFTERS = {
    "one_hot": lambda params, method: Drafter(NEAR, samples=False, params=params, method=method),
    "sampled": lambda params, method: Drafter(NEAR, samples=True, params=params, method=method),
    "far": lambda params, method: Drafter(
        FAR, samples=True, params=replace(params, temperature=1.4, top_p=0.9), method=method
    ),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_emitted_text_is_distributed_as_the_targets(temperature: float, filters: str, drafter: str) -> None:
    params = SamplingParams(temperature=temperature, **FILTERS[filters])
    accepted = {}
    for method in RULES:
        texts, accepted[method] = rounds(method, DRAFTERS[drafter](params, method), params)
        assert min(pvalues(texts, params)) > LIMIT, method
    assert all(0 < mean < N for mean in accepted.values())
    # Five standard errors below: the two share no more than the drafts.
    assert accepted["block"] >= accepted["standard"] - 5 * N / np.sqrt(TRIALS)


@pytest.mark.parametrize("samples", [True, False])
def test_coupled_text_is_the_targets_own_whatever_is_drafted(samples: bool) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95)
    plain = Drafter(NEAR, samples=False, params=params)
    plain.propose = lambda groups, last: (np.full((len(groups), N), -1), None)
    expected, num_accepted = rounds("coupled", plain, params)
    assert num_accepted == 0
    for drafter in (
        Drafter(NEAR, samples=samples, params=params, method="coupled"),
        Drafter(TARGET, samples=samples, params=params, method="coupled"),
        Drafter(FAR, samples=samples, params=params, method="standard"),
        Peeker(NEAR, samples=samples, params=params, method="coupled"),
    ):
        texts, num_accepted = rounds("coupled", drafter, params)
        assert (texts == expected).all()
        assert num_accepted > 0.1


def test_shared_noise_makes_a_drafter_agree_more_often() -> None:
    params = SamplingParams()
    coupled, alone = (Drafter(NEAR, samples=True, params=params, method=method) for method in ("coupled", "standard"))
    assert rounds("coupled", coupled, params)[1] > 1.2 * rounds("coupled", alone, params)[1]


def test_block_accepts_more_than_standard() -> None:
    params = SamplingParams()
    means = {
        method: rounds(method, Drafter(FAR, samples=True, params=replace(params, temperature=2.0)), params)[1]
        for method in ("standard", "block")
    }
    assert means["block"] > means["standard"]


@pytest.mark.parametrize("method", RULES)
def test_a_peeker_is_found_out_except_by_coupled(method: str) -> None:
    params = SamplingParams()
    texts, _ = rounds(method, Peeker(NEAR, samples=True, params=params, method=method), params)
    assert (min(pvalues(texts, params)) > LIMIT) == (method == "coupled")


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_liar_is_found_out(method: str) -> None:
    params = SamplingParams()
    texts, _ = rounds(method, Liar(FAR, samples=True, params=params), params)
    assert min(pvalues(texts, params)) < LIMIT


def test_block_needs_fresh_noise_in_every_round() -> None:
    params = SamplingParams()
    for drafter, is_right in ((Drafter, True), (Forgetter, False)):
        texts, _ = rounds("block", drafter(NEAR, samples=True, params=params), params, trials=12_000)
        assert (min(pvalues(texts, params)) > LIMIT) == is_right


# ---- other promises of whole texts ----


def test_synthetic_accepts_at_the_given_rates() -> None:
    params, rates = SamplingParams(), (0.7, 0.4, 0.1)
    generator = np.random.default_rng(0)
    drafts = [tuple(row) for row in generator.integers(0, V, (TRIALS, N)).tolist()]
    groups = [RowGroup(params, seed, 0, START, drafts=row) for seed, row in enumerate(drafts)]
    target = rows_after(table_of(TARGET, params), np.array([(FIRST, *row) for row in drafts]).ravel())
    verdicts = verify("synthetic", Proposal(tuple(drafts)), target, groups, rates)
    for i, rate in enumerate(rates):
        accepted = np.mean([verdict.num_accepted > i for verdict in verdicts])
        assert abs(accepted - rate) < 4 * np.sqrt(rate * (1 - rate) / TRIALS)


def text_of(params: SamplingParams, seed: int, choice: int, wrong_at: int, length: int = 16) -> list[int]:
    """A text by coupled rounds of N drafts that are right up to `wrong_at`; 0 is as good as plain decoding."""
    counts = TokenCounts(V, [FIRST, 0]) if params.has_penalties else None
    text = [FIRST]
    while len(text) <= length:
        num_output, drafts = len(text) - 1, ()
        for i in range(N + 1):
            group = RowGroup(params, seed, choice, START + num_output, drafts, num_output, counts, end_ids=(5,))
            target = distributions(TARGET[[text[-1], *drafts]], [group])
            if i < N:
                own = draw(target, [group], Purpose.GUMBEL)[-1]
                drafts = (*drafts, (own + (i >= wrong_at)) % V)
        [verdict] = verify("coupled", Proposal((drafts,)), target, [group])
        assert verdict.num_accepted == min(wrong_at, N)
        for token in (*drafts[: verdict.num_accepted], verdict.next_token):
            text.append(token)
            if counts is not None:
                counts.append(token)
    return text[1 : length + 1]


ADJUSTED = {
    "frequency": SamplingParams(frequency_penalty=1.5),
    "presence": SamplingParams(presence_penalty=-1.5),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "greedy": SamplingParams(temperature=0, frequency_penalty=0.7),
    "min_tokens": SamplingParams(min_tokens=9),
    "logit_bias": SamplingParams(logit_bias={5: 3.0, 1: -50.0}, min_tokens=3),
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_adjusted_text_is_the_same_wherever_the_drafts_fail(name: str) -> None:
    params, plain = ADJUSTED[name], replace(SamplingParams(), temperature=ADJUSTED[name].temperature)
    texts = [text_of(params, seed, 0, wrong_at=0) for seed in range(25)]
    for wrong_at in range(1, N + 1):
        assert texts == [text_of(params, seed, 0, wrong_at) for seed in range(25)]
    assert texts != [text_of(plain, seed, 0, wrong_at=0) for seed in range(25)]
    assert all(5 not in text[: params.min_tokens] for text in texts)
    if params.min_tokens:
        assert any(text[params.min_tokens] == 5 for text in texts)
    if name == "logit_bias":
        assert all(1 not in text for text in texts)


def test_seeds_and_choices_differ_and_repeat() -> None:
    params = SamplingParams()
    texts = {(seed, choice): tuple(text_of(params, seed, choice, 2)) for seed in range(10) for choice in range(5)}
    assert len(set(texts.values())) == len(texts)
    assert text_of(params, 7, 3, 2) == [*texts[7, 3]]
    assert len({tuple(text_of(replace(params, temperature=0.0), seed, seed, 2)) for seed in range(10)}) == 1
