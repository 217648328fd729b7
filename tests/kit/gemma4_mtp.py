"""Tiny Gemma 4 MTP drafters of random weights over Gemma and Llama targets, and what each of them means.

`Meaning` is written down by hand beside every variant: the reference that recomputes drafts reads it and never the
config, so that a misread key shows. `save_gemma4_mtp` makes one that is often right about the cyclic target.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.gemma import GemmaModel
from outrider.models.llama import LlamaModel
from tests.kit import tiny
from tests.kit.gemma import FULL, SLIDING, gemma_model

WIDTH, INNER, HEADS = 48, 80, 4
EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """One draft layer: the target layer that it reads, that layer's heads, its rotation and its window.

    `rotated`: share of the pairs that turn; `slower`: what their speed is divided by.
    """

    reads: int
    head_dim: int
    kv_heads: int
    theta: float
    rotated: float = 1.0
    slower: float = 1.0
    window: int | None = None


@dataclass(frozen=True)
class Meaning:
    """How a drafter computes. `top`: groups of tokens that are scored, None for all tokens at once."""

    layers: tuple[Layer, ...]
    cap: float | None = None
    suppressed: tuple[int, ...] = ()
    top: int | None = None


@dataclass
class Made:
    """One drafter: its files' contents, its meaning, and the target that it is for."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    meaning: Meaning
    target: Callable[[], LlamaModel | GemmaModel]
    generation: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """The drafter's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.generation:
            (folder / "generation_config.json").write_text(json.dumps(self.generation), encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder


def _layer(index: int, layer: Layer, generator: torch.Generator) -> dict[str, Tensor]:
    """Queries sharp: attention spread evenly would hide what it looks at."""

    def random(*shape: int, size: float = 1.0) -> Tensor:
        return size * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)

    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    tensors = {f"{name}_layernorm.weight": 1 + 0.3 * torch.randn(WIDTH, generator=generator) for name in norms}
    queries = HEADS * layer.head_dim
    tensors |= {
        "self_attn.q_proj.weight": random(queries, WIDTH),
        "self_attn.q_norm.weight": 1 + 0.3 * torch.randn(layer.head_dim, generator=generator),
        "self_attn.o_proj.weight": random(WIDTH, queries),
        "mlp.gate_proj.weight": random(INNER, WIDTH),
        "mlp.up_proj.weight": random(INNER, WIDTH),
        "mlp.down_proj.weight": random(WIDTH, INNER),
        "layer_scalar": 0.8 + 0.1 * torch.randn(1, generator=generator),
    }
    return {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}


def _tensors(layers: tuple[Layer, ...], seed: int) -> dict[str, Tensor]:
    """All but the output matrix."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        tensors |= _layer(index, layer, generator)
    tensors["model.norm.weight"] = 1 + 0.3 * torch.randn(WIDTH, generator=generator)
    tensors["pre_projection.weight"] = torch.randn(WIDTH, 2 * tiny.WIDTH, generator=generator) * 0.1
    tensors["post_projection.weight"] = torch.randn(tiny.WIDTH, WIDTH, generator=generator) * 0.3
    return tensors


def _config(kinds: list[str], text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    layers = {
        "model_type": "gemma4_text",
        "vocab_size": tiny.VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_kv_shared_layers": len(kinds),
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 20,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": tiny.WIDTH,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": layers | text,
    } | outer


def _table(seed: int, rows: int = tiny.VOCAB) -> Tensor:
    return 0.6 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def _dense() -> Made:
    sliding, full = Layer(4, 32, 2, 1e4, window=20), Layer(5, 64, 2, 1e6, rotated=0.25)
    layers = (sliding, sliding, full)
    config = _config([SLIDING, SLIDING, FULL], {"final_logit_softcapping": 3.0})
    tensors = _tensors(layers, 0) | {"model.embed_tokens.weight": _table(0)}
    return Made(config, tensors, Meaning(layers, cap=3.0), lambda: gemma_model("gemma4"))


def _keys_as_values() -> Made:
    """With rotation of its own, one key head in full layers, tokens that are never drafted, and the newer name."""
    sliding = Layer(4, 32, 2, 9_000.0, window=9)
    full = Layer(5, 64, 1, 70_000.0, rotated=0.5, slower=2.0)
    layers = (full, sliding, full)
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": 9_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 70_000.0, "factor": 2.0},
    }
    text = {
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 9,
        "rope_parameters": ropes,
    }
    config = _config([FULL, SLIDING, FULL], text, model_type="gemma4_unified_assistant")
    suppressed = (3, 4, 5, 40)
    tensors = _tensors(layers, 1) | {"model.embed_tokens.weight": _table(1)}
    return Made(
        config,
        tensors,
        Meaning(layers, suppressed=suppressed),
        lambda: gemma_model("gemma4, keys as values"),
        {"suppress_tokens": list(suppressed)},
    )


