"""Which checkpoints go to transformers, how a larger model's text part is found, and what is refused in one line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import LoadError
from outrider.models import hf_attention
from outrider.models.families import load_model
from outrider.models.gemma import GemmaModel
from outrider.models.hf import HfModel
from outrider.models.llama import LlamaModel
from tests.kit import hf, tiny
from tests.kit.hf import Reading

TEXT = tiny.random_prompt(1, 40)
LARGER = {
    "gemma3": ("gemma3", "language_model.model.", "language_model."),
    "gemma4, experts": ("gemma4", "model.language_model.", ""),
    "qwen3_5": ("qwen3_5", "model.language_model.", ""),
    "qwen3_5_moe": ("qwen3_5_moe", "model.language_model.", ""),
    "deepseek_v3": ("kimi_k25", "language_model.model.", "language_model."),
    "minimax_m3": ("minimax_m3_vl", "language_model.model.", "language_model."),
}


def load(folder: Path) -> Any:
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


@pytest.mark.parametrize("name", LARGER)
def test_the_text_part_of_a_larger_model_is_the_same(name: str, tmp_path: Path) -> None:
    family, prefix, head = LARGER[name]
    made = hf.make(name, tmp_path)
    expected = Reading(made.model).read({0: (0, TEXT)}).logits
    outer = {"model_type": family, "eos_token_id": [1, 5], "tie_word_embeddings": name.startswith("gemma")}
    large = hf.load(hf.wrap(tmp_path, prefix, head, outer))
    assert torch.allclose(Reading(large).read({0: (0, TEXT)}).logits, expected, atol=1e-5)
    assert (large.config.model_type, large.config.eos_token_ids) == (family, (1, 5))


def test_kimi_k2_is_read_as_published(tmp_path: Path) -> None:
    """It names code of its own for what transformers knows under another name; that code is not looked at."""
    made = hf.make("deepseek_v3", tmp_path)
    edit(tmp_path, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"})
    (tmp_path / "modeling_deepseek.py").write_text("raise SystemExit('remote code ran')")
    logits = Reading(load(tmp_path)).read({0: (0, TEXT)}).logits
    assert torch.equal(logits, Reading(made.model).read({0: (0, TEXT)}).logits)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3", LlamaModel), ("gemma3", GemmaModel), ("gemma4, experts", HfModel), ("phi", HfModel)]
)
def test_who_runs_a_family(name: str, kind: type, tmp_path: Path) -> None:
    made = hf.make(name, tmp_path)
    ours = load(tmp_path)
    assert type(ours) is kind
    near = Reading(made.model).read({0: (0, TEXT)}).logits
    assert torch.allclose(Reading(ours).read({0: (0, TEXT)}).logits, near, atol=1e-4)


def test_a_drafters_module_beside_the_target_is_left_alone(tmp_path: Path) -> None:
    made = hf.make("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {name.replace("layers.3.", "layers.4."): t.clone() for name, t in tensors.items() if "layers.3." in name}
    save_file({name: t.clone() for name, t in tensors.items()} | extra, tmp_path / "model.safetensors")
    logits = Reading(load(tmp_path)).read({0: (0, TEXT)}).logits
    assert torch.equal(logits, Reading(made.model).read({0: (0, TEXT)}).logits)


def test_an_output_matrix_that_the_file_has_is_used(tmp_path: Path) -> None:
    made = hf.make("qwen3_moe", tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    assert torch.equal(
        Reading(load(tmp_path)).read({0: (0, TEXT)}).logits, Reading(made.model).read({0: (0, TEXT)}).logits
    )


# ---- what is refused ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.save(hf.reference("qwen3_moe"), "qwen3_moe", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "quux"}, "model_type 'quux' is not known"),
        ({"model_type": None}, "model_type None is not known"),
        ({"model_type": "quux", "auto_map": {"AutoConfig": "a.B"}}, "trust_remote_code is off"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantised (fp8, e4m3)"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "pack-quantized"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quantised (awq)"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 32}, "expected"),
        ({"num_hidden_layers": 5}, "lacks"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(changes: dict[str, Any], what: str, folder: Path) -> None:
    edit(folder, **changes)
    assert what in refusal(folder)


@pytest.mark.parametrize(
    "tensor", ["model.norm.weight", "lm_head.weight", "model.layers.2.mlp.experts.3.up_proj.weight"]
)
def test_tensors_that_are_missing_or_broken_are_named(tensor: str, folder: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    whole = tensors.pop(tensor)
    save_file(tensors, folder / "model.safetensors")
    refusal(folder)
    whole.view(-1)[-1] = float("nan")
    save_file(tensors | {tensor: whole}, folder / "model.safetensors")
    assert "NaN or infinity" in refusal(folder)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"weight": torch.float8_e4m3fn}, "weight is F8_E4M3"),
        ({"weight": torch.int8}, "weight is I8"),
        ({"qweight": torch.int32}, "qweight is I32"),
        ({"weight": torch.bfloat16, "weight_scale_inv": torch.float32}, "weight_scale_inv is F32"),
    ],
)
def test_quantised_tensors_that_no_file_speaks_of_are_named(
    stored: dict[str, torch.dtype], said: str, folder: Path
) -> None:
    """None of them may be taken for a weight and widened."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    part = "model.layers.2.self_attn.q_proj."
    shape = tensors.pop(part + "weight").shape
    tensors |= {part + name: torch.zeros(shape, dtype=dtype) for name, dtype in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    assert f"quantised (not stated, {part}{said})" in refusal(folder)


def test_without_transformers_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("transformers"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    assert "pip install outrider[hf]" in refusal(folder)


@pytest.mark.parametrize("option", [{"position_bias": torch.zeros(1)}, {"indices": torch.zeros(1)}])
def test_attention_that_is_not_implemented_is_refused(option: dict[str, Any]) -> None:
    states = torch.zeros(1, 1, 1, 4)
    with pytest.raises(LoadError, match=next(iter(option))):
        hf_attention.attention(torch.nn.Identity(), states, states, states, None, scaling=1.0, **option)
    with pytest.raises(LoadError, match="mask"):
        hf_attention.attention(torch.nn.Identity(), states, states, states, states, scaling=1.0)


@pytest.mark.parametrize("family", ["llama4_text", "bloom", "rwkv", "falcon_h1", "deepseek_v32"])
def test_a_family_that_keeps_what_we_cannot_page_is_refused(family: str, tmp_path: Path) -> None:
    """Weights of the family itself, so that nothing but its ways is at fault."""
    transformers = importlib.import_module("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 32}
    config = transformers.CONFIG_MAPPING[family].from_dict(small | {"model_type": family} | TINY.get(family, {}))
    with hf.quiet():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refusal(tmp_path)


TINY: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 2, "n_layer": 2},
    "llama4_text": {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "head_dim": 16},
    "rwkv": {"attention_hidden_size": 32},
    "falcon_h1": {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_d_ssm": 32, "mamba_n_heads": 2},
    "deepseek_v32": {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1},
}
