"""Tiny targets with a multi-token prediction module of random weights, in each layout, and what each of them means.

`Meaning` is written down by hand beside every variant: the reference that recomputes drafts reads it and never the
config, so that a misread key shows. A module is saved inside its target's folder or, as a delta, in one of its own.
`save_mtp` makes one that is often right about the cyclic target.
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

from outrider.models.families import load_model
from outrider.models.llama import LlamaModel
from tests.kit import tiny

WIDTH, INNER, LAYERS = tiny.WIDTH, 96, 3


@dataclass(frozen=True)
class Meaning:
    """How target and module compute. `layer`: prefix of the module's decoder layer; the next four: its own tensors.

    `state_first`: the state's half comes first; `after_norm`: it is the target's normed one; `blind_start`: the row at
    position 0 reads zeros in place of an embedding.
    """

    layer: str
    token_norm: str
    state_norm: str
    fusion: str
    norm: str
    state_first: bool
    after_norm: bool
    blind_start: bool
    window: int | None = None
    theta: float = 10000.0
    modules: int = 1

    def of(self, number: int) -> Meaning:
        """The same for another of several modules; what a layout has only once they share."""
        names = ("layer", "token_norm", "state_norm", "fusion", "norm")
        return replace(self, **{name: getattr(self, name).replace("layers.0.", f"layers.{number}.") for name in names})


MIMO = Meaning(
    layer="model.mtp_layers.0.",
    token_norm="model.mtp_layers.0.token_layernorm.weight",
    state_norm="model.mtp_layers.0.hidden_layernorm.weight",
    fusion="model.mtp_layers.0.input_proj.weight",
    norm="model.mtp_layers.0.final_layernorm.weight",
    state_first=True,
    after_norm=False,
    blind_start=True,
)
QWEN = Meaning(
    layer="mtp.layers.0.",
    token_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    fusion="mtp.fc.weight",
    norm="mtp.norm.weight",
    state_first=False,
    after_norm=True,
    blind_start=False,
)


@dataclass
class Made:
    """One target with its module: config.json, both parts' tensors, and the meaning."""

    config: dict[str, Any]
    target: dict[str, Tensor]
    module: dict[str, Tensor]
    meaning: Meaning

    def save(self, folder: Path) -> Path:
        """The target's folder, with the module inside."""
        return _write(folder, self.config, self.target | self.module)

    def save_delta(self, folder: Path) -> Path:
        """The module alone."""
        return _write(folder, self.config, self.module)

    def load(self, folder: Path, *, whole: bool = True) -> LlamaModel:
        """Save and load the target, `whole` with its module."""
        saved = self.save(folder) if whole else _write(folder, self.config, self.target)
        return load_model(str(saved), dtype=torch.float32, device=torch.device("cpu"))


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A target's config.json: four query heads over two key/value heads of 16."""
    return {
        "model_type": model_type,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tiny.VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | changes


def layer(prefix: str, generator: torch.Generator, *, bias: bool = False, qk_norm: bool = False) -> dict[str, Tensor]:
    """One random decoder layer, its queries and keys sharp: attention spread evenly would hide what it looks at."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    shapes |= {f"mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj": (WIDTH, INNER), "self_attn.o_proj": (WIDTH, 64)}
    shapes |= {f"self_attn.{name}_proj": (size, WIDTH) for name, size in (("q", 64), ("k", 32), ("v", 32))}
    if qk_norm:
        shapes |= {f"self_attn.{name}_norm": (16,) for name in "qk"}
    tensors = {f"{prefix}{name}.weight": _random(name, shape, generator) for name, shape in shapes.items()}
    if bias:
        sizes = (("q", 64), ("k", 32), ("v", 32))
        tensors |= {f"{prefix}self_attn.{n}_proj.bias": torch.randn(size, generator=generator) for n, size in sizes}
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.3 * noise
    return noise * (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * shape[-1] ** -0.5


def _made(model_type: str, meaning: Meaning, seed: int, *, modules: int = 1, **changes: Any) -> Made:
    generator = torch.Generator().manual_seed(seed)
    kind = {"bias": model_type in ("qwen2", "mimo"), "qk_norm": model_type == "qwen3"}
    target = {
        "model.embed_tokens.weight": torch.randn(tiny.VOCAB, WIDTH, generator=generator),
        "model.norm.weight": _random("norm", (WIDTH,), generator),
        "lm_head.weight": 0.6 * torch.randn(tiny.VOCAB, WIDTH, generator=generator),
    }
    for index in range(LAYERS):
        target |= layer(f"model.layers.{index}.", generator, **kind)
    module: dict[str, Tensor] = {}
    for index in range(modules):
        parts = layer(meaning.layer, generator, **kind)
        for name in (meaning.token_norm, meaning.state_norm, meaning.norm):
            parts[name] = _random("norm", (WIDTH,), generator)
        parts[meaning.fusion] = _random("fusion", (WIDTH, 2 * WIDTH), generator)
        # What all modules share is the first one's.
        module = {name.replace("layers.0.", f"layers.{index}."): tensor for name, tensor in parts.items()} | module
    return Made(config_of(model_type, **changes), target, module, replace(meaning, modules=modules))


VARIANTS: dict[str, Callable[[], Made]] = {
    "mimo": lambda: _made("mimo", MIMO, 0, num_nextn_predict_layers=1),
    "mimo as qwen2": lambda: _made("qwen2", MIMO, 1, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1),
    "mimo of two": lambda: _made("mimo", MIMO, 2, modules=2, num_nextn_predict_layers=2),
    "qwen": lambda: _made("llama", QWEN, 3, mtp_num_hidden_layers=1),
    "qwen3": lambda: _made("qwen3", QWEN, 4),
    "qwen of three": lambda: _made("qwen2", QWEN, 5, modules=3, mtp_num_hidden_layers=3),
    "sliding": lambda: _made("mistral", replace(QWEN, window=6), 6, sliding_window=6, mtp_num_hidden_layers=1),
    "other rope": lambda: _made("llama", replace(QWEN, theta=500.0), 7, rope_theta=500.0, mtp_num_hidden_layers=1),
}


def save_mtp(folder: Path, meaning: Meaning = QWEN) -> Path:
    """A module's folder for the tiny cyclic target that is often right.

    It hands on the embedding of the row's token, which points at its follower; the rest is random and of small effect,
    so that the target's state matters too.
    """
    generator = torch.Generator().manual_seed(3)
    halves = [2 * torch.eye(WIDTH), 0.5 * WIDTH**-0.5 * torch.randn(WIDTH, WIDTH, generator=generator)]
    norms = (meaning.token_norm, meaning.state_norm, meaning.norm)
    module = layer(meaning.layer, generator) | {name: torch.ones(WIDTH) for name in norms}
    module[meaning.layer + "mlp.down_proj.weight"] *= 0.3
    module[meaning.layer + "self_attn.o_proj.weight"] *= 0.3
    module[meaning.fusion] = torch.cat(halves[::-1] if meaning.state_first else halves, dim=1)
    return Made(config_of("llama", num_hidden_layers=2), {}, module, meaning).save_delta(folder)
