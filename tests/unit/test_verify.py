"""Each verification method against a plain reference written from its formulas, and what a malformed proposal gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.errors import ShapeError
from outrider.sampling import Purpose, RowGroup, distributions, draw, gumbel, noise_keys, unit_noise
from outrider.types import PAD, Distributions, Proposal, SamplingParams, Verdict
from outrider.verify import verify

V = 12
METHODS = ("coupled", "standard", "block", "synthetic")
RATES = (0.8, 0.5, 0.5, 0.1)
SETTINGS = (
    SamplingParams(),
    SamplingParams(top_k=4),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.7, top_p=0.8),
)


def sparse(rows: np.ndarray) -> Distributions:
    ids = [np.flatnonzero(row) for row in rows]
    starts = np.cumsum([0] + [len(part) for part in ids])
    probs = np.concatenate([row[part] for row, part in zip(rows, ids, strict=True)]).astype(np.float32)
    return Distributions(torch.from_numpy(np.concatenate(ids)), torch.from_numpy(probs), torch.from_numpy(starts))


def dense(dist: Distributions) -> np.ndarray:
    rows = np.zeros((dist.num_rows, V))
    for row, (first, last) in enumerate(itertools.pairwise(dist.starts.tolist())):
        rows[row, dist.ids[first:last].numpy()] = dist.probs[first:last].numpy()
    return rows


@dataclass
class Case:
    """A batch of random requests: drafts drawn from `draft_probs`, or chosen at will where that is None."""

    groups: list[RowGroup] = field(default_factory=list)
    draft_probs: Distributions | None = None
    target: Distributions | None = None

    @property
    def proposal(self) -> Proposal:
        return Proposal(tuple(group.drafts for group in self.groups), self.draft_probs)


def make_case(seed: int, *, one_hot: bool, num_requests: int = 40) -> Case:
    generator = np.random.default_rng(seed)
    case, draft_rows = Case(), []
    for b in range(num_requests):
        params = SETTINGS[b % len(SETTINGS)]
        drafts = []
        for _ in range(int(generator.integers(0, 5))):
            row = generator.dirichlet(np.full(V, 0.5)).astype(np.float32)
            row[generator.integers(0, V)] = 0
            row /= row.sum()
            drafts.append(int(generator.choice(V, p=row.astype(np.float64) / row.sum(dtype=np.float64))))
            draft_rows.append(row)
        case.groups.append(RowGroup(params, seed * 1000 + b, b % 3, 5 + b, drafts=tuple(drafts)))
    num_rows = sum(group.num_rows for group in case.groups)
    logits = torch.from_numpy(generator.normal(size=(num_rows, V)).astype(np.float32)) * 2
    case.target = distributions(logits, case.groups)
    case.draft_probs = None if one_hot else sparse(np.array(draft_rows))
    return case


# ---- the plain references: one request, dense rows ----


def noised_argmax(weights: np.ndarray, key: np.uint64) -> int:
    with np.errstate(divide="ignore"):
        return int((np.log(weights) + gumbel(unit_noise(key, np.arange(V)))).argmax())


def plain_verdict(method: str, group: RowGroup, target: np.ndarray, drafted: np.ndarray) -> Verdict:
    """`target` [N+1, V], `drafted` [N, V] with one-hot rows where the drafts were chosen without chance."""
    noise = unit_noise(noise_keys([group], Purpose.ACCEPT), 0)
    if method == "coupled" or (group.params.temperature == 0 and method != "synthetic"):
        own = [noised_argmax(row, key) for row, key in zip(target, noise_keys([group], Purpose.GUMBEL), strict=True)]
        num_accepted = 0
        while num_accepted < len(group.drafts) and group.drafts[num_accepted] == own[num_accepted]:
            num_accepted += 1
        return Verdict(num_accepted, own[num_accepted])
    count = {"standard": plain_standard, "block": plain_block, "synthetic": plain_synthetic}[method]
    num_accepted, scale = count(group, target, drafted, noise)
    weights = target[num_accepted]
    is_recovered = num_accepted < len(group.drafts) and group.drafts[num_accepted] != PAD
    if is_recovered and group.params.temperature > 0:
        rest = np.maximum(scale * weights - drafted[num_accepted], 0)
        weights = rest if rest.sum() > 0 else weights
    return Verdict(num_accepted, noised_argmax(weights, noise_keys([group], Purpose.RESIDUAL)[num_accepted]))


def plain_standard(group: RowGroup, target: np.ndarray, drafted: np.ndarray, noise: np.ndarray) -> tuple[int, float]:
    for i, draft in enumerate(group.drafts):
        if draft == PAD or drafted[i, draft] == 0 or noise[i] >= target[i, draft] / drafted[i, draft]:
            return i, 1.0
    return len(group.drafts), 1.0


def plain_synthetic(group: RowGroup, target: np.ndarray, drafted: np.ndarray, noise: np.ndarray) -> tuple[int, float]:
    for i, draft in enumerate(group.drafts):
        before = RATES[i - 1] if i else 1.0
        if draft == PAD or noise[i] >= (RATES[i] / before if before else 0):
            return i, 1.0
    return len(group.drafts), 1.0


def plain_block(group: RowGroup, target: np.ndarray, drafted: np.ndarray, noise: np.ndarray) -> tuple[int, float]:
    length = group.drafts.index(PAD) if PAD in group.drafts else len(group.drafts)
    scales = [1.0]
    for i in range(length):
        draft = group.drafts[i]
        ratio = target[i, draft] / drafted[i, draft] if drafted[i, draft] else 0.0
        scales.append(min(1.0, scales[i] * ratio))
    best = 0
    for i in range(1, length + 1):
        threshold = scales[i]
        if i < length:
            rest = np.maximum(scales[i] * target[i] - drafted[i], 0).sum()
            threshold = rest / (rest + 1 - scales[i]) if rest + 1 - scales[i] > 0 else 1.0
        if noise[i - 1] <= threshold:
            best = i
    return best, scales[best]


def plain_verdicts(method: str, case: Case) -> list[Verdict]:
    target, verdicts, row, draft_row = dense(case.target), [], 0, 0
    for group in case.groups:
        num_drafts = len(group.drafts)
        if case.draft_probs is None:
            drafted = np.zeros((num_drafts, V))
            for i, draft in enumerate(group.drafts):
                if draft != PAD:
                    drafted[i, draft] = 1
        else:
            drafted = dense(case.draft_probs)[draft_row : draft_row + num_drafts]
        verdicts.append(plain_verdict(method, group, target[row : row + num_drafts + 1], drafted))
        row, draft_row = row + num_drafts + 1, draft_row + num_drafts
    return verdicts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_hot", [True, False])
def test_every_method_equals_its_plain_reference(method: str, one_hot: bool) -> None:
    for seed in range(6):
        case = make_case(seed, one_hot=one_hot)
        got = verify(method, case.proposal, case.target, case.groups, RATES)
        assert got == plain_verdicts(method, case)


def with_drafts(group: RowGroup, drafts: tuple[int, ...]) -> RowGroup:
    return RowGroup(group.params, group.seed, group.choice_index, group.position, drafts=drafts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_hot", [True, False])
def test_a_pad_ends_the_proposal(method: str, one_hot: bool) -> None:
    case = make_case(3, one_hot=one_hot)
    cut = [group.drafts[:1] + (PAD,) * (len(group.drafts) - 1) if group.drafts else () for group in case.groups]
    case.groups = [with_drafts(group, drafts) for group, drafts in zip(case.groups, cut, strict=True)]
    got = verify(method, case.proposal, case.target, case.groups, RATES)
    assert got == plain_verdicts(method, case)
    assert max(verdict.num_accepted for verdict in got) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("one_hot", [True, False])
def test_a_verdict_does_not_depend_on_its_neighbours(method: str, one_hot: bool) -> None:
    case = make_case(4, one_hot=one_hot)
    together = verify(method, case.proposal, case.target, case.groups, RATES)
    target, row, draft_row = dense(case.target), 0, 0
    for group, verdict in zip(case.groups, together, strict=True):
        num_drafts = len(group.drafts)
        drafted = None
        if case.draft_probs is not None:
            drafted = sparse(dense(case.draft_probs)[draft_row : draft_row + num_drafts]) if num_drafts else None
        own = sparse(target[row : row + num_drafts + 1])
        assert verify(method, Proposal((group.drafts,), drafted), own, [group], RATES) == [verdict]
        row, draft_row = row + num_drafts + 1, draft_row + num_drafts


def long_rows(seed: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
@pytest.mark.parametrize("one_hot", [True, False])
def test_a_drafter_that_is_the_target_is_always_accepted(method: str, one_hot: bool) -> None:
    vocab_size, num_drafts = 2000, 3
    params = SamplingParams(top_k=1) if one_hot else SamplingParams()
    base = RowGroup(params, 8, 0, 30, drafts=(PAD,) * num_drafts)
    target = distributions(long_rows(1, num_drafts + 1, vocab_size), [base])
    drafts = tuple(draw(target, [base], Purpose.GUMBEL if method == "coupled" else Purpose.DRAFT)[:num_drafts])
    end = int(target.starts[num_drafts])
    drafted = Distributions(target.ids[:end], target.probs[:end], target.starts[: num_drafts + 1])
    group = with_drafts(base, drafts)
    [verdict] = verify(method, Proposal((drafts,), None if one_hot else drafted), target, [group])
    assert verdict.num_accepted == num_drafts


@pytest.mark.parametrize("method", METHODS)
def test_greedy_accepts_up_to_the_first_mismatch_whatever_the_noise(method: str) -> None:
    own = (3, 1, 4, 1)
    rows = np.zeros((4, V), dtype=np.float32)
    rows[range(4), own] = 1
    for wrong in range(4):
        drafts = tuple(token if i != wrong else 9 for i, token in enumerate(own[:3]))
        for seed in range(20):
            group = RowGroup(SamplingParams(temperature=0), seed, 0, 2, drafts=drafts)
            [verdict] = verify(method, Proposal((drafts,)), sparse(rows), [group], (0.5, 0.5, 0.5))
            if method == "synthetic":
                assert verdict.next_token == own[verdict.num_accepted]
            else:
                assert verdict == Verdict(wrong, own[wrong])


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
@pytest.mark.parametrize("token", [PAD, -7, 11, V, 10**6])
def test_what_the_target_cannot_draw_is_rejected(method: str, token: int) -> None:
    rows = np.zeros((3, V), dtype=np.float32)
    rows[:, :4] = 0.25
    for seed in range(20):
        group = RowGroup(SamplingParams(), seed, 0, 2, drafts=(token, 1))
        [verdict] = verify(method, Proposal(((token, 1),)), sparse(rows), [group])
        assert verdict.num_accepted == 0
        assert verdict.next_token < 4


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_draft_that_its_own_distribution_excludes_is_rejected(method: str) -> None:
    rows = np.full((3, V), 1 / V, dtype=np.float32)
    drafted = np.zeros((2, V), dtype=np.float32)
    drafted[:, 5] = 1
    group = RowGroup(SamplingParams(), 1, 0, 2, drafts=(2, 5))
    [verdict] = verify(method, Proposal(((2, 5),), sparse(drafted)), sparse(rows), [group])
    assert verdict.num_accepted == 0


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_a_rejected_certainty_still_gets_a_token(method: str) -> None:
    rows = np.zeros((2, V), dtype=np.float32)
    rows[:, 6] = 1
    group = RowGroup(SamplingParams(), 1, 0, 2, drafts=(6,))
    drafted = sparse(rows[:1])
    [verdict] = verify(method, Proposal(((6,),), drafted), sparse(rows), [group], (0.0,))
    assert verdict == Verdict(0 if method == "synthetic" else 1, 6)


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_the_token_is_the_targets_own(method: str) -> None:
    case = make_case(5, one_hot=True)
    groups = [with_drafts(group, ()) for group in case.groups]
    rows = sparse(dense(case.target)[: len(groups)])
    got = verify(method, Proposal(tuple(() for _ in groups)), rows, groups)
    purpose = Purpose.GUMBEL if method == "coupled" else Purpose.RESIDUAL
    assert got == [Verdict(0, token) for token in draw(rows, groups, purpose)]
    assert verify(method, Proposal(()), Distributions(rows.ids[:0], rows.probs[:0], rows.starts[:1]), []) == []


def test_seams_name_the_field() -> None:
    case = make_case(6, one_hot=False)
    proposal, target, groups = case.proposal, case.target, case.groups
    with pytest.raises(ShapeError, match="Proposal.tokens has 39 requests, expected 40"):
        verify("standard", Proposal(proposal.tokens[1:], proposal.draft_probs), target, groups)
    with pytest.raises(ShapeError, match="RowGroup.drafts of request 2"):
        wrong = (*proposal.tokens[:2], (*proposal.tokens[2], 1), *proposal.tokens[3:])
        verify("standard", Proposal(wrong, proposal.draft_probs), target, groups)
    with pytest.raises(ShapeError, match="^target has"):
        verify("coupled", proposal, proposal.draft_probs, groups)
    with pytest.raises(ShapeError, match="Proposal.draft_probs has"):
        verify("block", Proposal(proposal.tokens, target), target, groups)
    with pytest.raises(ShapeError, match="synthetic_rates has 2 rates, expected at least 4"):
        verify("synthetic", proposal, target, groups, RATES[:2])
    with pytest.raises(ShapeError, match="method is 'typical'"):
        verify("typical", proposal, target, groups)
