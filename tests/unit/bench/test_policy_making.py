"""A policy says what made-up measurements say: N by class and load, nothing where nothing is surely faster; the proof
measures it in turns, in the places of the sweep, and says plainly if it is no good.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.bench import policy as making
from outrider.bench import proof as proving
from outrider.bench.grid import PLAIN, Choice, Grid, Setting
from outrider.bench.policy import policy_of
from outrider.bench.proof import Proof, Prover, best_fixed
from outrider.bench.results import Results, Stopped
from outrider.config import SpeculativeConfig
from outrider.errors import LoadError
from tests.kit.sweeps import IDENTITY, FakeBackend, Speed, grid, header, prompts_for, results

PLACES = {"workloads": ["math", "chat"], "concurrency": [1, 4], "num_prompts": 16}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}


def by_place(faster: Callable[[Setting, Choice], float]) -> Speed:
    """Plain decoding's 100 tokens a second, a choice's so many times that."""
    return lambda setting, choice: 100.0 * (1.0 if choice == PLAIN else faster(setting, choice))


def ngram_at_low_load(setting: Setting, choice: Choice) -> float:
    """On math ngram: 4 at a load of 1, 2 at 4. On chat nothing."""
    if setting.workload == "chat" or choice.method == "draft_model":
        return 0.9
    best = 4 if setting.concurrency == 1 else 2
    return 1.6 if choice.num_speculative_tokens == best else 1.2


def schedule(rule: SpeculativeConfig | None) -> tuple[tuple[int, int, int], ...]:
    assert rule is not None
    return rule.num_speculative_tokens_per_batch_size


def test_every_class_gets_its_best_method_and_n_by_load() -> None:
    of = grid(methods={"ngram": NGRAM, "draft_model": {"method": "draft_model", "model": "some"}}, **PLACES)
    policy = policy_of(results(of, by_place(ngram_at_low_load), noise=0.02))
    rule = policy.rule("math")
    assert rule == SpeculativeConfig.parse(
        NGRAM | {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 4, 2]]}
    )
    assert "chat" in policy.classes and policy.rule("chat") is None
    assert policy.fingerprint == IDENTITY and policy.target == "some-target"
    assert policy.conditions == {"date": "2026-01-01", "cpu": "none"}
    assert making.lines(policy)[:2] == ["math: ngram, N=4 at 1, N=2 at 2 and more", "chat: plain decoding"]


def test_the_default_is_what_is_best_for_all_together() -> None:
    def faster(setting: Setting, choice: Choice) -> float:
        if choice.method == "draft_model":
            return 1.3
        return 1.5 if setting.workload == "math" else 0.8

    policy = policy_of(results(grid(**PLACES), by_place(faster), noise=0.01))
    rules = [policy.rule(name) for name in ("math", "chat", "unheard of")]
    assert [rule and rule.method for rule in rules] == ["ngram", "draft_model", "draft_model"]


def test_what_is_not_surely_faster_is_not_drafted() -> None:
    policy = policy_of(results(grid(**PLACES), by_place(lambda setting, choice: 1.01), noise=0.3))
    assert [policy.rule(name) for name in ("math", "chat", "")] == [None, None, None]
    loads = policy_of(
        results(grid(**PLACES), by_place(lambda setting, choice: 1.4 if setting.concurrency == 4 else 0.9), noise=0.01)
    )
    assert [(first, last, length > 0) for first, last, length in schedule(loads.rule("math"))] == [
        (1, 1, False),
        (2, 4, True),
    ]


def test_one_n_at_every_load_is_one_range() -> None:
    policy = policy_of(results(grid(**PLACES, lengths={"ngram": [3], "draft_model": [3]}), by_place(lambda s, c: 1.5)))
    assert schedule(policy.rule("math")) == ((1, 4, 3),)
    assert making.lines(policy)[0].endswith("N=3 at 1 and more")


def test_what_was_given_up_or_not_measured_everywhere_is_not_taken() -> None:
    of = grid(**PLACES)
    found = results(of, by_place(lambda setting, choice: 1.5 if choice == Choice("ngram", 4) else 1.2))
    stop = [Stopped(setting=s, choice=Choice("ngram", 4), reason="it fails") for s in of.settings if s.concurrency == 1]
    found.stopped.extend(stop)
    assert schedule(policy_of(found).rule("math"))[0][2] != 4
    part = results(grid(**PLACES, temperatures=[0.0, 1.0]), by_place(lambda setting, choice: 1.5))
    part.rows = [row for row in part.rows if not (row.choice.method == "ngram" and row.setting.temperature == 1)]
    rule = policy_of(part).rule("math")
    assert rule is not None and rule.method == "draft_model"


def test_a_files_class_is_its_name() -> None:
    assert making.class_of("/some/where/logs.jsonl") == "logs" and making.class_of("math") == "math"


def test_nothing_measured_is_no_policy() -> None:
    of = grid()
    with pytest.raises(LoadError, match="no policy"):
        policy_of(Results(header=header(of), sittings=[{}]))


def prove(speed: Speed, of: Grid, found: Results) -> tuple[Proof, FakeBackend]:
    backend = FakeBackend(speed)
    prover = Prover(backend, of, prompts_for(of), policy_of(found), best_fixed(found))
    return prover.run(lambda what, done, total: None, until=0.0), backend


def test_the_proof_compares_the_policy_with_plain_and_the_best_fixed_choice() -> None:
    def faster(setting: Setting, choice: Choice) -> float:
        return 1.5 if (choice.num_speculative_tokens == 4) == (setting.concurrency == 1) else 1.1

    of = grid(methods={"ngram": NGRAM}, lengths={"ngram": [2, 4]}, workloads=["math"], concurrency=[1, 4])
    found = results(of, by_place(faster), noise=0.01)
    assert best_fixed(found) in (Choice("ngram", 2), Choice("ngram", 4))
    # The made-up backend knows a policy by its guard and takes its N by load.
    proof, backend = prove(by_place(faster), of, found)
    guarded = [job for job in backend.jobs if job.config is not None and job.config.guard]
    assert {job.config.num_tokens_for(job.concurrency) for job in guarded if job.config} == {2, 4}
    assert all(job.workload == "math" for job in guarded)
    fixed = {job.config for job in backend.jobs if job.config is not None and not job.config.guard}
    assert len(fixed) == 1
    measured = backend.jobs[3 * len(of.settings) :]
    assert len(measured) == 3 * (4 + 1), "every block once under plain, policy and fixed"
    assert [item.taken for item in proof.places] == [Choice("ngram", 4), Choice("ngram", 2)]
    assert all(len(line) <= 80 for line in proving.lines(proof))


@pytest.mark.parametrize(
    ("now", "said"),
    [(1.5, "is faster than plain decoding: 1.50x"), (0.7, "is slower than plain decoding: 0.70x"), (1.0, "not surely")],
)
def test_the_proof_says_plainly_what_it_found(now: float, said: str) -> None:
    of = grid(methods={"ngram": NGRAM}, lengths={"ngram": [2]}, workloads=["math", "chat"])
    found = results(of, by_place(lambda setting, choice: 1.5), noise=0.01)
    proof, _ = prove(by_place(lambda setting, choice: now), of, found)
    text = " ".join(proving.lines(proof))
    assert said in text and ("slower than plain decoding in: chat at 1, math at 1" in text) == (now < 1)


def test_a_policy_of_plain_decoding_is_proven_against_the_fixed_choice_only() -> None:
    of = grid(methods={"ngram": NGRAM}, lengths={"ngram": [2]})
    slow = by_place(lambda setting, choice: 0.5)
    proof, _ = prove(slow, of, results(of, slow))
    assert proof.over_plain.ratio == 1 and proof.over_fixed is not None and proof.over_fixed.ratio == pytest.approx(2)
    assert "is plain decoding: nothing was surely faster" in proving.lines(proof)[-1]
