"""Tiny Gemma targets with random weights: what their config.json says, in every spelling that we read, and tensors.

Small enough for hundreds of runs, with windows shorter than the texts and, in all but one, heads that the C kernels
take. transformers reads the same config and tensors, so a key that we misread shows as other logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.attention import Batch, LayerCache
from outrider.models.gemma import GemmaModel
from outrider.models.gemma_config import GemmaConfig, gemma_shapes, parse_gemma
from tests.kit import tiny

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK = 16

_SHARED: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA3 = _SHARED | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 20}
_GEMMA4 = _SHARED | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 20,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3": _GEMMA3
    | {
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 5_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3, newer keys": _GEMMA3
    | {
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 7_000.0},
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 90_000.0},
        },
    },
    "gemma3, capped, untied, odd heads": _GEMMA3
    | {"head_dim": 24, "final_logit_softcapping": 6.0, "tie_word_embeddings": False, "rope_scaling": None},
    "gemma4": _GEMMA4 | {"final_logit_softcapping": 8.0},
    "gemma4, keys as values": _GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 9_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 70_000.0, "factor": 2.0},
        },
    },
    "gemma4, layer by layer": _GEMMA4
    | {
        "attention_k_eq_v": True,
        "per_layer_config": {str(index): {"head_dim": 96, "num_key_value_heads": 1} for index in (2, 5)},
    },
    "gemma4, small": _GEMMA4
    | {
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny.VOCAB,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
}


def config_of(name: str, **changes: Any) -> GemmaConfig:
    """A variant's config as we read it, with some keys changed."""
    return parse_gemma(VARIANTS[name] | changes, {}, source=name)


def tensors_of(config: GemmaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights, spread so that near-ties do not decide a test."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in gemma_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("layer_scalar"):
            tensors[name] = 0.9 + 0.1 * noise
        elif "norm" in name:
            tensors[name] = 1 - config.norm_offset + 0.2 * noise
        else:
            tensors[name] = noise * (0.4 if "embed" in name else shape[1] ** -0.5)
    return tensors


def gemma_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> GemmaModel:
    """A variant, ready to run."""
    config = config_of(name)
    tensors = {key: tensor.to(dtype) for key, tensor in tensors_of(config, seed).items()}
    return GemmaModel(config, tensors, max_len=config.max_position_embeddings)


def save_gemma(folder: Path, name: str, seed: int = 0, *, inside: str = "", cyclic: bool = False, **keys: Any) -> Path:
    """The same as a checkpoint folder, with some keys changed.

    `inside`: its tensors' prefix in a larger model; the keys are then the larger model's. `cyclic`: of an untied model,
    most tokens are followed by the next one of their group (tiny.followers).
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = keys | {"text_config": VARIANTS[name]} if inside else VARIANTS[name] | keys
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = parse_gemma(raw, {}, source=name)
    tensors = tensors_of(config, seed)
    if cyclic:
        tensors["lm_head.weight"][tiny.followers(config.vocab_size)] += 0.7 * tensors["model.embed_tokens.weight"]
    tensors = {_inside(key, inside): tensor for key, tensor in tensors.items()}
    if inside:
        tensors["vision_tower.patch.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _inside(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if prefix and name.startswith("model.") else name


class Reading:
    """Texts in one cache, each in blocks of its own; rows may come in any chunks, and again after a roll back."""

    def __init__(self, model: GemmaModel, num_texts: int = 1, max_len: int = 160) -> None:
        self.model = model
        per_text = -(-max_len // BLOCK)
        # Neighbouring blocks of a text are not neighbours in the cache.
        self._blocks = [list(range(text, num_texts * per_text, num_texts)) for text in range(num_texts)]
        self.cache: list[LayerCache] = model.new_cache(num_texts * per_text * BLOCK)
        for layer in self.cache:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))

    def read(self, chunks: Mapping[int, tuple[int, Sequence[int]]], taps: Sequence[int] = ()) -> Any:
        """One forward over chunks by text: (position of the first, ids); logits after every row, text by text."""
        ids = np.concatenate([np.array(part, dtype=np.int64) for _, part in chunks.values()])
        spans = [(first, len(part)) for first, part in chunks.values()]
        blocks = [self._blocks[text] for text in chunks]
        batch = Batch.pack(ids, spans, blocks, np.arange(len(ids)), BLOCK, self.model.device)
        return self.model(batch, self.cache, taps)
