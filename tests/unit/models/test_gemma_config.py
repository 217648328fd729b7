"""What a Gemma's config.json means where it leaves something out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import LoadError
from outrider.models.arch import RopeScaling
from outrider.models.gemma_config import GemmaConfig, gemma_shapes, parse_gemma
from tests.kit.gemma import FULL, SLIDING, VARIANTS


def parse(name: str, **changes: Any) -> GemmaConfig:
    return parse_gemma(VARIANTS[name] | changes, {}, source="config.json")


def test_a_nearly_empty_gemma_3_is_the_published_4b() -> None:
    """As its repository has it: a larger model's config, whose text part names only what is not the default."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}  # type: ignore[assignment]
    raw = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    config = parse_gemma(raw, {}, source="config.json")
    assert (config.vocab_size, config.num_layers, config.num_heads) == (262_208, 34, 8)
    assert (config.eos_token_ids, config.attention_scale, config.norm_offset) == ((1, 106), 1 / 16, 1.0)
    kinds = [layer.kind for layer in config.layers]
    assert [index for index, kind in enumerate(kinds) if kind == FULL] == [5, 11, 17, 23, 29]
    sliding, full = config.layers[0], config.layers[5]
    assert (sliding.window, sliding.rope_theta, sliding.rope_scaling) == (1024, 10_000.0, None)
    assert (full.window, full.rope_theta) == (None, 1_000_000.0)
    assert full.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (full.head_dim, full.num_kv_heads) == (256, 4)


def test_gemma_4_defaults_are_those_of_the_published_files() -> None:
    config = parse_gemma({"model_type": "gemma4_text", "num_hidden_layers": 8}, {}, source="config.json")
    assert [layer.kind for layer in config.layers] == [SLIDING] * 5 + [FULL, SLIDING, FULL]
    full = config.layers[5]
    assert full.rope_scaling == RopeScaling(kind="proportional", factor=1.0, rotated=0.25)
    assert (full.head_dim, config.layers[0].head_dim, config.layers[0].window) == (512, 256, 512)
    assert (config.per_layer_size, config.per_layer_vocab_size, config.attention_scale) == (256, 262_144, 1.0)
    assert "model.layers.0.layer_scalar" in gemma_shapes(config)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma3", {"attention_bias": True}, "attention_bias is true"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block is true"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
        ("gemma3", {"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ("gemma3", {"layer_types": [SLIDING]}, "expected 6 entries"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 6}, "expected 6 entries"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "of type 'yarn'"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ("gemma3", {"num_key_value_heads": 3}, "divisor of num_attention_heads 4"),
        ("gemma3", {"head_dim": 31}, "even number"),
        ("gemma4", {"num_kv_shared_layers": 4}, f"leaves no {FULL} layer"),
        ("gemma4", {"per_layer_config": {"2": {"intermediate_size": 5}}}, "per_layer_config of layer 2"),
        ("gemma4", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_the_forward_cannot_honour_is_refused(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named) as caught:
        parse(name, **changes)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)
