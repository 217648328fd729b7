"""What a configuration leaves out is filled in by who knows it (checkpoint, profile, zoo), else asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.errors import ConfigError, DrafterMismatch, LoadError, OutriderError
from outrider.models.fingerprint import fingerprint
from outrider.models.llama import LlamaModel
from tests.kit import block, eagle3, tiny
from tests.kit.block_checkpoints import speculators
from tests.kit.zoo import install, profile, put_profile


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return tiny.tiny_model(cyclic=True)


def resolved(target: LlamaModel, **settings: Any) -> SpeculativeConfig:
    return registry.resolve(SpeculativeConfig.parse(settings), target)


def refused(target: LlamaModel, kind: type[OutriderError] = ConfigError, **settings: Any) -> OutriderError:
    with pytest.raises(kind) as caught:
        resolved(target, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


def restate(folder: Path, **changes: Any) -> Path:
    """Change keys of a folder's config.json; None takes the key away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}), encoding="utf-8")
    return folder


def test_what_is_complete_stays_as_it_is(target: LlamaModel) -> None:
    config = SpeculativeConfig.parse({"method": "dspark", "num_speculative_tokens": 3, "model": "no/such"})
    assert registry.resolve(config, target) is config


def test_a_record_without_method_and_model_is_refused(target: LlamaModel) -> None:
    with pytest.raises(ConfigError, match="method is missing"):
        registry.resolve(SpeculativeConfig(), target)


# ---- N ----


def test_dsparks_n_is_its_block(target: LlamaModel, tmp_path: Path) -> None:
    folder = block.save_block(tmp_path / "flat", markov=True)
    assert resolved(target, method="dspark", model=str(folder)).num_speculative_tokens == 4
    restate(folder, block_size=None, dspark_block_size=6)
    assert resolved(target, method="dspark", model=str(folder)).num_speculative_tokens == 6
    restate(folder, dspark_block_size=None, dflash_config={"block_size": 5})
    assert resolved(target, method="dspark", model=str(folder)).num_speculative_tokens == 5


def test_a_block_that_is_no_number_is_named(target: LlamaModel, tmp_path: Path) -> None:
    folder = restate(block.save_block(tmp_path, markov=True), block_size="all")
    assert "block_size is 'all'" in str(refused(target, LoadError, method="dspark", model=str(folder)))


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_speculators_file_states_n(method: str, target: LlamaModel, tmp_path: Path) -> None:
    speculators(3, method).save(tmp_path)
    restate(tmp_path, speculators_config={"proposal_methods": [{"speculative_tokens": 3}, {"speculative_tokens": 9}]})
    assert resolved(target, method=method, model=str(tmp_path)).num_speculative_tokens == 3
    restate(tmp_path, speculators_config={"proposal_methods": [{"speculative_tokens": 0}]})
    assert "speculative_tokens is 0" in str(refused(target, LoadError, method=method, model=str(tmp_path)))


@pytest.mark.parametrize("method", ["dspark", "eagle3", "draft_model"])
def test_a_profile_comes_before_all_else(method: str, target: LlamaModel, tmp_path: Path) -> None:
    save = {
        "dspark": lambda: block.save_block(tmp_path, markov=True),
        "eagle3": lambda: eagle3.save_eagle3(tmp_path),
        "draft_model": lambda: tiny.save_tiny(tmp_path),
    }
    save[method]()
    restate(tmp_path, speculators_config={"proposal_methods": [{"speculative_tokens": 3}]})
    put_profile(tmp_path, profile("aa", method, 2))
    assert resolved(target, method=method, model=str(tmp_path)).num_speculative_tokens == 2
    assert resolved(target, method=method, model=str(tmp_path), num_speculative_tokens=5).num_speculative_tokens == 5


def test_a_drafter_that_does_not_say_n_is_named(target: LlamaModel, tmp_path: Path) -> None:
    folders = {"eagle3": eagle3.save_eagle3(tmp_path / "e"), "draft_model": tiny.save_tiny(tmp_path / "m")}
    folders["dflash"] = block.save_block(tmp_path / "b", markov=False)
    for method, folder in folders.items():
        error = refused(target, method=method, model=str(folder))
        assert error.param == "num_speculative_tokens" and "missing" in str(error) and str(folder) in str(error)


