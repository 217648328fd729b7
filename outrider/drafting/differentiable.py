"""The parts that draft networks in training share: products, norms, rotation, and attention over two sets of keys.

Plain differentiable PyTorch on packed rows, rounding where the serving code rounds. Weights are float32 masters that
each step casts once. Not here: what serving runs (autoregressive.py, block_layers.py). Legend: R rows, S context rows,
X extra keys, H query heads, G key/value heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.drafting.train_config import Init, TrainConfig
from outrider.drafting.training import Teacher
from outrider.errors import ConfigError
from outrider.models.arch import ModelConfig, expected_shapes
from outrider.models.layers import rope_tables

Weights = Mapping[str, Tensor]
UNSURE = 0.3
"""Share of the target's final norm to start from: at full size a network that knows nothing yet is sure of it."""
_SPREAD = 2.0
"""Largest standard deviation of a fresh network's logits."""


def gated_mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate = torch.nn.functional.silu((x @ weights[prefix + "gate_proj.weight"].T).float())
    up = x @ weights[prefix + "up_proj.weight"].T
    return (gate * up).to(x.dtype) @ weights[prefix + "down_proj.weight"].T


class Rope:
    """Rotary position embedding for rows at any position: the second half of a head turns against the first."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        tables = rope_tables(config.head_dim, max_len, config.rope_theta, config.rope_scaling)
        self._cosine, self._sine = tables

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [R, heads, E] at positions [R], in x's type."""
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Extra:
    """Keys and values [R / g, X, G, E] that each run of g rows sees beside the context; `mask` [g, X] True: seen."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None


def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, extra: Extra | None) -> Tensor:
    """Softmax attention of rows [R, H, E] over a conversation's context [S, G, E] and over keys of their own.

    `seen` [R, S] bool: which context rows a row sees. Gives [R, H x E]. Softmax in float32.
    """
    rows, heads, size = query.shape
    if not rows:
        return query.flatten(1)
    groups = keys.shape[1]
    repeat = heads // groups
    scale = size**-0.5
    # Heads of one group beside each other, so that no key is copied: [G, repeat x R, E].
    grouped = query.view(rows, groups, repeat, size).permute(1, 2, 0, 3).reshape(groups, repeat * rows, size)
    scores = (grouped @ keys.permute(1, 2, 0)).float().view(groups, repeat, rows, -1) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    if extra is None:
        probs = scores.softmax(-1).to(values.dtype)
        return _joined(probs.view(groups, repeat * rows, -1) @ values.transpose(0, 1), rows, heads * size)
    runs = len(extra.keys)
    own = query.view(runs, rows // runs, groups, repeat, size).permute(0, 2, 3, 1, 4)  # [R/g, G, repeat, g, E]
    more = (own.float() @ extra.keys.float().permute(0, 2, 3, 1)[:, :, None]) * scale  # [R/g, G, repeat, g, X]
    if extra.mask is not None:
        more = more.masked_fill(~extra.mask, -math.inf)
    more = more.permute(1, 2, 0, 3, 4).reshape(groups, repeat, rows, -1)
    probs = torch.cat([scores, more], dim=-1).softmax(-1)
    context, rest = probs.split([scores.shape[-1], more.shape[-1]], dim=-1)
    out = context.to(values.dtype).reshape(groups, repeat * rows, -1) @ values.transpose(0, 1)
    rest = rest.view(groups, repeat, runs, rows // runs, -1).permute(2, 0, 1, 3, 4)
    added = rest @ extra.values.float().transpose(1, 2)[:, :, None]  # [R/g, G, repeat, g, E]
    added = added.permute(1, 2, 0, 3, 4).reshape(groups, repeat * rows, size)
    return _joined(out + added.to(out.dtype), rows, heads * size)


def _joined(grouped: Tensor, rows: int, width: int) -> Tensor:
    """[G, repeat x R, E] -> [R, H x E]."""
    return grouped.view(-1, rows, grouped.shape[-1]).transpose(0, 1).reshape(rows, width)


def draft_config(
    teacher: Teacher, config: TrainConfig, *, num_layers: int, qk_norm: bool, attention_bias: bool
) -> ModelConfig:
    """The shape of draft layers: the target's, with their own number, MLP and key heads, without a window."""
    kv_heads = config.num_kv_heads or teacher.config.num_kv_heads
    if teacher.config.num_heads % kv_heads:
        raise ConfigError(
            f"num_kv_heads is {kv_heads}, expected a divisor of the {teacher.config.num_heads} query heads",
            param="num_kv_heads",
        )
    return replace(
        teacher.config,
        num_layers=config.num_layers or num_layers,
        intermediate_size=config.intermediate_size or teacher.config.intermediate_size,
        qk_norm=qk_norm,
        num_kv_heads=kv_heads,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        sliding_window=None,
        tie_word_embeddings=False,
    )


def unsure_norm(teacher: Teacher) -> Tensor:
    """A draft network's final norm [D] to start from, so small that its logits say little yet.

    A share of the target's own where that is enough, as with Llama; Gemma's are large and uneven, so a flat one.
    """
    share = teacher.norm_weight * UNSURE
    if _spread(teacher, share) <= _SPREAD:
        return share
    flat = torch.ones_like(share)
    return flat * (_SPREAD / _spread(teacher, flat))


def tap_norm(teacher: Teacher) -> Tensor:
    """The norm [D] through which taps are read at first: flat, or the target's last one where that is uneven.

    Nine tenths of a Gemma's residual are in one dimension, which says nothing; its own norms make up for that.
    """
    weight = teacher.norm_weight
    return torch.ones_like(weight) if weight.std() < weight.mean() else weight / weight.mean()


def _spread(teacher: Teacher, norm: Tensor) -> float:
    """Standard deviation of the logits of states with a mean square of 1 and random signs, after that norm [D]."""
    return float((teacher.head.float() * norm).pow(2).sum(1).mean().sqrt())


def fresh_layers(teacher: Teacher, model: ModelConfig, init: Init, *, adds: float) -> dict[str, Tensor]:
    """Weights of draft layers, `layers.0.` first: the target's last layers where shapes agree, else random.

    What a layer adds to the residual never starts as the target's, whose residual has another size, but at random,
    times `adds`: 0 where the residual says something from the start, 1 where it does not.
    """
    wanted = {
        name.removeprefix("model."): shape for name, shape in expected_shapes(model).items() if ".layers." in name
    }
    skipped = teacher.config.num_layers - model.num_layers
    fresh = {}
    for name, shape in wanted.items():
        _, index, rest = name.split(".", 2)
        source = teacher.tensors.get(f"model.layers.{skipped + int(index)}.{rest}")
        if rest.endswith(".bias"):
            fresh[name] = torch.zeros(shape)
        elif rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            fresh[name] = random_matrix(*shape, scale=adds)
        elif init == "target" and source is not None and tuple(source.shape) == shape:
            fresh[name] = source.float().clone()
        else:
            fresh[name] = torch.ones(shape) if len(shape) == 1 else random_matrix(*shape)
    return fresh


def fresh_fusion(num_taps: int, width: int) -> Tensor:
    """Weights [D, taps x D] of a fusion that starts as the last tap, with a little of each."""
    fusion = torch.cat([random_matrix(width, width, scale=0.3) for _ in range(num_taps)], dim=1)
    fusion[:, -width:] += torch.eye(width)
    return fusion


def random_matrix(rows: int, columns: int, *, scale: float = 1.0) -> Tensor:
    """A Gaussian matrix whose products keep the size of what they read, times `scale`."""
    return torch.randn(rows, columns).mul(scale * columns**-0.5)
