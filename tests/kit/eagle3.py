"""Tiny EAGLE-3 checkpoints with random weights, in each published format, and what each of them means.

`Meaning` is written down by hand beside every variant: the reference that recomputes drafts reads it and never the
config, so that a misread key shows. `save_eagle3` makes one that is often right about the cyclic target.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.kit import tiny
from tests.kit.block_checkpoints import REDUCED, ends

INNER = 96
TARGET: dict[str, Any] = {"num_layers": 6}
"""The target that these belong to: a tiny one of six layers."""


@dataclass(frozen=True)
class Meaning:
    """How a checkpoint drafts. `windows`: one a layer; `taps`: target layers that have run."""

    taps: tuple[int, ...] = (1, 3, 5)
    windows: tuple[int | None, ...] = (None,)
    head_dim: int = 32
    residual_is_normed: bool = False
    feeds_back_normed: bool = False
    has_fusion: bool = True
    theta: float = 10000.0
    scale: float = 1.0
    latent: dict[str, Any] | None = None


@dataclass
class Made:
    """One checkpoint: config.json, tensors and meaning."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    meaning: Meaning

    def save(self, folder: Path) -> dict[str, Any]:
        """Write it as a folder; gives the speculative config's keys."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return {"method": "eagle3", "model": str(folder)}


def layer_keys(**changes: Any) -> dict[str, Any]:
    """The part of a config that describes the draft layers."""
    return {
        "model_type": "llama",
        "hidden_size": tiny.WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": tiny.VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    } | changes


def weights(
    seed: int, *, width: int = tiny.WIDTH, head_dim: int = 32, num_taps: int = 3, num_layers: int = 1
) -> dict[str, Tensor]:
    """Random layers, fusion and final norm, under the newer names."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, num_taps * tiny.WIDTH), "norm.weight": (width,)}
    for index in range(num_layers):
        layer, inputs = f"layers.{index}.", width if index else 2 * width
        shapes[layer + "self_attn.q_proj.weight"] = (4 * head_dim, inputs)
        shapes |= {layer + f"self_attn.{name}_proj.weight": (2 * head_dim, inputs) for name in "kv"}
        shapes[layer + "self_attn.o_proj.weight"] = (width, 4 * head_dim)
        shapes |= {layer + f"mlp.{name}_proj.weight": (INNER, width) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (width, INNER)
        shapes |= {layer + f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    shapes["layers.0.hidden_norm.weight"] = (width,)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * noise
    # Sharp queries and keys: attention that is spread evenly would hide what it looks at.
    return noise * (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * shape[-1] ** -0.5


def norms(seed: int, **sizes: int) -> dict[str, Tensor]:
    """Norm weights by name, dots spelled as two underscores."""
    generator = torch.Generator().manual_seed(seed + 2000)
    return {
        name.replace("__", ".") + ".weight": 1 + 0.4 * torch.randn(size, generator=generator)
        for name, size in sizes.items()
    }


def flat(seed: int = 0, meaning: Meaning | None = None, **changes: Any) -> Made:
    """The flat format, with the older names, the target's embedding and output matrix, and layer numbers in order."""
    config = layer_keys(
        architectures=["LlamaForCausalLMEagle3"],
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        draft_vocab_size=tiny.VOCAB,
    )
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights(seed).items()}
    return Made(config | changes, tensors, meaning or Meaning())


def speculators(seed: int = 0, layers: dict[str, Any] | None = None, **changes: Any) -> Made:
    """The Speculators format with a reduced vocabulary; silent on norms, so the residual starts normed."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_keys(**(layers or {})),
        "draft_vocab_size": REDUCED,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [6, 0, 3],
        "speculators_config": {"algorithm": "eagle3"},
    } | changes
    tensors = weights(seed) | ends(seed, drafted=REDUCED)
    return Made(config, tensors, Meaning(taps=(0, 3, 6), residual_is_normed=True))


def _with(made: Made, more: dict[str, Tensor], **meant: Any) -> Made:
    return replace(made, tensors=made.tensors | more, meaning=replace(made.meaning, **meant))


def _qwen3(seed: int = 4) -> Made:
    made = speculators(seed, {"model_type": "qwen3"}, norm_before_residual=False)
    sharp = norms(seed, layers__0__self_attn__q_norm=32, layers__0__self_attn__k_norm=32)
    return _with(made, {name: 2 * tensor for name, tensor in sharp.items()}, residual_is_normed=False)


def _deepspec() -> Made:
    made = _qwen3(7)
    config = layer_keys(model_type="qwen3", architectures=["Qwen3Eagle3Model"], num_target_layers=6)
    config |= {"target_layer_ids": [0, 1, 2, 4, 5], "layer_types": ["full_attention"]}
    tensors = {name: tensor for name, tensor in made.tensors.items() if "d2t" not in name and "t2d" not in name}
    tensors |= ends(7) | {"fc.weight": weights(7, num_taps=5)["fc.weight"]}
    return Made(config, tensors, Meaning(taps=(1, 2, 3, 5, 6)))


def _two_layers() -> Made:
    made = flat(8, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=5)
    made.config["architectures"] = ["LlamaForCausalLM"]
    return replace(made, tensors=weights(8, num_layers=2), meaning=Meaning(windows=(None, 5)))


def _biased() -> Made:
    made = flat(9, attention_bias=True)
    generator = torch.Generator().manual_seed(9)
    for name, size in {"q": 128, "k": 64, "v": 64}.items():
        made.tensors[f"midlayer.self_attn.{name}_proj.bias"] = torch.randn(size, generator=generator)
    return made


LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 1.0,
        "beta_slow": 0.25,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
"""Keys of DeepSeek's attention, its frequencies stretched."""


def latent(seed: int = 16, *, taps: tuple[int, ...] = (1, 3, 5), **changes: Any) -> Made:
    """The flat format with DeepSeek's attention, as Kimi's heads have it."""
    keys = LATENT | changes
    config = layer_keys(
        model_type="deepseek_v3",
        architectures=["Eagle3DeepseekV2ForCausalLM"],
        eagle_aux_hidden_state_layer_ids=list(taps),
        draft_vocab_size=tiny.VOCAB,
        **keys,
    )
    del config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor for name, tensor in weights(seed).items() if ".self_attn." not in name}
    rank, heads = keys["q_lora_rank"], 4 * 24
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (heads, 2 * tiny.WIDTH)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, 2 * tiny.WIDTH), "q_a_layernorm": (rank,), "q_b_proj": (heads, rank)}
    shapes |= {
        "kv_a_proj_with_mqa": (40, 2 * tiny.WIDTH),
        "kv_a_layernorm": (32,),
        "kv_b_proj": (4 * 32, 32),
        "o_proj": (tiny.WIDTH, 64),
    }
    names = {name: f"layers.0.self_attn.{name}.weight" for name in shapes}
    made = {names[name]: 2 * _random(names[name], shape, generator) for name, shape in shapes.items()}
    return Made(config, tensors | made, Meaning(taps=taps, latent=config))


