"""Tiny GGUF files, written with the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16


def _vocabulary() -> tuple[list[str], list[int], list[str]]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *letters, "he", "ll", "hell", "hello", "Ġt", "<tool>"]
    kinds = [3, *[1] * (len(tokens) - 2), 4]
    return tokens, kinds, ["h e", "l l", "he ll", "hell o", "Ġ t"]


def _tensors(architecture: str, tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, WIDTH), "output_norm.weight": (WIDTH,)}
    for index in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (WIDTH,),
            "ffn_norm.weight": (WIDTH,),
            "attn_q.weight": (HEADS * HEAD_DIM, WIDTH),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * HEAD_DIM),
            "ffn_gate.weight": (INNER, WIDTH),
            "ffn_up.weight": (INNER, WIDTH),
            "ffn_down.weight": (WIDTH, INNER),
        }
        if architecture == "qwen2":
            layer |= {"attn_q.bias": (HEADS * HEAD_DIM,), "attn_k.bias": (KV_HEADS * HEAD_DIM,)}
            layer |= {"attn_v.bias": (KV_HEADS * HEAD_DIM,)}
        if architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Write a tiny model; `change` edits its tensors, `fields` adds or replaces strings and numbers."""

    def write(
        architecture: str = "llama",
        *,
        pre: str = "smollm",
        vocabulary: str = "gpt2",
        fields: dict[str, Any] | None = None,
        change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
        quantised: gguf.GGMLQuantizationType | None = None,
    ) -> tuple[Path, dict[str, np.ndarray]]:
        path = tmp_path / f"tiny-{architecture}.gguf"
        tokens, kinds, merges = _vocabulary()
        tensors = _tensors(architecture, len(tokens))
        change(tensors)
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_tokenizer_model(vocabulary)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
        for key, value in (fields or {}).items():
            adder = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            adder[type(value)](key, value)
        for name, values in tensors.items():
            if quantised is not None and values.ndim == 2 and ".ffn_" in name:
                packed = gguf.quantize(values, quantised)
                tensors[name] = gguf.dequantize(packed, quantised)
                writer.add_tensor(name, packed, raw_dtype=quantised)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, tensors

    return write
