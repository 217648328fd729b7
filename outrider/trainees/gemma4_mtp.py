"""Gemma 4's MTP drafter in training, for a target of the Llama family: queries over the target's own keys and values.

The keys and values of the target layers that are read are computed again from the captured states, without a gradient.
Every step of the unrolled loss stands at the same place, as every draft of a round does in serving, and reads what the
step before it projected back to the target's width. Start values: both projections and the output matrix share one
basis, the directions in which the target's output matrix is widest, so that the network begins as a narrow copy of the
target's own end. Sources: vLLM 0.32 `gemma4_mtp.py`; Li et al., EAGLE-3, arXiv:2503.01840, for the unrolled loss.
Legend: T packed tokens, R rows, D draft width, Dt target width, H query heads, G key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.differentiable import UNSURE, Rope, Weights, random_matrix
from outrider.drafting.gemma4_config import Gemma4MtpConfig
from outrider.drafting.train_config import TrainConfig
from outrider.drafting.training import Teacher, TrainingBatch, TrainingLoss
from outrider.drafting.unrolled import Rows, unrolled_loss
from outrider.drafting.vocabulary import EMBEDDING, HEAD
from outrider.errors import ConfigError
from outrider.models.arch import ModelConfig
from outrider.models.layers import reference_rms_norm

_LAYERS = 4
_ADDS = 0.3
"""What a layer's two halves add to the residual at first, relative to it."""
_EMBEDDED = 0.5
"""Size of the embedding's part of the residual at first, relative to the state's."""
KeyValue = tuple[Tensor, Tensor]