def _wide() -> Made:
    made = flat(10, hidden_size=96, target_hidden_size=tiny.WIDTH)
    return replace(made, tensors=weights(10, width=96) | ends(10, width=96))


def _last_state() -> Made:
    made = flat(11, eagle_config={"use_aux_hidden_state": False}, eagle_aux_hidden_state_layer_ids=None)
    del made.tensors["fc.weight"]
    return replace(made, meaning=Meaning(taps=(6,), has_fusion=False))


def _small_heads() -> Made:
    return replace(flat(12, head_dim=16), tensors=weights(12, head_dim=16), meaning=Meaning(head_dim=16))


def _norm_before_fc() -> Made:
    made = flat(2, eagle_config={"norm_before_fc": True}, norm_before_fc=False)
    return _with(made, norms(2, input_norm=3 * tiny.WIDTH))


def _eagle31() -> Made:
    made = speculators(3, fc_norm=True, norm_output=True, norm_before_residual=True)
    return _with(made, norms(3, fc_norm__0=64, fc_norm__1=64, fc_norm__2=64), feeds_back_normed=True)


def _eagle31_flat() -> Made:
    made = flat(13, fc_norm=True, norm_output=True, norm_before_residual=False)
    return _with(made, norms(13, fc_norm__0=64, fc_norm__1=64, fc_norm__2=64), feeds_back_normed=True)


VARIANTS: dict[str, Callable[[], Made]] = {
    "flat": flat,
    "flat normed": lambda: flat(1, Meaning(residual_is_normed=True), norm_before_residual=True),
    "norm before fc": _norm_before_fc,
    "3.1": _eagle31,
    "3.1 flat": _eagle31_flat,
    "speculators": lambda: speculators(5),
    "qwen3": _qwen3,
    "sliding": lambda: flat(6, Meaning(windows=(4,)), layer_types=["sliding_attention"], sliding_window=4),
    "deepspec": _deepspec,
    "two layers": _two_layers,
    "biased": _biased,
    "wide": _wide,
    "last state": _last_state,
    "small heads": _small_heads,
    "own choice of taps": lambda: flat(14, Meaning(taps=(2, 3, 4)), eagle_aux_hidden_state_layer_ids=[4, 2, 3]),
    "latent": latent,
    "latent, plain": lambda: latent(17, q_lora_rank=None, rope_scaling=None),
    "other rope": lambda: flat(15, Meaning(theta=500.0, scale=0.5), rope_theta=500.0, logit_scale=0.5),
}


def save_eagle3(folder: Path, *, num_target_layers: int = 2) -> Path:
    """A checkpoint folder for the tiny cyclic target that is often right.

    Its attention finds the row's own token and hands on the token's embedding, which points at its follower; the rest
    is random and of small effect, so that the taps matter too.
    """
    width = tiny.WIDTH
    config = layer_keys(num_attention_heads=2, architectures=["LlamaForCausalLMEagle3"], max_position_embeddings=512)
    config["eagle_aux_hidden_state_layer_ids"] = list(range(num_target_layers + 1))
    tensors = weights(0, num_taps=num_target_layers + 1)
    own = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    generator = torch.Generator().manual_seed(3)
    for name, scale in {"q": 1.5, "k": 1.5, "v": 4.0}.items():
        noise = 0.05 * torch.randn(width, 2 * width, generator=generator)
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = scale * own + noise
    tensors["layers.0.self_attn.o_proj.weight"] = torch.eye(width)
    tensors["fc.weight"] *= 0.3
    Made(config, tensors, Meaning()).save(folder)
    return folder
