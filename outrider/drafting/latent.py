"""DeepSeek's latent attention (MLA) as the attention of a draft layer: keys and values unfolded from a small latent.

The cache holds what heads read, unfolded, with values padded to the width of the keys, so that it is an ordinary
LayerCache and the ordinary kernel attends; the saving of a latent cache is not had. Not here: the target's own latent
attention (models/hf.py), and the layer around it. Sources: DeepSeek-V2, arXiv:2405.04434; YaRN, arXiv:2309.00071; vLLM
0.32 `deepseek_eagle3.py`. Legend: T rows, H heads, En, Er, Ev widths of a head's plain, turned and value part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafting.config_keys import ConfigKeys
from outrider.models.attention import Batch, Heads, LayerCache, attend
from outrider.models.layers import RMSNorm
from outrider.models.linear import Linear


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of rotary frequencies: slow ones by `factor`, fast ones not, and a scale of what is turned."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all: float

    def inverse(self, width: int, theta: float) -> Tensor:
        """Angles of one position [Er / 2] float64."""
        whole = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        low, high = (self._pair(turns, width, theta) for turns in (self.beta_fast, self.beta_slow))
        first, last = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        ramp = ((torch.arange(width // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
        return whole / self.factor * ramp + whole * (1 - ramp)

    def _pair(self, turns: float, width: int, theta: float) -> float:
        """The pair of elements that makes that many turns over the original length."""
        return width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def scale(self, mscale: float) -> float:
        """What longer texts multiply with, 1 for those that are not longer."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class LatentShape:
    """One layer's latent attention. `query_rank` None: queries straight from the input. `yarn` None: plain rotation."""

    num_heads: int
    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int
    eps: float
    theta: float
    yarn: Yarn | None = None

    @classmethod
    def read(cls, keys: ConfigKeys) -> LatentShape:
        """From config.json. Raises LoadError naming the key."""
        rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
        inner = ConfigKeys(rope, keys.source, "")
        return cls(
            num_heads=keys.count("num_attention_heads"),
            query_rank=keys.count("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
            rank=keys.count("kv_lora_rank"),
            plain=keys.count("qk_nope_head_dim"),
            turned=keys.count("qk_rope_head_dim"),
            value=keys.count("v_head_dim"),
            eps=keys.number("rms_norm_eps", 1e-6),
            theta=inner.number("rope_theta", keys.number("rope_theta", 10000.0)),
            yarn=_yarn(keys, inner),
        )

    @property
    def key(self) -> int:
        """Width of a head's key."""
        return self.plain + self.turned

    @property
    def scaling(self) -> float:
        """What scores are multiplied with."""
        stretch = self.yarn.scale(self.yarn.mscale_all) if self.yarn is not None and self.yarn.mscale_all else 1.0
        return float(self.key**-0.5 * stretch**2)

    def shapes(self, prefix: str, inputs: int, width: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor under a layer's attention prefix, for inputs of one width and outputs."""
        queries = self.num_heads * self.key
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (queries, inputs)}
        if self.query_rank is not None:
            rank = self.query_rank
            shapes = {"q_a_proj": (rank, inputs), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
        shapes |= {
            "kv_a_proj_with_mqa": (self.rank + self.turned, inputs),
            "kv_a_layernorm": (self.rank,),
            "kv_b_proj": (self.num_heads * (self.plain + self.value), self.rank),
            "o_proj": (width, self.num_heads * self.value),
        }
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}

    def tables(self, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [max_len, Er / 2] float32, with what YaRN scales them by."""
        if self.yarn is None:
            inverse, scale = self.theta ** (-torch.arange(0, self.turned, 2, dtype=torch.float64) / self.turned), 1.0
        else:
            inverse = self.yarn.inverse(self.turned, self.theta)
            scale = self.yarn.scale(self.yarn.mscale) / self.yarn.scale(self.yarn.mscale_all)
        angles = torch.arange(max_len, dtype=torch.float64)[:, None] * inverse
        return (angles.cos() * scale).float().to(device), (angles.sin() * scale).float().to(device)


def _yarn(keys: ConfigKeys, rope: ConfigKeys) -> Yarn | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("yarn", "deepseek_yarn"):
        raise keys.error(f"rope_scaling has the type {kind!r}, expected yarn or default")
    return Yarn(
        factor=rope.number("factor", 1.0),
        original=rope.count("original_max_position_embeddings", keys.count("max_position_embeddings", 4096)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 1.0),
        mscale_all=float(rope.get("mscale_all_dim") or 0.0),
    )


class LatentAttention:
    """The attention's weights under a prefix, and its two passes: keys and values alone, and all of it."""

    def __init__(
        self, shape: LatentShape, tensors: Mapping[str, Tensor], prefix: str, rope: tuple[Tensor, Tensor]
    ) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{prefix}{name}.weight"], shape.eps)

        def linear(name: str) -> Linear:
            return Linear(tensors[f"{prefix}{name}.weight"])

        self.shape, self._cosine, self._sine = shape, *rope
        self._query = linear("q_proj" if shape.query_rank is None else "q_b_proj")
        self._query_latent = None if shape.query_rank is None else (linear("q_a_proj"), norm("q_a_layernorm"))
        self._latent, self._latent_norm = linear("kv_a_proj_with_mqa"), norm("kv_a_layernorm")
        self._unfold, self._output = linear("kv_b_proj"), linear("o_proj")
        none = tensors[f"{prefix}o_proj.weight"].new_empty(0)
        self._heads = Heads(shape.num_heads, shape.num_heads, shape.key, none, none, shape.scaling)

    def new_cache(self, num_slots: int, like: Tensor) -> LayerCache:
        """Empty keys and values for that many slots."""
        return LayerCache(num_slots, self.shape.num_heads, self.shape.key, like)

    def fill(self, inputs: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Write the rows' keys and values."""
        shape, latent = self.shape, self._latent(inputs)
        folded, turned = latent.split([shape.rank, shape.turned], dim=1)
        heads = self._unfold(self._latent_norm(folded.contiguous())).view(len(inputs), shape.num_heads, -1)
        plain, values = heads.split([shape.plain, shape.value], dim=2)
        turned = self._turn(turned[:, None], batch).expand(-1, shape.num_heads, -1)
        values = torch.nn.functional.pad(values, (0, shape.key - shape.value))
        cache.scatter(batch.slots.long(), torch.cat([plain, turned], dim=2), values)

    def __call__(self, inputs: Tensor, batch: Batch, starts: Tensor, cache: LayerCache) -> Tensor:
        """Fill, and attend: [T, D]."""
        self.fill(inputs, batch, cache)
        shape = self.shape
        if self._query_latent is not None:
            down, norm = self._query_latent
            inputs = norm(down(inputs))
        queries = self._query(inputs).view(len(inputs), shape.num_heads, shape.key)
        plain, turned = queries.split([shape.plain, shape.turned], dim=2)
        queries = torch.cat([plain, self._turn(turned, batch)], dim=2).flatten(1)
        attended = attend(queries, batch, starts, self._heads, cache).view(len(inputs), shape.num_heads, shape.key)
        return self._output(attended[..., : shape.value].flatten(1))

    def _turn(self, x: Tensor, batch: Batch) -> Tensor:
        """Rotate [T, heads, Er] by position: each even element against the odd one after it."""
        positions = batch.positions.long()
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]
        even, odd = x.float().unflatten(2, (-1, 2)).unbind(-1)
        return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).flatten(2).to(x.dtype)
