"""Prediction modules of the families that transformers runs, against a recomputation of every round from nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.errors import DrafterMismatch, OutriderError
from outrider.types import Request
from tests.kit import hf, hf_mtp, scripted, threads, tiny
from tests.kit.hf_mtp import MEANINGS, Made
from tests.kit.overheard import Overheard, Round, overheard, rounds_of, spoil_unused


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", params=MEANINGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return hf_mtp.make(request.param, tmp_path_factory.mktemp("mtp"))


def compare(made: Made, rounds: Sequence[Round]) -> None:
    for item in rounds:
        logits = made.logits(item.history, item.chain)
        chosen = logits.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - 1e-3).all()), item.history


def requests_of(*lengths: int) -> list[Request]:
    return [tiny.make_request(f"{n}", tiny.random_prompt(n, n), seed=n, max_tokens=9) for n in lengths]


def test_drafts_equal_their_recomputation(made: Made) -> None:
    """Little memory: requests are preempted; some steps do not draft."""
    model, requests = made.load(), requests_of(14, 30, 46)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=1)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 2, 0], [3, 8, 3]]}
    engine = overheard(model, {"method": "mtp"} | schedule, script, kv_cache_tokens=96)
    rounds = rounds_of(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert {len(item.chain) for item in rounds} >= {3, 4}
    compare(made, rounds)


def test_the_recomputation_would_see_another_meaning(made: Made) -> None:
    model, requests = made.load(), requests_of(1, 40)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=8)
    settings = {"method": "mtp", "num_speculative_tokens": 3}
    rounds = rounds_of(overheard(model, settings, script, max_num_batched_tokens=16), requests)
    compare(made, rounds)
    meaning = made.meaning
    other = "before" if meaning.hands_on == "normed" else "normed"
    for change in ({"blind_start": not meaning.blind_start}, {"hands_on": other}, {"one_more": 1 - meaning.one_more}):
        with pytest.raises(AssertionError):
            compare(replace(made, meaning=replace(meaning, **change)), rounds)


@pytest.mark.parametrize(("name", "modules"), [("deepseek_v3", 3), ("glm4_moe", 2), ("minimax_m3", 2), ("qwen3_5", 2)])
def test_several_modules_draft_in_turn(name: str, modules: int, tmp_path: Path) -> None:
    """Also where the first comes round again; requests of one block share a prefix."""
    made = hf_mtp.make(name, tmp_path, modules=modules)
    model, requests = made.load(), requests_of(1, 30, 46)
    requests.append(tiny.make_request("same", [*requests[1].prompt_ids, 7], seed=3, max_tokens=9))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.6, seed=1)
    settings = {"method": "mtp", "num_speculative_tokens": 2 * modules}
    rounds = rounds_of(overheard(model, settings, script, max_num_batched_tokens=16), requests)
    assert len(rounds) > 8
    compare(made, rounds)
    with pytest.raises(AssertionError):
        compare(replace(made, donors=made.donors[::-1]), rounds)


def test_every_length(made: Made) -> None:
    """N = 1 to 8, verified by a script and by the module itself: drafts as recomputed, the text the target's own."""
    model, requests = made.load(), requests_of(1, 17, 34)
    expected = tiny.tokens_of(tiny.make_engine(model), requests)
    script = scripted.Mixed(scripted.Truth(model, requests, num_extra=8), 0.7, seed=4)
    for num_tokens in range(1, 9):
        settings = {"method": "mtp", "num_speculative_tokens": num_tokens}
        engine = overheard(model, settings, script)
        results = tiny.run(engine, requests, each_step=spoil_unused)
        assert {name: result.tokens for name, result in results.items()} == expected
        counters = engine.stats.speculation
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert isinstance(engine.drafter, Overheard)
        compare(made, engine.drafter.rounds[:: 1 + num_tokens // 2])
        engine = tiny.make_engine(model, speculative=settings)
        assert tiny.tokens_of(engine, requests) == expected
        assert engine.stats.speculation.num_draft_tokens > 0


def test_n_is_what_the_checkpoint_says(made: Made) -> None:
    found = registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), made.load())
    assert (found.num_speculative_tokens, found.model) == (1, str(made.folder))


@pytest.mark.parametrize("name", ["qwen3_5", "minimax_m3"])
def test_a_module_inside_a_larger_model_is_found(name: str, tmp_path: Path) -> None:
    made = hf_mtp.make(name, tmp_path)
    inside = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    mtp = {n: inside.pop(n) for n in list(inside) if n.startswith("mtp.")}
    save_file(inside, tmp_path / "model.safetensors")
    family, prefix = {
        "qwen3_5": ("qwen3_5", "model.language_model."),
        "minimax_m3": ("minimax_m3_vl", "language_model.model."),
    }[name]
    hf.wrap(tmp_path, prefix, "language_model." * (name == "minimax_m3"), {"model_type": family})
    whole = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(whole | mtp, tmp_path / "model.safetensors")
    model, requests = made.load(), requests_of(5, 12)
    found = registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), model)
    assert found.num_speculative_tokens == 1
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=8)
    compare(made, rounds_of(overheard(model, {"method": "mtp"}, script), requests))


# ---- what is refused ----


def refusal(made: Made, kind: type[OutriderError] = OutriderError) -> str:
    with pytest.raises(kind) as caught:
        tiny.make_engine(made.load(), speculative={"method": "mtp", "num_speculative_tokens": 2})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_target_without_a_module_is_refused(tmp_path: Path) -> None:
    """Also where config.json counts one that the file does not have."""
    folder = hf.save(hf.reference("glm4_moe"), "glm4_moe", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    for count in ({}, {"num_nextn_predict_layers": 1}):
        (folder / "config.json").write_text(json.dumps(raw | count), encoding="utf-8")
        with pytest.raises(DrafterMismatch, match=f"target {folder} has no multi-token prediction module") as caught:
            registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), hf.load(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3", "minimax_m3"])
def test_a_module_that_is_not_whole_is_refused(name: str, tmp_path: Path) -> None:
    made = hf_mtp.make(name, tmp_path)
    whole = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    meaning = made.meaning
    for part in (meaning.own + meaning.state_norm + ".weight", meaning.layer + "self_attn.o_proj.weight"):
        save_file({n: t for n, t in whole.items() if n != part}, tmp_path / "model.safetensors")
        assert part.removeprefix(meaning.layer).removeprefix("model.") in refusal(made)
    for part in (meaning.own + meaning.fusion + ".weight", meaning.layer + "input_layernorm.weight"):
        save_file(whole | {part: torch.zeros(3)}, tmp_path / "model.safetensors")
        refusal(made)
        broken = whole[part].clone()
        broken.view(-1)[0] = float("nan")
        save_file(whole | {part: broken}, tmp_path / "model.safetensors")
        assert "NaN" in refusal(made)


def test_a_module_of_another_family_is_refused(tmp_path: Path) -> None:
    other = hf_mtp.make("deepseek_v3", tmp_path / "other")
    model = tiny.tiny_model(num_layers=4)
    settings = {"method": "mtp", "num_speculative_tokens": 2, "model": str(other.folder)}
    with pytest.raises(DrafterMismatch, match="deepseek_v3"):
        tiny.make_engine(model, speculative=settings)
