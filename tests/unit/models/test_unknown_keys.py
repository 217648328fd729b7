"""Keys of targets that transformers runs: whatever published files say is known, what nobody reads is named."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models import unknown_keys as module
from outrider.models.families import load_model
from outrider.models.unknown_keys import target_keys, unknown_keys
from tests.kit import hf

# What published files of a family have beside the keys of the tiny configs.
_DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "norm_topk_prob": True}
_DEEPSEEK |= {"ep_size": 1, "num_nextn_predict_layers": 1, "aux_loss_alpha": 0.001, "seq_aux": True}
_QWEN = {"full_attention_interval": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN |= {"use_sliding_window": False, "router_aux_loss_coef": 0.001}
_DELTA = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {"num_nextn_predict_layers": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    "minimax_m2": {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
    "minimax_m3": {"num_mtp_modules": 1, "swiglu_alpha": 1.7, "swiglu_limit": 7.0, "routed_scaling_factor": 2.0},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
    "qwen3_next": _QWEN | {"num_nextn_predict_layers": 1},
    "qwen3_5": _DELTA | {"full_attention_interval": 4},
    "qwen3_5_moe": _DELTA | {"full_attention_interval": 4},
}
OUTER = {"deepseek_v3": "kimi_k25", "minimax_m3": "minimax_m3_vl", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}


def unknown(raw: Mapping[str, Any]) -> list[str]:
    known = target_keys(raw)
    assert known, "nothing is known of this family"
    return [key.key for key in unknown_keys(raw, known) if not key.is_off]


@pytest.mark.parametrize("name", hf.CONFIGS)
def test_what_published_files_say_is_known(name: str) -> None:
    raw = hf.CONFIGS[name] | PUBLISHED.get(name, {})
    assert unknown(raw) == []
    if name in OUTER:
        assert unknown({"model_type": OUTER[name], "text_config": raw, "vision_config": {"depth": 1}}) == []
    if name == "deepseek_v3":
        assert unknown(raw | {"model_type": "kimi_k2"}) == []


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("qwen3_5", "attn_output_gate", "headwise"),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("glm4_moe", "scoring_func", "sigmoid"),
        ("qwen3_moe", "residual_multiplier", 0.5),
    ],
)
def test_a_value_that_the_code_does_not_have_is_named(name: str, key: str, value: Any) -> None:
    raw = hf.CONFIGS[name] | PUBLISHED[name] | {key: value}
    assert unknown(raw) == [key]


def test_loading_names_the_key_and_what_it_may_change(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.WARNING)
    hf.save(hf.reference("glm4_moe"), "glm4_moe", tmp_path)
    load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert [record for record in caplog.records if str(tmp_path) in record.getMessage()] == []
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"logit_gain": 3.0, ', 1), encoding="utf-8")
    load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    (line,) = [record.getMessage() for record in caplog.records if str(tmp_path) in record.getMessage()]
    assert line.endswith("config.json has logit_gain = 3.0, not known here: its text may be another than intended")


def test_without_transformers_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    module._class_keys.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    assert target_keys(hf.CONFIGS["glm4_moe"]) == frozenset()
    module._class_keys.cache_clear()
