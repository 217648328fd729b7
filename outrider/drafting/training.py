"""What a drafter that can be trained is: a trainee with parameters, a loss over captured states, and a checkpoint.

The trainer knows nothing else of a method. Everything is packed: conversations lie one after the other, and `starts`
says where each begins. Not here: networks (the leaves), their shared parts (differentiable.py), the loop that steps
the optimiser (train). Legend: T packed tokens, K taps, D target width, V vocabulary, Vd drafted vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.drafting.train_config import TrainConfig
from outrider.errors import ConfigError
from outrider.models.arch import ModelConfig, TargetConfig
from outrider.models.gemma_config import GemmaConfig
from outrider.models.layers import reference_rms_norm
from outrider.models.loading import load_tensors
from outrider.models.target import Target

_HEAD_DIM = 64


@dataclass(frozen=True)
class TrainingBatch:
    """Some conversations: ids [T] int64, is_response [T] bool, taps by layer [T, D], first tokens and the end."""

    ids: Tensor
    is_response: Tensor
    taps: Mapping[int, Tensor]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class TrainingLoss:
    """A sum over rows and what to divide it by, so that any number of processes can add up theirs.

    `agreed` and `counted` [N]: at each draft position, in how many rows the draft is the teacher's likeliest token.
    """

    total: Tensor
    weight: float
    agreed: Tensor
    counted: Tensor

    @classmethod
    def of_nothing(cls, num_drafts: int) -> TrainingLoss:
        """The loss of conversations too short to teach anything; it has no gradient, and may be asked for it."""
        return cls(torch.zeros((), requires_grad=True), 0.0, torch.zeros(num_drafts), torch.zeros(num_drafts))


class Teacher:
    """The target's two ends, frozen: embeddings for the drafter, and the distribution that it is to learn.

    `config`: the shape that draft layers take over. `draft_ids` [Vd] int64 ascending: the target ids that can be
    drafted. `tensors`: the target's, those of its layers only where they are of the Llama family.
    """

    soft_cap: float | None = None

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], draft_ids: Tensor, *, dtype: torch.dtype, name: str
    ) -> None:
        self.config, self.draft_ids, self.dtype, self.name = config, draft_ids, dtype, name
        family = config.model_type.removesuffix("_text").replace("_", " ").title().replace(" ", "")
        self.architectures = (f"{family}ForCausalLM",)
        self.tensors = tensors
        self.embedding = tensors["model.embed_tokens.weight"].to(dtype)
        head = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.head = head[draft_ids].to(dtype)
        self.norm_weight = tensors["model.norm.weight"].float()
        self.is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.is_drafted[draft_ids] = True

    @classmethod
    def of(cls, target: Target, draft_ids: Tensor, *, dtype: torch.dtype, name: str) -> Teacher:
        """A loaded target as a teacher. `name` is what its checkpoint is called."""
        if isinstance(target.config, ModelConfig) and target.folder is not None:
            return cls(target.config, load_tensors(target.folder), draft_ids, dtype=dtype, name=name)
        tensors = {
            "model.embed_tokens.weight": target.embedding,
            "model.norm.weight": target.norm.weight,
            "lm_head.weight": target.lm_head.rows(),
        }
        teacher = cls(shape_for_drafts(target.config, target.norm.eps), tensors, draft_ids, dtype=dtype, name=name)
        if isinstance(target.config, GemmaConfig):
            teacher.soft_cap = target.config.final_soft_cap
        return teacher

    def expect_layers(self, method: str) -> None:
        """Refuse a target whose layers are no Llama's. Raises ConfigError naming the method, which builds on them."""
        if "model.layers.0.input_layernorm.weight" not in self.tensors:
            raise ConfigError(
                f"{method} builds on the target's own layers, expected a target of the Llama family, got"
                f" {self.config.model_type}",
                param="method",
            )

    def ends(self) -> dict[str, Tensor]:
        """The tensors that say what can be drafted, for the checkpoint: output rows, and how they map to target ids."""
        tensors = {"lm_head.weight": self.head}
        if len(self.draft_ids) < self.config.vocab_size:
            tensors |= {"d2t": self.draft_ids - torch.arange(len(self.draft_ids)), "t2d": self.is_drafted}
        return tensors

    def probs(self, batch: TrainingBatch, rows: Tensor) -> Tensor:
        """The distribution of the next token after each of these rows [R], over what can be drafted: [R, Vd].

        Renormalised over the drafted tokens; rows whose next token cannot be drafted are the caller's to leave out.
        """
        last = batch.taps[self.config.num_layers][rows]
        states = reference_rms_norm(last, self.norm_weight, self.config.rms_norm_eps).to(self.dtype)
        logits = (states @ self.head.T).float()
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return torch.softmax(logits, dim=-1).to(self.dtype)


def shape_for_drafts(config: TargetConfig, norm_eps: float) -> ModelConfig:
    """The shape of Llama layers that draft for a target of whatever family.

    A Gemma's sliding layers give the heads, for they are the many; of a family that is not known more than its width,
    heads are 64 wide and the MLP four times the width.
    """
    if isinstance(config, ModelConfig):
        return config
    known: dict[str, Any] = {key: getattr(config, key) for key in TargetConfig.__dataclass_fields__}
    if isinstance(config, GemmaConfig):
        layer = config.layers[0]
        heads: dict[str, Any] = {
            "num_heads": config.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim,
            "intermediate_size": layer.intermediate_size,
        }
    else:
        count = max(1, config.hidden_size // _HEAD_DIM)
        sizes = (count, count, _HEAD_DIM, 4 * config.hidden_size)
        heads = dict(zip(("num_heads", "num_kv_heads", "head_dim", "intermediate_size"), sizes, strict=True))
    return ModelConfig(**known, **heads, rms_norm_eps=norm_eps, rope_theta=10_000.0)


class Trainee(Protocol):
    """`taps`: layers whose states it needs beside the last one; `parameters`: trained, float32, by checkpoint name."""

    taps: tuple[int, ...]
    parameters: Mapping[str, torch.nn.Parameter]

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> TrainingLoss:
        """The loss of a batch; `generator` is the only source of randomness."""

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors as they are published, in the Speculators format."""


def spread_taps(num_layers: int, count: int = 3) -> tuple[int, ...]:
    """Layers to read where nobody says: one early, one late, the others between; fewer where layers are few."""
    if count == 1:
        return (num_layers // 2,)
    first, last = min(2, num_layers), max(0, num_layers - 3)
    return tuple(sorted({int(first + (last - first) * i / (count - 1) + 0.5) for i in range(count)}))


class TraineeClass(Protocol):
    """How a trainee is made."""

    def __call__(self, config: TrainConfig, teacher: Teacher) -> Trainee:
        """A network with fresh weights."""
