"""A draft network's two ends: the table that embeds target ids, and the matrix that scores what may be drafted.

Either is the checkpoint's own or the target's. The scored vocabulary may be smaller than the target's; then `d2t` says
by how much each draft id has to be raised to be the target's id. Everything else of the project speaks target ids.
Source: EAGLE-3's reduced vocabulary, as in vLLM 0.32 `llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafting.base import TargetInfo
from outrider.errors import DrafterMismatch
from outrider.models.linear import Linear

EMBEDDING, HEAD, OFFSETS, UNREAD = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


@dataclass(frozen=True)
class DraftVocabulary:
    """`embedding` [V, D]; `head`: states [T, D] -> logits [T, Vd]; `offsets` [Vd] int64, None where Vd is V."""

    embedding: Tensor
    head: Linear
    offsets: Tensor | None
    vocab_size: int

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids for draft ids, of any shape."""
        return draft_ids if self.offsets is None else draft_ids + self.offsets[draft_ids]

    def widen(self, logits: Tensor) -> Tensor:
        """Logits [T, V] over target ids from those over draft ids [T, Vd]; what cannot be drafted has -inf."""
        if self.offsets is None:
            return logits
        ids = torch.arange(len(self.offsets), device=logits.device) + self.offsets
        wide = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        wide[:, ids] = logits
        return wide


def end_shapes(vocab_size: int, draft_vocab_size: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a checkpoint may have for its two ends; `t2d` says for training what `d2t` says."""
    return {
        EMBEDDING: (vocab_size, width),
        HEAD: (draft_vocab_size, width),
        OFFSETS: (draft_vocab_size,),
        UNREAD: (vocab_size,),
    }


def draft_vocabulary(
    tensors: Mapping[str, Tensor], target: TargetInfo, *, width: int, draft_vocab_size: int, source: str
) -> DraftVocabulary:
    """The two ends from a checkpoint's tensors (already on the target's device and of its type) and the target.

    Raises DrafterMismatch where the target's embedding or output matrix would be needed and does not fit, and where
    `d2t` is missing or leads outside the target's vocabulary.
    """
    config = target.model.config
    shared = target.model.embedding
    embedding = tensors.get(EMBEDDING)
    missing = [name for name in (EMBEDDING, HEAD) if name not in tensors]
    if missing and width != config.hidden_size:
        raise DrafterMismatch(
            f"drafter {source} has width {width} and no {missing[0]}, and the target's is {config.hidden_size} wide:"
            " it needs its own",
            param="model",
        )
    if embedding is None or (embedding.shape == shared.shape and torch.equal(embedding, shared)):
        embedding = shared
    if HEAD not in tensors and draft_vocab_size != config.vocab_size:
        raise DrafterMismatch(
            f"drafter {source} drafts from {draft_vocab_size} of {config.vocab_size} tokens and has no {HEAD}:"
            " a reduced vocabulary needs its own",
            param="model",
        )
    head = Linear(tensors[HEAD]) if HEAD in tensors else target.model.lm_head
    offsets = None
    if draft_vocab_size != config.vocab_size:
        offsets = _offsets(tensors, draft_vocab_size, config.vocab_size, source)
    return DraftVocabulary(embedding, head, offsets, config.vocab_size)


def _offsets(tensors: Mapping[str, Tensor], size: int, vocab_size: int, source: str) -> Tensor:
    offsets = tensors.get(OFFSETS)
    if offsets is None:
        raise DrafterMismatch(
            f"drafter {source} drafts from {size} of {vocab_size} tokens and has no {OFFSETS} to name them",
            param="model",
        )
    ids = torch.arange(size, device=offsets.device) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != size:
        raise DrafterMismatch(
            f"drafter {source}: {OFFSETS} does not lead to {size} different ids below {vocab_size}", param="model"
        )
    return offsets.contiguous()
