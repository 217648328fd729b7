"""Writing a drafter in a published format: what an exporter is, and the pieces that all methods' exporters share.

An exporter knows what its method's checkpoint means and gives the config and the tensors of each format that can hold
it; what a format cannot hold is refused by name. The two ends are told apart first: a copy of the target's embedding or
output matrix is no part of a drafter, and each format then gets the copies that it always stores. Not here: reading
(checkpoint.py, the leaves), files (train/export.py). Legend: V target vocabulary, Vd drafted vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.drafting.checkpoint import Checkpoint
from outrider.drafting.speculators import layer_table
from outrider.drafting.vocabulary import EMBEDDING, HEAD, OFFSETS, UNREAD
from outrider.errors import ConfigError
from outrider.models.arch import ModelConfig


@dataclass(frozen=True)
class ExportTarget:
    """What a file may need of its target: the name that it is to state, its classes, its shape, both tables [V, D]."""

    name: str
    architectures: tuple[str, ...]
    config: ModelConfig
    embedding: Tensor
    head: Tensor


@dataclass(frozen=True)
class Written:
    """A checkpoint to be: config.json and tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class Exporter(Protocol):
    """One checkpoint, read. `meaning` is equal for two files that draft alike but for their weights.

    `formats`: what gives a file in each format, told the N that it is to recommend; raises ConfigError for what the
    format cannot hold. `default_tokens`: that N where nothing else says it.
    """

    meaning: object
    default_tokens: int
    formats: Mapping[str, Callable[[int], Written]]


class ExporterClass(Protocol):
    """How an exporter is made. Raises LoadError for a config that cannot be read."""

    def __call__(self, checkpoint: Checkpoint, target: ExportTarget) -> Exporter:
        """The exporter of a checkpoint that loads for this target."""


@dataclass(frozen=True)
class Limit:
    """A key of which a format holds one value only, what this drafter has, and the format that holds more."""

    key: str
    given: object
    only: object
    instead: str = "take --format speculators"


def require(checkpoint: Checkpoint, format_name: str, limits: Iterable[Limit]) -> None:
    """Raise ConfigError naming the first key whose value the format cannot hold, and what to do."""
    for limit in limits:
        if limit.given != limit.only:
            raise ConfigError(
                f"drafter {checkpoint.source}: {limit.key} is {limit.given!r}, and --format {format_name} holds only"
                f" {limit.only!r}: {limit.instead}",
                param="format",
            )


@dataclass(frozen=True)
class Ends:
    """A drafter's own ends: embedding [V, D] and output matrix [Vd, D], None where it is the target's, and `offsets`
    [Vd] int64, None where all of the vocabulary is drafted.
    """

    embedding: Tensor | None
    head: Tensor | None
    offsets: Tensor | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: ExportTarget, draft_vocab_size: int) -> Ends:
        """What a checkpoint that loads has beyond copies of the target's; a copy is judged in the drafter's type."""
        tensors = checkpoint.tensors
        if draft_vocab_size < target.config.vocab_size:
            return cls(_own(tensors.get(EMBEDDING), target.embedding), tensors[HEAD], tensors[OFFSETS])
        return cls(_own(tensors.get(EMBEDDING), target.embedding), _own(tensors.get(HEAD), target.head), None)

    def tensors(self, target: ExportTarget, fill: Sequence[str] = ()) -> dict[str, Tensor]:
        """The ends by name; those of `fill` that are not the drafter's own are copied from the target."""
        own = {EMBEDDING: self.embedding, HEAD: self.head, OFFSETS: self.offsets}
        copies = {EMBEDDING: target.embedding, HEAD: target.head}
        found = {name: copies[name] if tensor is None and name in fill else tensor for name, tensor in own.items()}
        if self.offsets is not None:
            seen = torch.zeros(target.config.vocab_size, dtype=torch.bool)
            seen[torch.arange(len(self.offsets)) + self.offsets] = True
            found[UNREAD] = seen
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def _own(tensor: Tensor | None, shared: Tensor) -> Tensor | None:
    if tensor is None or (tensor.shape == shared.shape and torch.equal(tensor, shared.to(tensor.dtype))):
        return None
    return tensor


def layer_keys(model: ModelConfig, windows: Sequence[int | None], logit_scale: float = 1.0) -> dict[str, Any]:
    """The keys that describe the draft layers; `windows` has one a layer, of one size where there is one.

    `logit_scale` is among them where it is not 1: vLLM looks for it there in every format.
    """
    table = layer_table(model)
    if logit_scale != 1:
        table["logit_scale"] = logit_scale
    size = next((window for window in windows if window is not None), None)
    if size is None:
        return table
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return table | {"layer_types": kinds, "sliding_window": size, "use_sliding_window": True}


def values(record: object, names: Iterable[str]) -> dict[str, Any]:
    """Fields of a settings record, by their names in the file."""
    return {name: getattr(record, name) for name in names}


def comparable(model: ModelConfig) -> ModelConfig:
    """The same without what says nothing about drafting."""
    return replace(model, dtype=None, eos_token_ids=(), bos_token_id=None, tie_word_embeddings=False)
