"""What inspecting says of targets, drafters and anything else, without reading a weight or running code."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.inspect import inspect
from outrider.errors import LoadError
from outrider.models.families import load_model
from tests.kit import block_checkpoints, eagle3, gemma, gemma4_mtp, tiny
from tests.kit.mtp import VARIANTS as MODULES
from tests.kit.zoo import install, profile, put_profile

DRAFTERS: dict[str, Callable[[], Any]] = {f"eagle3 {name}": make for name, make in eagle3.VARIANTS.items()}
DRAFTERS |= block_checkpoints.VARIANTS
DRAFTERS |= {f"gemma4_mtp {name}": make for name, make in gemma4_mtp.VARIANTS.items()}


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


def refused(name: str | Path) -> str:
    with pytest.raises(LoadError) as caught:
        inspect(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- drafters ----


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_told_by_its_marks(name: str, tmp_path: Path) -> None:
    made = DRAFTERS[name]()
    made.save(tmp_path / "eagle3-dflash")
    found = inspect(str(tmp_path / "eagle3-dflash"))
    method = "dflash" if name == "dspark no markov" else name.split()[0]
    assert (found["kind"], found["method"], found["runs_on"], found["why_not"]) == ("drafter", method, "own code", None)
    assert found["num_bytes"] == sum(t.numel() * t.element_size() for t in made.tensors.values())
    assert found["num_parameters"] == sum(t.numel() for t in made.tensors.values() if t.is_floating_point())
    assert found["target"]["vocab_size"] == tiny.VOCAB and found["target"]["hidden_size"] == tiny.WIDTH
    assert found["unknown_keys"] == [] and not found["remote_code"] and found["quantisation"] is None
    if hasattr(made.meaning, "taps") and name != "eagle3 last state":
        # A file that lists none leaves the taps to the target's depth.
        assert found["taps"] in (None, list(made.meaning.taps)) or sorted(found["taps"]) == list(made.meaning.taps)


@pytest.mark.parametrize("name", ["eagle3 flat", "dflash zlab", "dflash speculators", "dspark deepspec"])
def test_what_is_said_to_run_it_runs_it(name: str, tmp_path: Path) -> None:
    DRAFTERS[name]().save(tmp_path)
    layers = eagle3.TARGET if name.startswith("eagle3") else block_checkpoints.TARGET
    model = tiny.tiny_model(5, **layers)
    (config,) = inspect(str(tmp_path))["speculative_configs"]
    engine = tiny.make_engine(model, speculative=registry.resolve(SpeculativeConfig.parse(config), model))
    tiny.run(engine, [tiny.make_request("r", tiny.random_prompt(0, 9), max_tokens=8)])
    assert engine.stats.speculation.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "dflash zlab",
            {"format": "z-lab", "block_size": 16, "mask_token_id": block_checkpoints.MASK, "taps": [1, 2, 4]},
        ),
        ("dflash deepspec", {"format": "DeepSpec", "layout": ["anchor layout: every row drafts"]}),
        ("dspark specforge", {"format": "SpecForge", "num_speculative_tokens": 7}),
        ("dspark speculators", {"format": "Speculators", "draft_vocab_size": block_checkpoints.REDUCED}),
        ("eagle3 flat", {"format": "EAGLE", "layout": ["first layer named midlayer"], "num_layers": 1}),
        ("eagle3 3.1", {"format": "Speculators", "layout": ["EAGLE-3.1 (fc_norm, norm_output)"]}),
        ("gemma4_mtp centroids", {"format": "Gemma 4 assistant"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_drafters_facts(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    DRAFTERS[name]().save(tmp_path)
    found = inspect(str(tmp_path))
    assert {key: found[key] for key in expected} == expected


def test_n_and_the_target_come_from_the_profile_and_from_the_file(tmp_path: Path) -> None:
    made = block_checkpoints.speculators(0, "dspark")
    made.config["speculators_config"] = {
        "proposal_methods": [{"speculative_tokens": 4}],
        "verifier": {"name_or_path": "some/target"},
    }
    made.save(tmp_path)
    found = inspect(str(tmp_path))
    assert found["num_speculative_tokens"] == 4 and found["target"]["name"] == "some/target"
    put_profile(tmp_path, profile("aa", num_tokens=6))
    found = inspect(str(tmp_path))
    assert found["num_speculative_tokens"] == 6 and found["target"]["name"] == "tiny"
    assert found["speculative_configs"][0]["num_speculative_tokens"] == 6


def test_an_installed_drafter_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = install(tmp_path) / "tiny" / "dspark"
    block_checkpoints.VARIANTS["dspark deepspec"]().save(folder)
    put_profile(folder, profile("aa"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert inspect("tiny/dspark") == inspect(str(folder.resolve()))


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    made = eagle3.VARIANTS["speculators"]()
    made.config["speculators_model_type"] = "peagle"
    made.save(tmp_path / "peagle")
    found = inspect(str(tmp_path / "peagle"))
    assert found["method"] == "eagle3" and "P-EAGLE" in found["why_not"] and found["speculative_configs"] == []
    block_checkpoints.VARIANTS["dflash zlab"]().save(tmp_path / "block")
    found = inspect(str(edited(tmp_path / "block", architectures=["DFlash2DraftModel"])))
    assert found["method"] == "dflash2" and "no method dflash2" in found["why_not"]
    (tmp_path / "block" / "mask_embedding.pt").touch()
    assert "pickle" in inspect(str(edited(tmp_path / "block", architectures=["DFlashDraftModel"])))["why_not"]


def test_an_unknown_key_is_named_with_what_it_may_change(tmp_path: Path) -> None:
    block_checkpoints.VARIANTS["dflash zlab"]().save(tmp_path)
    found = inspect(str(edited(tmp_path, output_multiplier=2.0, new_switch=False, auto_map={"AutoModel": "x.py"})))
    assert found["remote_code"] and found["unknown_keys"] == [
        {"key": "output_multiplier", "value": 2.0, "may_change": "the drafts"},
        {"key": "new_switch", "value": False, "may_change": None},
    ]


# ---- targets ----


def test_a_targets_facts(tmp_path: Path) -> None:
    found = inspect(str(tiny.save_tiny(tmp_path)))
    size = (tmp_path / "model.safetensors").stat().st_size
    parameters = found.pop("num_parameters")
    assert found.pop("num_bytes") == 4 * parameters and size > 4 * parameters
    assert found == {
        "path": str(tmp_path),
        "kind": "target",
        "family": "llama",
        "runs_on": "own code",
        "why_not": None,
        "num_layers": 2,
        "hidden_size": tiny.WIDTH,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "vocab_size": tiny.VOCAB,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "num_recurrent_layers": 0,
        "num_experts": None,
        "mtp_module": None,
        "dtypes": ["F32"],
        "quantisation": None,
        "remote_code": False,
        "unknown_keys": [],
        "speculative_configs": [{"method": "ngram", "num_speculative_tokens": 4}],
    }


@pytest.mark.parametrize("name", ["mimo", "qwen", "mimo of two"])
def test_a_module_inside_is_said_and_a_module_apart_is_a_drafter(name: str, tmp_path: Path) -> None:
    made = MODULES[name]()
    inside = inspect(str(made.save(tmp_path / "inside")))
    depth = 2 if name == "mimo of two" else 1
    parameters = sum(tensor.numel() for tensor in made.module.values())
    assert inside["kind"] == "target" and inside["runs_on"] == "own code"
    assert inside["mtp_module"] == {"num_modules": depth, "num_parameters": parameters}
    assert inside["speculative_configs"][0] == {"method": "mtp", "num_speculative_tokens": depth}
    apart = inspect(str(made.save_delta(tmp_path / "apart")))
    assert (apart["kind"], apart["method"]) == ("drafter", "mtp")
    assert apart["num_layers"] == depth and apart["target"]["num_layers"] == 3
    assert [("MiMo" in part) for part in apart["layout"]] == [name != "qwen"]


def test_a_gemma_runs_on_own_code_and_says_its_window(tmp_path: Path) -> None:
    for name, family in (("gemma3", "gemma3_text"), ("gemma4", "gemma4_text")):
        found = inspect(str(gemma.save_gemma(tmp_path / name, name)))
        assert (found["family"], found["runs_on"], found["sliding_window"]) == (family, "own code", 20)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_a_recurrent_target_runs_on_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = transformers.CONFIG_MAPPING[name]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    found = inspect(str(tmp_path))
    assert (found["kind"], found["family"], found["runs_on"]) == ("target", name, "transformers")
    assert found["num_recurrent_layers"] > found["num_layers"] // 2 and found["num_experts"] > 1
    assert found["hidden_size"] and found["unknown_keys"] == []


def test_a_target_that_is_not_whole_says_what_is_wrong(tmp_path: Path) -> None:
    folder = tiny.save_tiny(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    found = inspect(str(folder))
    assert found["runs_on"] == "nothing" and "model.norm.weight is [3], expected [64]" in found["why_not"]
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert inspect(str(folder))["why_not"] == "it lacks model.norm.weight"
    found = inspect(str(edited(folder, hidden_act="gelu")))
    assert found["why_not"] == "hidden_act is 'gelu', expected silu" and found["speculative_configs"] == []


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_quantised_weights_are_named_by_their_scheme(kind: str, tmp_path: Path) -> None:
    if kind == "target":
        tiny.save_tiny(tmp_path)
    else:
        eagle3.VARIANTS["flat"]().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = next(name for name in tensors if name.endswith("o_proj.weight"))
    save_file({**tensors, first: tensors[first].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    found = inspect(str(tmp_path))
    assert (
        found["quantisation"]
        == f"not stated, {first.removeprefix('model.') if kind == 'drafter' else first} is F8_E4M3"
    )
    assert found["runs_on"] == "nothing"
    table = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    found = inspect(str(edited(tmp_path, quantization_config=table)))
    assert found["quantisation"] == "compressed-tensors, float-quantized"
    assert found["why_not"] == "its weights are quantised (compressed-tensors, float-quantized)"


# ---- anything else ----


def test_code_that_a_checkpoint_brings_is_never_run(tmp_path: Path) -> None:
    folder = edited(tiny.save_tiny(tmp_path), model_type="own_family", auto_map={"AutoModelForCausalLM": "code.Model"})
    (folder / "code.py").write_text("raise SystemExit('run')", encoding="utf-8")
    for look in (inspect, lambda name: load_model(name, dtype=torch.float32, device=torch.device("cpu"))):
        with pytest.raises(LoadError, match="never run") as caught:
            look(str(folder))
        assert "own_family" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_no_known_kind_is_one_line(tmp_path: Path) -> None:
    folder = edited(tiny.save_tiny(tmp_path / "model"), model_type="no_such_family")
    assert "neither a drafter nor a model that is known here: model_type 'no_such_family'" in refused(folder)
    (tmp_path / "empty").mkdir()
    assert "it has no config.json" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}", encoding="utf-8")
    assert "has neither model.safetensors nor" in refused(tmp_path / "empty")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    assert "no model" in refused(tmp_path / "missing")
    folder = tiny.save_tiny(tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    for kept in (3, 100, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:kept])
        assert str(folder / "model.safetensors") in refused(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert inspect(str(folder))["why_not"] == "it lacks model.embed_tokens.weight"
    for text in ("{not json", "[]", ""):
        (folder / "config.json").write_text(text, encoding="utf-8")
        assert str(folder / "config.json") in refused(folder)


def test_no_weight_is_read(tmp_path: Path) -> None:
    """A folder whose weights are a hole in a file says the same."""
    folder = tiny.save_tiny(tmp_path / "model")
    found, path = inspect(str(folder)), folder / "model.safetensors"
    size, header = path.stat().st_size, 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    with path.open("r+b") as opened:
        opened.truncate(header)
        opened.truncate(size)
    assert inspect(str(folder)) == found
    shutil.rmtree(folder)