def test_n_is_asked_for_before_anything_is_loaded_where_no_drafter_could_say_it() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing") as caught:
        registry.check(SpeculativeConfig.parse({"method": "ngram"}))
    assert caught.value.param == "num_speculative_tokens"


def test_n_that_was_found_is_held_against_the_rest(target: LlamaModel, tmp_path: Path) -> None:
    folder = block.save_block(tmp_path, markov=True)
    given = {"model": str(folder), "rejection_sample_method": "synthetic"}
    assert "has 2 entries" in str(refused(target, **given, synthetic_acceptance_rates=[0.5, 0.2]))
    assert "= 5" in str(refused(target, **given, synthetic_acceptance_length=5.5))
    assert resolved(target, **given, synthetic_acceptance_length=5).synthetic_rates == (1.0,) * 4


# ---- method ----


def test_the_method_is_what_the_checkpoint_is_for(target: LlamaModel, tmp_path: Path) -> None:
    folders = {
        "dspark": block.save_block(tmp_path / "eagle3", markov=True),
        "dflash": block.save_block(tmp_path / "dspark", markov=False),
        "eagle3": eagle3.save_eagle3(tmp_path / "dflash"),
        "draft_model": tiny.save_tiny(tmp_path / "eagle3-model"),
    }
    for method, folder in folders.items():
        assert resolved(target, model=str(folder), num_speculative_tokens=2).method == method


def test_a_setting_of_another_method_is_refused_once_the_method_is_known(target: LlamaModel, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tmp_path)
    error = refused(target, model=str(folder), num_speculative_tokens=2, dspark_draft_topk=4)
    assert error.param == "dspark_draft_topk"


@pytest.mark.parametrize("changes", [{"model_type": "mamba"}, {"model_type": "medusa"}])
def test_a_checkpoint_for_no_method_is_refused(changes: dict[str, str], target: LlamaModel, tmp_path: Path) -> None:
    folder = restate(tiny.save_tiny(tmp_path), **changes)
    error = refused(target, model=str(folder), num_speculative_tokens=2)
    assert error.param == "method" and str(folder) in str(error) and 'add "method"' in str(error)


# ---- the drafter ----


def test_the_zoos_drafter_for_this_target_is_taken(
    target: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = block.save_block(folder / "a" / "dspark", markov=True)
    put_profile(mine, profile(fingerprint(target), num_tokens=3))
    put_profile(folder / "b" / "dspark", profile(fingerprint(tiny.tiny_model(7)), num_tokens=9))
    found = resolved(target, method="dspark")
    assert (found.method, found.num_speculative_tokens, found.model) == ("dspark", 3, str(mine.resolve()))
    assert resolved(target, method="dspark", num_speculative_tokens=5).as_json() == {
        **found.as_json(),
        "num_speculative_tokens": 5,
    }
    other = resolved(target, method="dspark", model=str(block.save_block(tmp_path / "own", markov=True)))
    assert (other.model, other.num_speculative_tokens) == (str(tmp_path / "own"), 4)
    engine = tiny.make_engine(target, None, found)
    request = tiny.make_request("0", tiny.random_prompt(0, 9), max_tokens=24)
    assert tiny.tokens_of(engine, [request]) == tiny.tokens_of(tiny.make_engine(target), [request])
    assert engine.stats.speculation.num_draft_tokens > 0


def test_without_a_drafter_the_next_step_is_said(
    target: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = str(refused(target, DrafterMismatch, method="dspark"))
    assert '"model"' in message and "`outrider train dspark`" in message and "take method" not in message
    folder = install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for method in ("eagle3", "dflash"):
        put_profile(folder / "t" / method, profile(fingerprint(target), method))
    put_profile(folder / "u" / "dspark", profile("of another target"))
    error = refused(target, DrafterMismatch, method="dspark")
    assert error.param == "model" and "take method dflash, eagle3" in str(error)
