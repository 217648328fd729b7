"""From a block drafter's checkpoint to its running parts, with every check before the first draft.

The leaf has read its settings; here the tensors are held against them and against the target, and put together. What is
missing, left over, of another shape or type, or not finite is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.drafting.base import TargetInfo
from outrider.drafting.block import BlockLoop
from outrider.drafting.block_config import BlockConfig
from outrider.drafting.block_layers import Backbone, backbone_shapes
from outrider.drafting.checkpoint import Checkpoint, MadeFor, Shapes, check_tensors, placed
from outrider.drafting.vocabulary import DraftVocabulary, draft_vocabulary, end_shapes

_PICKLED_MASK = "mask_embedding.pt"


@dataclass(frozen=True)
class BlockParts:
    """A loaded block drafter: its loop, its two ends, and the tensors that only its method knows."""

    loop: BlockLoop
    vocabulary: DraftVocabulary
    tensors: Mapping[str, Tensor]


def load_block(checkpoint: Checkpoint, config: BlockConfig, own: Shapes, target: TargetInfo) -> BlockParts:
    """Check and assemble a checkpoint; `own` are the shapes of the method's own tensors. Raises DrafterMismatch."""
    model = config.model
    made_for = MadeFor(
        model.vocab_size, config.target_hidden_size, config.num_target_layers, config.taps, config.draft_vocab_size
    )
    made_for.check(checkpoint, target.model.config)
    if config.mask_token_id >= model.vocab_size:
        raise checkpoint.mismatch(
            f"has mask token {config.mask_token_id}, outside its vocabulary of {model.vocab_size}"
        )
    if (Path(checkpoint.source) / _PICKLED_MASK).exists():
        # It replaces the mask token's embedding; without it the drafts would silently be worse.
        raise checkpoint.mismatch(
            f"brings {_PICKLED_MASK}, a pickle, which is never opened: export it into embed_tokens"
        )
    ends = end_shapes(model.vocab_size, config.draft_vocab_size, model.hidden_size)
    check_tensors(checkpoint, backbone_shapes(config) | dict(own), ends)
    tensors = placed(checkpoint, target.model.embedding)
    vocabulary = draft_vocabulary(
        tensors,
        target,
        width=model.hidden_size,
        draft_vocab_size=config.draft_vocab_size,
        source=config.source,
    )
    backbone = Backbone(config, tensors, max_len=target.max_len)
    return BlockParts(BlockLoop(config, backbone, vocabulary.embedding, target), vocabulary, tensors)
