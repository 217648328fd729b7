"""What config.json means, in both spellings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import LoadError
from outrider.models.arch import RopeScaling, expected_shapes, parse_config, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    return parse_config(raw, generation or {}, source="config.json")


def test_a_llama_config_is_read_with_its_defaults() -> None:
    config = parse()
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.rope_scaling) == (16, 2, 10000.0, None)
    assert (config.eos_token_ids, config.bos_token_id, config.sliding_window) == ((2,), 1, None)
    assert not (config.attention_bias or config.output_bias or config.qk_norm or config.tie_word_embeddings)
    assert parse(num_key_value_heads=...).num_kv_heads == 4


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4}, "dtype": "bfloat16"},
    ],
)
def test_old_and_new_spellings_mean_the_same(spelling: dict[str, Any]) -> None:
    config = parse(**spelling)
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(kind="linear", factor=4.0))
    assert config.dtype == "bfloat16"


def test_llama3_scaling_is_read_whole() -> None:
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | rule)
    assert config.rope_scaling == RopeScaling(kind="llama3", **rule)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="low_freq_factor"):
        parse(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_families_differ_in_biases_norms_and_windows() -> None:
    qwen2, qwen3 = parse(model_type="qwen2"), parse(model_type="qwen3", head_dim=32)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    assert parse(model_type="mistral", sliding_window=4096).sliding_window == 4096
    assert parse(model_type="mistral", sliding_window=None).sliding_window is None
    biased = parse(attention_bias=True)
    assert (biased.attention_bias, biased.output_bias) == (True, True)


def test_qwen_windows_count_only_where_they_are_switched_on() -> None:
    window: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 64}
    assert parse(**window).sliding_window is None
    assert parse(**window, use_sliding_window=False, max_window_layers=0).sliding_window is None
    assert parse(**window, use_sliding_window=True, max_window_layers=0).sliding_window == 64
    assert parse(**window, use_sliding_window=True, max_window_layers=2).sliding_window is None
    with pytest.raises(LoadError, match="only some layers"):
        parse(**window, use_sliding_window=True, max_window_layers=1)


def test_generation_config_wins_for_end_tokens() -> None:
    assert parse({"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert parse(eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'.*MambaForCausalLM.*llama, mistral"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn', expected one of default, linear, llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"eos_token_id": "</s>"}, "token id is '</s>'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_a_folder_is_read_and_its_faults_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="holds a list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert read_config(tmp_path).eos_token_ids == (9,)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_expected_tensors_are_those_of_transformers(family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    raw = {**LLAMA, "model_type": family, "tie_word_embeddings": tied, "head_dim": 16}
    theirs = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        shapes.pop("lm_head.weight")
    assert expected_shapes(parse_config(raw, {}, source="config.json")) == shapes
