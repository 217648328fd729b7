"""From a block drafter's checkpoint to its running parts, with every check before the first draft.

The leaf has read its settings; here the tensors are held against them and against the target, and put together. What is
missing, left over, of another shape or type, or not finite is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafting.base import TargetInfo
from outrider.drafting.block import BlockLoop
from outrider.drafting.block_config import BlockConfig
from outrider.drafting.block_layers import Backbone, backbone_shapes
from outrider.drafting.checkpoint import Checkpoint
from outrider.drafting.vocabulary import EMBEDDING, HEAD, OFFSETS, DraftVocabulary, draft_vocabulary

Shapes = Mapping[str, tuple[int, ...]]
_PICKLED_MASK = "mask_embedding.pt"
# Which target tokens can be drafted: the training's view of what d2t says.
_IGNORED = "t2d"


@dataclass(frozen=True)
class BlockParts:
    """A loaded block drafter: its loop, its two ends, and the tensors that only its method knows."""

    loop: BlockLoop
    vocabulary: DraftVocabulary
    tensors: Mapping[str, Tensor]


def load_block(checkpoint: Checkpoint, config: BlockConfig, own: Shapes, target: TargetInfo) -> BlockParts:
    """Check and assemble a checkpoint; `own` are the shapes of the method's own tensors. Raises DrafterMismatch."""
    config.check_target(target)
    if (Path(checkpoint.source) / _PICKLED_MASK).exists():
        # It replaces the mask token's embedding; without it the drafts would silently be worse.
        raise config.mismatch(f"brings {_PICKLED_MASK}, a pickle, which is never opened: export it into embed_tokens")
    model = config.model
    optional: dict[str, tuple[int, ...]] = {
        EMBEDDING: (model.vocab_size, model.hidden_size),
        HEAD: (config.draft_vocab_size, model.hidden_size),
        OFFSETS: (config.draft_vocab_size,),
        _IGNORED: (model.vocab_size,),
    }
    required = backbone_shapes(config) | dict(own)
    _check_names(checkpoint.tensors, required, optional, config)
    for name, shape in (required | optional).items():
        if name in checkpoint.tensors:
            _check_tensor(name, checkpoint.tensors[name], shape, config)
    device, dtype = target.model.device, target.model.embedding.dtype
    tensors = {name: _placed(tensor, device, dtype) for name, tensor in checkpoint.tensors.items() if name != _IGNORED}
    vocabulary = draft_vocabulary(
        tensors,
        target,
        width=model.hidden_size,
        draft_vocab_size=config.draft_vocab_size,
        source=config.source,
    )
    backbone = Backbone(config, tensors, max_len=target.max_len)
    return BlockParts(BlockLoop(config, backbone, vocabulary.embedding, target), vocabulary, tensors)


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _check_names(tensors: Mapping[str, Tensor], required: Shapes, optional: Shapes, config: BlockConfig) -> None:
    if missing := [name for name in required if name not in tensors]:
        raise config.mismatch(f"lacks {_some(missing)}, which its config asks for: fetch it again")
    if left := sorted(tensors.keys() - required.keys() - optional.keys()):
        raise config.mismatch(f"has {_some(left)}, which its config has no use for: config and tensors do not belong")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], config: BlockConfig) -> None:
    if tuple(tensor.shape) != shape:
        raise config.mismatch(f"has {name} of shape {list(tensor.shape)}, expected {list(shape)} from its config")
    wanted = {OFFSETS: torch.int64, _IGNORED: torch.bool}.get(name)
    if wanted is not None:
        if tensor.dtype != wanted:
            raise config.mismatch(f"has {name} in {tensor.dtype}, expected {wanted}")
        return
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise config.mismatch(f"has {name} in {tensor.dtype}, expected bfloat16, float16 or float32")
    # NaN and infinity show in the extremes, which cost one pass and no copy.
    if not all(torch.isfinite(edge) for edge in torch.aminmax(tensor)):
        raise config.mismatch(f"has NaN or infinity in {name}, expected finite weights: fetch it again")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