class Gemma4MtpTrainee:
    """`num_layers` layers of `hidden_size`, each over one target layer's cache, and an output matrix of its own."""

    def __init__(self, config: TrainConfig, teacher: Teacher) -> None:
        self._config, self._teacher = config, teacher
        self._kv_layers = _kv_layers(config, teacher.config)
        self.taps: tuple[int, ...] = tuple(sorted(set(self._kv_layers)))
        self._raw = _written(config, teacher, self._kv_layers)
        self._meaning = Gemma4MtpConfig.read(self._raw, source=teacher.name)
        self._head = HEAD if HEAD in self._meaning.shapes() else EMBEDDING
        self._rope = Rope(teacher.config, config.max_len)
        self._scale = float(torch.tensor(teacher.config.hidden_size**0.5).to(teacher.dtype))
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in self._fresh().items()}

    def _fresh(self) -> dict[str, Tensor]:
        teacher, width = self._teacher, self._config.hidden_size
        head, basis = teacher.head.float(), _widest(teacher.head.float(), width)
        # Sizes of what the projections read, so that the residual starts with elements of size 1.
        state_size = _size(basis.T * teacher.norm_weight) * teacher.config.hidden_size**0.5
        token_size = _size(head @ basis) * self._scale
        tensors = {
            name: _fresh(name, shape) for name, shape in self._meaning.shapes().items() if name.endswith(".weight")
        }
        tensors["pre_projection.weight"] = torch.cat([basis.T * _EMBEDDED / token_size, basis.T / state_size], dim=1)
        tensors["post_projection.weight"] = basis * state_size
        tensors[self._head] = head @ basis * state_size * UNSURE
        for index, layer in enumerate(self._kv_layers):
            tensors[f"layers.{index}.self_attn.q_norm.weight"] = _query_size(teacher, layer)
        return tensors

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """Summed over rows and steps, later steps weighted less; to be divided by the number of rows."""
        rows, teacher = Rows(batch), self._teacher
        if not len(rows.index):
            return TrainingLoss.of_nothing(self._config.ttt_steps)
        weights = {name: tensor.to(teacher.dtype) for name, tensor in self.parameters.items()}
        last = batch.taps[teacher.config.num_layers][rows.index]
        states = reference_rms_norm(last, teacher.norm_weight, teacher.config.rms_norm_eps)
        attention = _Attention(rows, {layer: self._key_value(layer, batch, rows) for layer in self.taps})
        step = partial(self._step, rows, weights, attention)
        return unrolled_loss(self._config, teacher, rows, states, step, weights[self._head])

    def _step(
        self, rows: Rows, weights: Weights, attention: _Attention, hidden: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """From what stands for the target's states [R, Dt] to (states [R, D], the next step's [R, Dt])."""
        eps = self._meaning.model.rms_norm_eps
        positions = rows.positions[rows.index]
        embedded = self._teacher.embedding[rows.ahead(1 + number)] * self._scale
        x = torch.cat([embedded, hidden], dim=1) @ weights["pre_projection.weight"].T
        for index, layer in enumerate(self._kv_layers):
            prefix = f"layers.{index}."

            def normed(name: str, x: Tensor, prefix: str = prefix) -> Tensor:
                return reference_rms_norm(x, weights[f"{prefix}{name}.weight"], eps)

            query = normed("input_layernorm", x) @ weights[prefix + "self_attn.q_proj.weight"].T
            query = query.view(len(x), self._meaning.model.num_heads, -1)
            query = self._rope(normed("self_attn.q_norm", query), positions)
            attended = attention(query, layer) @ weights[prefix + "self_attn.o_proj.weight"].T
            x = x + normed("post_attention_layernorm", attended)
            x = x + normed("post_feedforward_layernorm", _mlp(normed("pre_feedforward_layernorm", x), weights, prefix))
        states = reference_rms_norm(x, weights["norm.weight"], eps)
        return states, states @ weights["post_projection.weight"].T

    @torch.no_grad()
    def _key_value(self, layer: int, batch: TrainingBatch, rows: Rows) -> KeyValue:
        """What the target's cache holds of that layer: keys, normed and rotated, and values [T, G, E]."""
        teacher, config = self._teacher, self._teacher.config
        prefix = f"model.layers.{layer}."

        def of(name: str) -> Tensor:
            return teacher.tensors[prefix + name]

        normed = reference_rms_norm(batch.taps[layer], of("input_layernorm.weight").float(), config.rms_norm_eps)

        def heads(name: str) -> Tensor:
            bias = of(f"self_attn.{name}_proj.bias") if config.attention_bias else None
            weight = of(f"self_attn.{name}_proj.weight").to(normed.dtype)
            out = torch.nn.functional.linear(normed, weight, None if bias is None else bias.to(normed.dtype))
            return out.view(len(normed), config.num_kv_heads, config.head_dim)

        keys = heads("k")
        if config.qk_norm:
            keys = reference_rms_norm(keys, of("self_attn.k_norm.weight").float(), config.rms_norm_eps)
        return self._rope(keys, rows.positions), heads("v")

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """In the published format, with the two keys that are ours where they say something."""
        tensors = {name: tensor.detach() for name, tensor in self.parameters.items()}
        scalars = {name: torch.ones(1) for name in self._meaning.shapes() if name.endswith("layer_scalar")}
        mapping = {name: tensor for name, tensor in self._teacher.ends().items() if name != HEAD}
        return self._raw, tensors | scalars | mapping


class _Attention:
    """Softmax attention of a batch's rows over the target's keys, each row over its own conversation up to itself."""

    def __init__(self, rows: Rows, cache: Mapping[int, KeyValue]) -> None:
        """`cache`: keys and values [T, G, E] by target layer."""
        self._spans = [(tokens, span) for tokens, span in rows.conversations() if span.stop > span.start]
        self._cache = {
            layer: [(keys[tokens].permute(1, 2, 0), values[tokens].transpose(0, 1)) for tokens, _ in self._spans]
            for layer, (keys, values) in cache.items()
        }
        dtype = next(iter(cache.values()))[0].dtype
        self._hidden = [
            torch.zeros(span.stop - span.start, tokens.stop - tokens.start, dtype=dtype).masked_fill(
                torch.arange(tokens.start, tokens.stop)[None] > rows.index[span, None], float("-inf")
            )
            for tokens, span in self._spans
        ]

    def __call__(self, query: Tensor, layer: int) -> Tensor:
        """Rotated queries [R, H, E] -> [R, H E]; scores are not scaled."""
        parts = []
        for (_, span), (keys, values), hidden in zip(self._spans, self._cache[layer], self._hidden, strict=True):
            rows, groups, size = len(hidden), len(keys), query.shape[2]
            # Heads of one group beside each other, so that no key is copied: [G, repeat x R, E].
            grouped = query[span].view(rows, groups, -1, size).permute(1, 2, 0, 3).reshape(groups, -1, size)
            scores = (grouped @ keys).view(groups, -1, *hidden.shape) + hidden
            mixed = scores.softmax(-1).view(groups, -1, hidden.shape[1]) @ values
            parts.append(mixed.view(groups, -1, rows, size).permute(2, 0, 1, 3).reshape(rows, -1))
        return torch.cat(parts)


def _kv_layers(config: TrainConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target layer that each draft layer reads: `taps`, one for all or one each; without, layers over its depth."""
    count, last = config.num_layers or _LAYERS, target.num_layers - 1
    spread = [max(0, last - target.num_layers // 15 - i * (target.num_layers // (count + 1))) for i in range(count)]
    taps = config.taps or tuple(reversed(spread))
    if len(taps) not in (1, count) or max(taps) > last:
        raise ConfigError(
            f"taps is {list(taps)}, expected 1 or {count} layers up to {last}: the layers whose keys are read",
            param="taps",
        )
    return taps * count if len(taps) == 1 else taps


def _written(config: TrainConfig, teacher: Teacher, kv_layers: tuple[int, ...]) -> dict[str, Any]:
    """config.json of what is trained."""
    target = teacher.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": target.rope_theta}
    if target.rope_scaling is not None:
        if target.rope_scaling.kind != "linear":
            raise ConfigError(
                f"{teacher.name} has rotary scaling of type {target.rope_scaling.kind}, which this format does not"
                " know, expected none or linear"
            )
        rope |= {"rope_type": "linear", "factor": target.rope_scaling.factor}
    layers = {
        "model_type": "gemma4_text",
        "vocab_size": target.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "num_hidden_layers": len(kv_layers),
        "layer_types": ["full_attention"] * len(kv_layers),
        "num_kv_shared_layers": len(kv_layers),
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "global_head_dim": target.head_dim,
        "attention_k_eq_v": False,
        "rope_parameters": {"full_attention": rope},
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "draft_vocab_size": len(teacher.draft_ids),
        "target_kv_layers": list(kv_layers),
        "text_config": layers,
    }


def _mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    """down(gelu(gate x) * up x)."""
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (torch.nn.functional.gelu(x @ gate, approximate="tanh") * (x @ up)) @ down


def _fresh(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) > 1:
        return random_matrix(*shape)
    return torch.full(shape, _ADDS if ".post_" in name else 1.0)


def _widest(matrix: Tensor, count: int) -> Tensor:
    """An orthonormal basis [Dt, count] of the directions in which the rows [V, Dt] are longest; zeros past the last."""
    _, vectors = torch.linalg.eigh(matrix.T @ matrix)
    basis = vectors.flip(1)[:, :count]
    return torch.nn.functional.pad(basis, (0, count - basis.shape[1]))


def _size(matrix: Tensor) -> float:
    """The root mean square of a matrix's elements."""
    return float(matrix.pow(2).mean().sqrt())


def _query_size(teacher: Teacher, layer: int) -> Tensor:
    """How large the elements [E] of the target's queries are there, if what they are made of is even; scores' scale in.

    Queries of that size, unscaled, look as sharply as the target's do.
    """
    prefix, size = f"model.layers.{layer}.", teacher.config.head_dim
    weight = teacher.tensors[prefix + "self_attn.q_proj.weight"].float()
    weight = weight * teacher.tensors[prefix + "input_layernorm.weight"].float()
    energy: Tensor = weight.pow(2).sum(1).view(-1, size).mean(0)
    return (energy / size).sqrt()
