"""Tiny DFlash and DSpark checkpoints with random weights, in each published format, and what each of them means.

`Meaning` is written down by hand beside every variant: a reference that recomputes drafts reads it and never the
config, so that a misread key shows.
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

LAYERS, RANK, REDUCED = 3, 8, 40
MASK = tiny.VOCAB - 2
TARGET: dict[str, Any] = {"num_layers": 4}
"""The target that these belong to: a tiny one of four layers."""


@dataclass(frozen=True)
class Meaning:
    """How a checkpoint drafts. `views`: (causal, window) of each layer; `taps`: target layers that have run."""

    views: tuple[tuple[bool, int | None], ...] = ((False, None),) * LAYERS
    taps: tuple[int, ...] = (1, 2, 4)
    from_anchor: bool = False
    head_dim: int = 32
    rank: int = 0
    head: str = "vanilla"
    topk: int | None = None
    has_confidence: bool = False
    theta: float = 10000.0
    scale: float = 1.0


@dataclass
class Made:
    """One checkpoint: method, config.json, tensors, meaning, and further keys of the speculative config."""

    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    meaning: Meaning
    settings: dict[str, Any]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write it as a folder; gives the speculative config's keys."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return {"method": self.method, "model": str(folder)} | self.settings


def layer_keys(**changes: Any) -> dict[str, Any]:
    """The part of a config that describes the draft layers."""
    return {
        "model_type": "qwen3",
        "hidden_size": tiny.WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": tiny.VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    } | changes


def backbone(seed: int, *, width: int = tiny.WIDTH, head_dim: int = 32, num_taps: int = 3) -> dict[str, Tensor]:
    """Random draft layers without embedding and output matrix."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (width, num_taps * tiny.WIDTH), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for index in range(LAYERS):
        attention, layer = f"layers.{index}.self_attn.", f"layers.{index}."
        shapes |= {attention + f"{name}_proj.weight": (2 * head_dim, width) for name in "kv"}
        shapes |= {
            attention + "q_proj.weight": (4 * head_dim, width),
            attention + "o_proj.weight": (width, 4 * head_dim),
        }
        shapes |= {attention + f"{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {layer + f"mlp.{name}_proj.weight": (96, width) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (width, 96)
        shapes |= {layer + f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        # Sharp queries and keys: attention that is spread evenly would hide what it looks at.
        return (2.0 if "_norm" in name and "hidden" not in name else 1.0) + 0.2 * torch.randn(
            shape, generator=generator
        )
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def ends(seed: int, *, width: int = tiny.WIDTH, drafted: int = tiny.VOCAB) -> dict[str, Tensor]:
    """An embedding and an output matrix of its own; with d2t and t2d where not every token can be drafted."""
    generator = torch.Generator().manual_seed(seed + 1000)
    tensors = {
        "embed_tokens.weight": torch.randn(tiny.VOCAB, width, generator=generator),
        "lm_head.weight": 0.6 * torch.randn(drafted, width, generator=generator),
    }
    if drafted != tiny.VOCAB:
        chosen = torch.randperm(tiny.VOCAB, generator=generator)[:drafted].sort().values
        seen = torch.zeros(tiny.VOCAB, dtype=torch.bool)
        seen[chosen] = True
        tensors |= {"d2t": chosen - torch.arange(drafted), "t2d": seen}
    return tensors


def markov(
    seed: int, kind: str = "vanilla", *, drafted: int = tiny.VOCAB, confidence: bool = True
) -> dict[str, Tensor]:
    """A Markov head of one kind and a confidence head that reads it."""
    generator = torch.Generator().manual_seed(seed + 2000)
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (tiny.VOCAB, RANK), "markov_w2.weight": (drafted, RANK)}
    shapes |= {
        "gated": {"gate_proj.weight": (RANK, tiny.WIDTH + RANK), "gate_proj.bias": (RANK,)},
        "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + tiny.WIDTH), "joint_proj.bias": (3 * RANK,)},
    }.get(kind, {})
    tensors = {f"markov_head.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if confidence:
        tensors["confidence_head.proj.weight"] = 0.2 * torch.randn(1, tiny.WIDTH + RANK, generator=generator)
        tensors["confidence_head.proj.bias"] = torch.randn(1, generator=generator)
    return tensors


# ---- DFlash ----


def zlab(seed: int = 0, **changes: Any) -> Made:
    """z-lab's flat format; `changes` of `dflash_config` go there, others to the top."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3]}
    for key in ("causal", "use_swa", "swa_window_size"):
        if key in changes:
            nested[key] = changes.pop(key)
    config = layer_keys(**changes) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "num_target_layers": TARGET["num_layers"],
        "dflash_config": nested,
    }
    return Made("dflash", config, backbone(seed), Meaning(), {})


def speculators(seed: int, method: str, **changes: Any) -> Made:
    """The Speculators format with a reduced vocabulary; layer numbers there count layers that have run."""
    config = {
        "speculators_model_type": method,
        "architectures": [f"{method}Speculator"],
        "transformer_layer_config": layer_keys(),
        "draft_vocab_size": REDUCED,
        "target_hidden_size": tiny.WIDTH,
        "aux_hidden_state_layer_ids": [0, 2, 3],
        "mask_token_id": MASK,
        "block_size": 16,
        "speculators_config": {"algorithm": method},
    } | changes
    tensors = backbone(seed) | ends(seed, drafted=REDUCED)
    return Made(method, config, tensors, Meaning(taps=(0, 2, 3)), {})


def _layers(*kinds: str, window: int = 6) -> dict[str, Any]:
    kept = {"s": "sliding_attention", "f": "full_attention"}
    return {"layer_types": [kept[kind] for kind in kinds], "sliding_window": window, "use_sliding_window": True}


def _meant(made: Made, **changes: Any) -> Made:
    return replace(made, meaning=replace(made.meaning, **changes))


def _wide() -> Made:
    made = zlab(8, hidden_size=96, target_hidden_size=tiny.WIDTH)
    return replace(made, tensors=backbone(8, width=96) | ends(8, width=96))


def _biased() -> Made:
    made = zlab(9, attention_bias=True)
    generator = torch.Generator().manual_seed(9)
    rows = {"q": 128, "k": 64, "v": 64, "o": tiny.WIDTH}
    for index in range(LAYERS):
        for name, size in rows.items():
            made.tensors[f"layers.{index}.self_attn.{name}_proj.bias"] = torch.randn(size, generator=generator)
    return made


def _deepspec_dflash() -> Made:
    made = dspark(10, markov_rank=0, enable_confidence_head=False)
    return replace(made, method="dflash", meaning=replace(made.meaning, rank=0, has_confidence=False))


def _small_heads() -> Made:
    made = zlab(11, head_dim=16)
    return _meant(replace(made, tensors=backbone(11, head_dim=16)), head_dim=16)


FULL, CAUSAL = (False, None), (True, None)
DFLASH: dict[str, Callable[[], Made]] = {
    "zlab": zlab,
    "causal": lambda: _meant(zlab(1, causal=True), views=(CAUSAL,) * 3),
    "is_causal": lambda: _meant(zlab(2, is_causal=True), views=(CAUSAL,) * 3),
    "sliding": lambda: _meant(zlab(3, **_layers("s", "s", "s")), views=((True, 6),) * 3),
    "mixed": lambda: _meant(zlab(4, **_layers("s", "f", "s")), views=((True, 6), FULL, (True, 6))),
    "sliding both ways": lambda: _meant(
        zlab(5, causal=False, **_layers("s", "s", "f")), views=((False, 6),) * 2 + (FULL,)
    ),
    "use_swa": lambda: _meant(zlab(6, use_swa=True, swa_window_size=3), views=((False, 3),) * 3),
    "speculators": lambda: speculators(7, "dflash", sliding_window_non_causal=True),
    "speculators causal": lambda: _meant(
        speculators(7, "dflash", sliding_window_non_causal=False), views=(CAUSAL,) * 3
    ),
    "wide": _wide,
    "biased": _biased,
    "deepspec": _deepspec_dflash,
    "small heads": _small_heads,
    "other rope": lambda: _meant(zlab(12, rope_theta=500.0, logit_scale=0.5), theta=500.0, scale=0.5),
}


# ---- DSpark ----


def dspark(seed: int = 0, kind: str = "vanilla", **changes: Any) -> Made:
    """DeepSpec's flat format, with an embedding, an output matrix and both heads of its own."""
    config = layer_keys() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "target_layer_ids": [-1, 1, 3],
        "num_target_layers": TARGET["num_layers"],
        "mask_token_id": MASK,
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config |= changes
    rank = config["markov_rank"]
    heads = markov(seed, kind, confidence=config["enable_confidence_head"]) if rank else {}
    meaning = Meaning(taps=(0, 2, 4), from_anchor=True, rank=rank, head=kind, has_confidence=True)
    return Made("dspark", config, backbone(seed) | ends(seed) | heads, meaning, {})


def _specforge() -> Made:
    made = dspark(23)
    moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved += ("enable_confidence_head", "confidence_head_with_markov")
    nested = {"projector_type": "dspark"} | {key: made.config.pop(key) for key in moved}
    return replace(made, config=made.config | {"architectures": ["DSparkDraftModel"], "dflash_config": nested})


def _dspark_speculators() -> Made:
    keys = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    made = speculators(24, "dspark", confidence_head_with_markov=True, sliding_window_non_causal=False, **keys)
    heads = markov(24, drafted=REDUCED)
    return _meant(replace(made, tensors=made.tensors | heads), rank=RANK, has_confidence=True)


def _plain_confidence() -> Made:
    made = dspark(25, confidence_head_with_markov=False)
    made.tensors["confidence_head.proj.weight"] = made.tensors["confidence_head.proj.weight"][:, : tiny.WIDTH]
    return made


DSPARK: dict[str, Callable[[], Made]] = {
    "deepspec": dspark,
    "gated": lambda: dspark(20, "gated"),
    "rnn": lambda: dspark(21, "rnn"),
    "fill-in": lambda: _meant(dspark(22, sample_from_anchor=False), from_anchor=False),
    "specforge": _specforge,
    "speculators": _dspark_speculators,
    "confidence of states alone": _plain_confidence,
    "topk": lambda: replace(_meant(dspark(26), topk=3), settings={"dspark_draft_topk": 3}),
    "no markov": lambda: _meant(dspark(27, markov_rank=0, enable_confidence_head=False), has_confidence=False),
}
VARIANTS = {f"dflash {name}": make for name, make in DFLASH.items()} | {
    f"dspark {name}": make for name, make in DSPARK.items()
}
