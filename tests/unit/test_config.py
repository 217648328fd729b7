"""Settings: every key is taken, every wrong value is refused in one line that names the key and what it expects."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.config import VLLM_ONLY_KEYS, EngineConfig, SpeculativeConfig, apply_overrides, cache_folder
from outrider.errors import ConfigError

LEAST: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
SYNTHETIC: dict[str, Any] = LEAST | {"rejection_sample_method": "synthetic"}


def refused(source: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(source)
    assert "\n" not in str(caught.value)
    return caught.value


# ---- the speculative configuration ----

GOOD: dict[str, list[tuple[Any, Any]]] = {
    "method": [("draft_model", "draft_model")],
    "num_speculative_tokens": [(1, 1), (64, 64)],
    "model": [("some/folder", "some/folder"), (None, None)],
    "max_model_len": [(1, 1), (4096, 4096), (None, None)],
    "num_speculative_tokens_per_batch_size": [
        ([[1, 2, 4], [3, 8, 0]], ((1, 2, 4), (3, 8, 0))),
        ([[1, 1, 1]], ((1, 1, 1),)),
        ([], ()),
    ],
    "rejection_sample_method": [("coupled", "coupled"), ("standard", "standard"), ("block", "block")],
    "draft_sample_method": [("greedy", "greedy"), ("probabilistic", "probabilistic")],
    "dspark_draft_topk": [(8, 8)],
    "prompt_lookup_max": [(7, 7)],
    "prompt_lookup_min": [(2, 2)],
    "enable_adaptive_verification": [(True, True), (False, False)],
    "guard": [(True, True), (False, False), (None, None)],
    "policy": [("policy.json", "policy.json"), (None, None)],
    "workload": [("math", "math")],
}


@pytest.mark.parametrize("key", GOOD)
def test_every_key_is_taken(key: str) -> None:
    for given, kept in GOOD[key]:
        for spelt in (key, key.replace("_", "-")):
            assert getattr(SpeculativeConfig.parse(LEAST | {spelt: given}), key) == kept
        assert getattr(SpeculativeConfig.parse(json.dumps(LEAST | {key: given})), key) == kept


def test_no_key_is_untested() -> None:
    synthetic = {"synthetic_acceptance_rates", "synthetic_acceptance_length"}
    assert set(GOOD) | synthetic == {item.name for item in fields(SpeculativeConfig)}


BAD: list[tuple[str, Any, str]] = [
    ("method", 3, "name of a drafting method"),
    ("method", "", "name of a drafting method"),
    ("num_speculative_tokens", 0, "at least 1"),
    ("num_speculative_tokens", -1, "at least 1"),
    ("num_speculative_tokens", 2.5, "integer"),
    ("num_speculative_tokens", "4", "integer"),
    ("num_speculative_tokens", True, "integer"),
    ("model", 3, "folder, file or name"),
    ("max_model_len", 0, "at least 1"),
    ("max_model_len", "long", "integer"),
    ("rejection_sample_method", "strict", "coupled, standard, block, synthetic"),
    ("rejection_sample_method", ["standard"], "coupled, standard, block, synthetic"),
    ("draft_sample_method", "random", "greedy, probabilistic"),
    ("dspark_draft_topk", 0, "at least 1"),
    ("dspark_draft_topk", "all", "integer"),
    ("prompt_lookup_max", 0, "at least 1"),
    ("prompt_lookup_min", -2, "at least 1"),
    ("enable_adaptive_verification", 1, "true or false"),
    ("guard", "yes", "true or false"),
    ("policy", "", "a file's name"),
    ("workload", 3, "a name"),
    ("num_speculative_tokens_per_batch_size", 4, "a list"),
    ("num_speculative_tokens_per_batch_size", "all", "a list"),
    ("num_speculative_tokens_per_batch_size", [4], r"\[first, last, N\]"),
    ("num_speculative_tokens_per_batch_size", [[1, 2]], r"\[first, last, N\]"),
    ("num_speculative_tokens_per_batch_size", [[1, 2, 1.5]], r"\[first, last, N\]"),
    ("num_speculative_tokens_per_batch_size", [[1, 2, True]], r"\[first, last, N\]"),
    ("num_speculative_tokens_per_batch_size", [[2, 3, 1]], "start at 1"),
    ("num_speculative_tokens_per_batch_size", [[0, 3, 1]], "1 <= first"),
    ("num_speculative_tokens_per_batch_size", [[3, 1, 1]], "first <= last"),
    ("num_speculative_tokens_per_batch_size", [[1, 3, -1]], "N >= 0"),
    ("num_speculative_tokens_per_batch_size", [[1, 4, 2], [4, 8, 1]], "overlaps"),
    ("num_speculative_tokens_per_batch_size", [[1, 4, 2], [2, 3, 1]], "overlaps"),
]


@pytest.mark.parametrize(("key", "value", "expected"), BAD)
def test_a_wrong_value_is_refused_naming_key_value_and_what_is_allowed(key: str, value: Any, expected: str) -> None:
    settings = LEAST | {"prompt_lookup_min": 1, "prompt_lookup_max": 5, key: value}
    error = refused(settings)
    assert error.param == key
    assert key in str(error)
    assert re.search(expected, str(error))


def test_a_method_or_a_model_must_be_given() -> None:
    for settings in (
        {},
        {"num_speculative_tokens": 3},
        LEAST | {"method": None},
        LEAST | {"method": None, "model": None},
    ):
        error = refused(settings)
        assert error.param == "method"
        assert "missing" in str(error)


INCOMPLETE: list[dict[str, Any]] = [
    {"method": "ngram"},
    {"method": "ngram", "num_speculative_tokens": None},
    {"model": "some/folder"},
    {"model": "some/folder", "method": None, "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("settings", INCOMPLETE)
def test_what_a_drafter_may_say_can_be_left_out(settings: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse(settings)
    given = {key: value for key, value in settings.items() if value is not None}
    assert not config.is_complete
    assert {key: config.as_json().get(key) for key in (*LEAST, "model")} == dict.fromkeys([*LEAST, "model"]) | given
    assert SpeculativeConfig.parse(config.as_json()) == config
    assert replace(config, **LEAST) == SpeculativeConfig.parse(given | LEAST)


def test_a_configuration_with_method_and_n_is_complete() -> None:
    assert SpeculativeConfig.parse(LEAST).is_complete


def test_synthetic_rates_wait_for_n_and_are_held_against_it_then() -> None:
    open_ended = {key: value for key, value in SYNTHETIC.items() if key != "num_speculative_tokens"}
    config = SpeculativeConfig.parse(open_ended | {"synthetic_acceptance_rates": [0.5, 0.2]})
    assert replace(config, num_speculative_tokens=2).synthetic_rates == (0.5, 0.2)
    with pytest.raises(ConfigError, match="2 entries"):
        replace(config, num_speculative_tokens=3)
    config = SpeculativeConfig.parse(open_ended | {"synthetic_acceptance_length": 3.5})
    assert replace(config, num_speculative_tokens=3).synthetic_rates == (1.0, 1.0, 0.5)
    with pytest.raises(ConfigError, match="= 3"):
        replace(config, num_speculative_tokens=2)
    for wrong in ({"synthetic_acceptance_rates": [0.2, 0.5]}, {"synthetic_acceptance_length": 0.5}, {}):
        assert refused(open_ended | wrong).param.startswith("synthetic_acceptance")  # type: ignore[union-attr]


def test_an_unknown_key_names_the_nearest_or_all() -> None:
    error = refused(LEAST | {"num_speculative_token": 3})
    assert "did you mean num_speculative_tokens?" in str(error)
    assert error.param == "num_speculative_token"
    error = refused(LEAST | {"zzz": 3})
    assert all(item.name in str(error) for item in fields(SpeculativeConfig))


@pytest.mark.parametrize("key", VLLM_ONLY_KEYS)
def test_a_key_of_vllms_says_why_it_is_not_here(key: str) -> None:
    error = refused(LEAST | {key: 1})
    assert error.param == key
    assert VLLM_ONLY_KEYS[key] in str(error)
    assert key not in {item.name for item in fields(SpeculativeConfig)}


@pytest.mark.parametrize("source", ["{", "", "ngram", "[1]", "3", "null", '"x"'])
def test_what_is_no_object_is_refused(source: str) -> None:
    assert refused(source).param == "speculative_config"


def test_a_parsed_configuration_is_taken_as_it_is() -> None:
    config = SpeculativeConfig.parse(LEAST)
    assert SpeculativeConfig.parse(config) is config


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 4}, (4, 4)),
    ],
)
def test_one_lookup_length_sets_the_other(given: dict[str, Any], kept: tuple[int, int]) -> None:
    config = SpeculativeConfig.parse(LEAST | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == kept


def test_lookup_lengths_must_be_in_order() -> None:
    assert refused(LEAST | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}).param == "prompt_lookup_min"


# ---- the schedule ----


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([], [3, 3, 3, 3, 3, 3]),
        ([[1, 2, 2], [3, 4, 1]], [2, 2, 1, 1, 1, 1]),
        ([[1, 1, 3], [4, 5, 0]], [3, 3, 3, 0, 0, 0]),  # the gap keeps what came before
        ([[1, 3, 9]], [3, 3, 3, 3, 3, 3]),  # never above num_speculative_tokens
        ([[1, 2, 0], [3, 9, 2]], [0, 0, 2, 2, 2, 2]),
    ],
)
def test_the_schedule_goes_by_the_number_of_requests(schedule: list[list[int]], expected: list[int]) -> None:
    config = SpeculativeConfig.parse(LEAST | {"num_speculative_tokens_per_batch_size": schedule})
    assert [config.num_tokens_for(count) for count in range(1, 7)] == expected


# ---- synthetic acceptance ----


def test_synthetic_rates_are_taken_as_given_or_made_from_a_length() -> None:
    given = SpeculativeConfig.parse(SYNTHETIC | {"synthetic_acceptance_rates": [0.9, 0.5, 0.5]})
    assert given.synthetic_rates == (0.9, 0.5, 0.5)
    for length in (1, 1.0, 1.4, 2, 2.75, 4):
        made = SpeculativeConfig.parse(SYNTHETIC | {"synthetic_acceptance_length": length}).synthetic_rates
        assert len(made) == 3
        assert 1 + sum(made) == pytest.approx(length)
        assert list(made) == sorted(made, reverse=True)
    assert SpeculativeConfig.parse(LEAST).synthetic_rates == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": []}, "synthetic_acceptance_rates"),
        (
            {"synthetic_acceptance_rates": [0.5, 0.5, 0.5], "synthetic_acceptance_length": 2},
            "synthetic_acceptance_rates",
        ),
        ({"synthetic_acceptance_rates": [0.5, 0.5]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, -0.1]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, float("nan")]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": [0.5, "x", 0.1]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": "abc"}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_length": 0.9}, "synthetic_acceptance_length"),
        ({"synthetic_acceptance_length": 4.1}, "synthetic_acceptance_length"),
        ({"synthetic_acceptance_length": float("nan")}, "synthetic_acceptance_length"),
        ({"synthetic_acceptance_length": "two"}, "synthetic_acceptance_length"),
        ({"synthetic_acceptance_length": True}, "synthetic_acceptance_length"),
    ],
)
def test_synthetic_settings_that_make_no_sense_are_refused(given: dict[str, Any], param: str) -> None:
    assert refused(SYNTHETIC | given).param == param


@pytest.mark.parametrize(
    "given", [{"synthetic_acceptance_rates": [0.5, 0.5, 0.5]}, {"synthetic_acceptance_length": 2.0}]
)
def test_synthetic_settings_without_the_method_are_refused(given: dict[str, Any]) -> None:
    assert refused(LEAST | given).param == "rejection_sample_method"


# ---- the engine's settings ----


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "float16", "auto, bfloat16, float32"),
        ("device", "", "cuda"),
        ("device", 0, "cuda"),
        ("max_model_len", 0, "at least 1"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", 1.0, "integer"),
        ("max_num_batched_tokens", True, "integer"),
        ("max_num_batched_tokens", 31, "max_num_seqs"),
        ("block_size", 0, "at least 1"),
        ("block_size", 8, "multiple of 16"),
        ("block_size", 24, "multiple of 16"),
        ("kv_cache_tokens", -1, "at least 1"),
        ("enable_prefix_caching", "yes", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("num_threads", 0, "at least 1"),
    ],
)
def test_a_wrong_engine_setting_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        EngineConfig(**{key: value})
    assert caught.value.param == key


def test_every_setting_has_help() -> None:
    for item in fields(EngineConfig):
        assert item.metadata["help"]
    for item in fields(SpeculativeConfig):
        assert item.metadata["help"]


def test_overrides_are_read_as_json_or_text() -> None:
    overrides = [
        "engine.max_num_seqs=4",
        "engine.dtype=float32",
        "engine.enable_prefix_caching=false",
        "engine.kv_cache_tokens=null",
        " engine.device =cpu",
    ]
    config = apply_overrides(EngineConfig(kv_cache_tokens=64), overrides)
    expected = EngineConfig(max_num_seqs=4, dtype="float32", enable_prefix_caching=False, device="cpu")
    assert config == expected
    assert apply_overrides(expected, []) == expected
    assert apply_overrides(expected, ["engine.max_num_seqs=4", "engine.max_num_seqs=5"]).max_num_seqs == 5


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("engine.max_num_seq=4", "engine.max_num_seqs"),
        ("engine.max_num_seqs", "engine.max_num_seqs"),
        ("max_num_seqs=4", "engine.max_num_seqs"),
        ("server.port=4", "expected engine.NAME=VALUE"),
        ("=4", "expected engine.NAME=VALUE"),
        ("", "expected engine.NAME=VALUE"),
        ("engine.max_num_seqs=four", "integer"),
        ("engine.max_num_seqs=NaN", "integer"),
        ("engine.block_size=20", "multiple of 16"),
    ],
)
def test_a_wrong_override_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        apply_overrides(EngineConfig(), [text])


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_folder() == tmp_path / "shared" / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "outrider"