def _centroids() -> Made:
    """Over a target whose later layers share keys; the cap counts for nothing here."""
    sliding, full = Layer(1, 32, 2, 1e4, window=20), Layer(2, 64, 2, 1e6, rotated=0.25)
    layers = (sliding, full)
    outer = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
    config = _config([SLIDING, FULL], {"final_logit_softcapping": 2.0}, **outer)
    order = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(2))
    table = _table(2)
    tensors = _tensors(layers, 2) | {
        "model.embed_tokens.weight": table,
        "masked_embedding.centroids.weight": table[order].view(16, -1, WIDTH).mean(1),
        "masked_embedding.token_ordering": order,
    }
    return Made(config, tensors, Meaning(layers, top=3), lambda: gemma_model("gemma4, small"))


def _llama_target(**changes: Any) -> LlamaModel:
    return tiny.tiny_model(4, num_layers=3, num_heads=4, num_kv_heads=2, rope_theta=500.0, **changes)


_LLAMA_TEXT: dict[str, Any] = {
    "global_head_dim": 32,
    "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 500.0}},
}


def _llama() -> Made:
    """Another family's target, without a word about which layers are read."""
    layers = (Layer(2, 32, 2, 500.0),) * 2
    tensors = _tensors(layers, 3) | {"model.embed_tokens.weight": _table(3)}
    return Made(_config([FULL, FULL], _LLAMA_TEXT), tensors, Meaning(layers), _llama_target)


def _reduced() -> Made:
    """The same with layers named, and an output matrix for a part of the vocabulary."""
    layers = tuple(Layer(reads, 32, 2, 500.0) for reads in (2, 0, 1))
    kept = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(4))[:40].sort().values
    outer = {"target_kv_layers": [2, 0, 1], "draft_vocab_size": 40}
    config = _config([FULL] * 3, _LLAMA_TEXT | {"final_logit_softcapping": 4.0}, **outer)
    suppressed = tuple(kept[5:9].tolist())
    tensors = _tensors(layers, 4) | {"lm_head.weight": _table(4, 40), "d2t": kept - torch.arange(40)}
    meaning = Meaning(layers, cap=4.0, suppressed=suppressed)
    return Made(config, tensors, meaning, _llama_target, {"suppress_tokens": list(suppressed)})


VARIANTS: dict[str, Callable[[], Made]] = {
    "dense": _dense,
    "keys as values": _keys_as_values,
    "centroids": _centroids,
    "llama": _llama,
    "reduced": _reduced,
}


def save_gemma4_mtp(folder: Path) -> Path:
    """A drafter's folder for the tiny cyclic target that is often right.

    It hands on the embedding of the newest token, which points at its follower; the rest is random and of small
    effect, so that the target's state and keys matter too.
    """
    width, generator = tiny.WIDTH, torch.Generator().manual_seed(3)
    ropes = {FULL: {"rope_type": "default", "rope_theta": 10000.0}}
    text = {"hidden_size": width, "num_attention_heads": 2, "num_key_value_heads": 1, "global_head_dim": 32}
    config = _config([FULL], text | {"rope_parameters": ropes})
    small = 0.3 * width**-0.5

    def random(*shape: int) -> Tensor:
        return small * torch.randn(shape, generator=generator)

    tensors = {
        f"model.layers.0.{name}_layernorm.weight": torch.full((width,), size)
        for name, size in (
            *(("input", 1.0), ("post_attention", 0.3)),
            *(("pre_feedforward", 1.0), ("post_feedforward", 0.3)),
        )
    }
    tensors |= {
        "model.layers.0.self_attn.q_proj.weight": random(64, width),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(32),
        "model.layers.0.self_attn.o_proj.weight": random(width, 64),
        "model.layers.0.mlp.gate_proj.weight": random(INNER, width),
        "model.layers.0.mlp.up_proj.weight": random(INNER, width),
        "model.layers.0.mlp.down_proj.weight": random(width, INNER),
        "model.layers.0.layer_scalar": torch.ones(1),
        "model.norm.weight": torch.ones(width),
        "pre_projection.weight": torch.cat([0.05 * torch.eye(width), random(width, width)], dim=1),
        "post_projection.weight": torch.eye(width),
        "model.embed_tokens.weight": tiny.tiny_tensors(3, tiny.tiny_config(), cyclic=True)["lm_head.weight"],
    }
    return Made(config, tensors, Meaning(()), tiny.tiny_model).save(folder)
