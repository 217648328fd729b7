"""Policies: what cannot be followed is refused with its place, what can is the same after a round trip, N by load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import SpeculativeConfig
from outrider.drafting.policy import Policy, read_policy
from outrider.errors import ConfigError, LoadError

SCHEDULE = "num_speculative_tokens_per_batch_size"
RULE = {"method": "ngram", "num_speculative_tokens": 4, SCHEDULE: [[1, 2, 4], [3, 8, 2], [9, 16, 0]]}
WEIGHTS = "0123456789abcdef"


def content(**changes: Any) -> dict[str, Any]:
    """What a policy's file says."""
    target = {"name": "some", "fingerprint": WEIGHTS}
    return {"format": 1, "target": target, "conditions": {}, "default": RULE, "classes": {"math": None}} | changes


def write(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "policy.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_n_follows_the_load_of_a_class(tmp_path: Path) -> None:
    policy = read_policy(write(tmp_path, content(classes={"math": None, "chat": RULE | {SCHEDULE: [[1, 1, 3]]}})))
    assert [policy.num_tokens_for(load) for load in (1, 2, 3, 8, 9, 16, 500)] == [4, 4, 2, 2, 0, 0, 0]
    assert [policy.num_tokens_for(load, "chat") for load in (1, 2, 500)] == [3, 3, 3]
    assert policy.num_tokens_for(1, "math") == 0 and policy.num_tokens_for(1, "unheard of") == 4


def test_a_rule_is_vllms_speculative_config(tmp_path: Path) -> None:
    rule = RULE | {"guard": True, "prompt_lookup_min": 2}
    policy = read_policy(write(tmp_path, content(default=rule)))
    told = policy.as_speculative_config()
    assert told == RULE | {"prompt_lookup_min": 2, "prompt_lookup_max": 2}, "the guard is ours"
    assert (
        Policy(target="t", fingerprint=WEIGHTS, default=SpeculativeConfig.parse(told)).as_speculative_config() == told
    )
    assert policy.as_speculative_config("math") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "format is 2, expected 1"),
        ({"clases": {}}, "unknown key 'clases'; did you mean classes"),
        ({"target": "some"}, "target is 'some', expected an object"),
        ({"target": {"name": "some"}}, "target.fingerprint is None"),
        ({"target": {"name": "some", "fingerprint": "a", "hash": 1}}, "target has an unknown key 'hash'"),
        ({"conditions": []}, "conditions is [], expected an object"),
        ({"classes": [RULE]}, "expected an object"),
        ({"classes": {"": RULE}}, "a class of classes is ''"),
        ({"default": "ngram"}, "default is 'ngram', expected an object"),
        ({"default": {}}, "default: speculative config: method is missing"),
        ({"default": {"method": "ngram"}}, "default: speculative config: num_speculative_tokens is missing"),
        ({"default": {"method": "eagle3"}}, "default: method or num_speculative_tokens is missing"),
        ({"classes": {"math": RULE | {"method": "eagle33"}}}, "classes.math: method is 'eagle33'"),
        ({"classes": {"math": RULE | {"method": "auto"}}}, "classes.math: method is 'auto'"),
        ({"classes": {"math": RULE | {"gamma": 2}}}, "classes.math: speculative config: unknown key 'gamma'"),
        ({"classes": {"math": RULE | {"policy": "other.json"}}}, "classes.math: policy is set"),
        ({"default": RULE | {SCHEDULE: [[1, 1, 4], [3, 4, 2]]}}, "default: " + SCHEDULE + " has a gap between 1 and 3"),
        ({"default": RULE | {SCHEDULE: [[1, 4, 4], [4, 8, 2]]}}, "[4, 8, 2], which overlaps or precedes"),
        ({"default": RULE | {SCHEDULE: [[2, 4, 4]]}}, "starts at 2"),
        ({"default": RULE | {SCHEDULE: [[1, 4, 5]]}}, "N 5, above num_speculative_tokens 4"),
        ({"default": RULE | {SCHEDULE: [[1, 4, -1]]}}, "N >= 0"),
        ({"default": RULE | {SCHEDULE: [[1, "4", 1]]}}, "in whole numbers"),
        ({"default": RULE | {SCHEDULE: [[4, 1, 1]]}}, "1 <= first <= last"),
        ({"default": RULE | {SCHEDULE: "4"}}, "expected a list"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write(tmp_path, content(**changes))
    with pytest.raises(ConfigError) as caught:
        read_policy(path)
    assert str(path) in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_default_is_no_plain_decoding(tmp_path: Path) -> None:
    values = content()
    del values["default"]
    with pytest.raises(ConfigError, match="default is missing"):
        read_policy(write(tmp_path, values))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1'])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises((LoadError, ConfigError), match="policy.json"):
        read_policy(write(tmp_path, text))
    with pytest.raises((LoadError, ConfigError), match="no such file"):
        read_policy(tmp_path / "none.json")


def test_another_targets_policy_is_refused(tmp_path: Path) -> None:
    policy = read_policy(write(tmp_path, content()))
    policy.check_target(WEIGHTS, tmp_path)
    with pytest.raises(ConfigError, match="a policy for some .*outrider tune"):
        policy.check_target("another", tmp_path)


@st.composite
def rules(draw: st.DrawFn) -> SpeculativeConfig | None:
    """Any rule that can be followed: ranges that touch, from 1 on."""
    if draw(st.booleans()):
        return None
    ends = draw(st.lists(st.integers(1, 64), unique=True, max_size=4).map(sorted))
    lengths = [draw(st.integers(0, 9)) for _ in ends]
    starts = [1, *(end + 1 for end in ends)]
    settings = {"method": "ngram", "num_speculative_tokens": max([1, *lengths])}
    if draw(st.booleans()):
        settings |= {"prompt_lookup_min": draw(st.integers(1, 3)), "prompt_lookup_max": draw(st.integers(3, 6))}
    if ends:
        settings[SCHEDULE] = [list(entry) for entry in zip(starts, ends, lengths, strict=False)]
    return SpeculativeConfig.parse(settings)


@given(default=rules(), classes=st.dictionaries(st.sampled_from("abc"), rules()), load=st.integers(1, 80))
def test_a_policy_is_the_same_after_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    default: SpeculativeConfig | None,
    classes: dict[str, SpeculativeConfig | None],
    load: int,
) -> None:
    policy = Policy(
        target="some", fingerprint=WEIGHTS, default=default, classes=classes, conditions={"cpu": "none", "num_cpus": 2}
    )
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    policy.save(path)
    again = read_policy(path)
    assert again == policy
    for name in ("a", "b", "unheard of"):
        rule = classes.get(name, default)
        entries = [] if rule is None else rule.num_speculative_tokens_per_batch_size
        within = [length for first, last, length in entries if first <= load <= last]
        beyond = entries[-1][2] if entries else 0 if rule is None else rule.num_speculative_tokens
        assert again.num_tokens_for(load, name) == (within[0] if within else beyond)
