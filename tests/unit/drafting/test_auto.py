"""Method "auto": the given policy, else the kept one, else the drafter that was accepted most, else one clear line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting import auto, registry, zoo
from outrider.drafting.policy import Policy, kept_path
from outrider.errors import ConfigError, LoadError
from outrider.models.fingerprint import fingerprint
from outrider.models.llama import LlamaModel
from tests.kit.tiny import tiny_model
from tests.kit.zoo import install, profile, put_profile

SCHEDULE = "num_speculative_tokens_per_batch_size"
RULE = {"method": "ngram", "num_speculative_tokens": 4, SCHEDULE: [[1, 2, 4], [3, 8, 0]]}


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return tiny_model()


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a place for packages beside which nothing is installed."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    site = tmp_path / "site"
    site.mkdir()
    everywhere = zoo.entry_points
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(
        zoo, "entry_points", lambda group: [item for item in everywhere(group=group) if item.module != "outrider_zoo"]
    )
    return site


def policy_for(target: LlamaModel, rule: dict[str, Any] | None = RULE, **classes: dict[str, Any] | None) -> Policy:
    def parsed(given: dict[str, Any] | None) -> SpeculativeConfig | None:
        return None if given is None else SpeculativeConfig.parse(given)

    rules = {name: parsed(given) for name, given in classes.items()}
    return Policy(target="tiny", fingerprint=fingerprint(target), default=parsed(rule), classes=rules)


def resolved(target: LlamaModel, **settings: Any) -> SpeculativeConfig | None:
    return auto.resolve(SpeculativeConfig.parse({"method": "auto"} | settings), target)


def test_the_policys_rule_is_taken_guarded_and_with_what_stands_beside(target: LlamaModel, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    policy_for(target, None, chat=RULE).save(path)
    assert resolved(target, policy=str(path)) is None
    found = resolved(target, policy=str(path), workload="chat", draft_sample_method="probabilistic")
    assert found == SpeculativeConfig.parse(RULE | {"guard": True, "draft_sample_method": "probabilistic"})
    found = resolved(target, policy=str(path), workload="chat", guard=False)
    assert found is not None and found.guard is False


def test_the_kept_policy_is_taken_without_a_file(target: LlamaModel) -> None:
    policy_for(target).save(kept_path(fingerprint(target)))
    assert resolved(target) == SpeculativeConfig.parse(RULE | {"guard": True})


def test_an_unheard_class_takes_the_default_and_says_so(target: LlamaModel, caplog: pytest.LogCaptureFixture) -> None:
    policy_for(target, RULE, chat=None).save(kept_path(fingerprint(target)))
    with caplog.at_level(logging.WARNING):
        assert resolved(target, workload="chap") is not None
    assert "no class chap (it has chat)" in caplog.text


def test_another_models_policy_is_refused(target: LlamaModel, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    policy_for(tiny_model(7)).save(path)
    with pytest.raises(ConfigError, match="policy for tiny"):
        resolved(target, policy=str(path))


def test_without_a_policy_the_drafter_that_was_accepted_most_is_taken(
    target: LlamaModel, nothing_known: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = install(nothing_known), fingerprint(target)
    lengths = {"dspark": {"math": 2.0, "code": 2.0}, "eagle3": {"math": 2.5, "code": 1.7, "copy": 1.0}}
    for method, recorded in lengths.items():
        acceptance = {name: {"mean_acceptance_length": length} for name, length in recorded.items()}
        put_profile(folder / "tiny" / method, profile(weights, method, 3, acceptance=acceptance))
    put_profile(folder / "tiny" / "dflash", profile(weights, "dflash"))
    strangers = {"math": {"mean_acceptance_length": 9.0}}
    put_profile(folder / "other" / "dflash", profile("bb", "dflash", acceptance=strangers))
    with caplog.at_level(logging.WARNING):
        found = resolved(target)
    assert found is not None and found.guard is True
    assert found == registry.resolve(SpeculativeConfig.parse({"method": "eagle3", "guard": True}), target)
    assert "eagle3" in caplog.text and "2.10 tokens a round" in caplog.text and "outrider tune" in caplog.text


def test_a_record_that_is_none_is_named(target: LlamaModel, nothing_known: Path) -> None:
    bad = {"math": {"mean_acceptance_length": "long"}}
    put_profile(install(nothing_known) / "tiny" / "dflash", profile(fingerprint(target), "dflash", acceptance=bad))
    with pytest.raises(LoadError, match="mean_acceptance_length of math is 'long'"):
        resolved(target)


def test_where_nothing_is_known_the_error_says_what_to_do(target: LlamaModel) -> None:
    with pytest.raises(ConfigError, match="no policy for this target .* run `outrider tune`"):
        resolved(target)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "auto", "model": "some"}, "model is set, but method"),
        ({"method": "auto", SCHEDULE: [[1, 1, 1]]}, f"{SCHEDULE} is set, but method"),
        ({"method": "ngram", "num_speculative_tokens": 2, "policy": "p.json"}, "policy is set, but only method"),
        ({"method": "ngram", "num_speculative_tokens": 2, "workload": "math"}, "workload is set, but only method"),
        ({"policy": "there-is-none.json"}, "there-is-none.json: there is no such file"),
        ({"policy": 3}, "policy is 3"),
        ({"method": "auto", "workload": 3}, "workload is 3"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, LoadError)) as caught:
        auto.check(SpeculativeConfig.parse(settings))
    assert said in str(caught.value)


def test_other_methods_are_the_registrys(target: LlamaModel) -> None:
    config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 2})
    assert auto.resolve(config, target) == registry.resolve(config, target)
