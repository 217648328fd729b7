"""What the exporters of DFlash and DSpark share: the backbone's keys in each format, and its tensors.

Speculators lists layers as counts of layers run, flat files by the layer whose output it is. Who sees what is said by
the kind of each layer (sliding ones causal, full ones not) wherever the kinds say it, so that readers that know no
other rule agree; a key is written only where they do not. Sources: vLLM 0.32 `qwen3_dflash.py` and
`configs/speculators/algos.py`; DeepSpec `modeling/dspark`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.drafting.block_config import BlockConfig
from outrider.drafting.block_layers import backbone_shapes
from outrider.drafting.checkpoint import Checkpoint, Shapes
from outrider.drafting.export import (
    Ends,
    ExportTarget,
    Limit,
    Written,
    comparable,
    layer_keys,
    require,
)
from outrider.drafting.speculators import speculators_keys
from outrider.drafting.vocabulary import EMBEDDING, HEAD

_ADD_SIZE = "add block_size to its config.json"


@dataclass(frozen=True)
class BlockExport:
    """One block drafter's checkpoint; `own`: shapes of the method's own tensors, `layer_extras`: keys beside the
    layers' that change the forward pass.
    """

    checkpoint: Checkpoint
    block: BlockConfig
    own: Shapes
    layer_extras: Mapping[str, Any]
    target: ExportTarget

    @property
    def meaning(self) -> BlockConfig:
        """The backbone's settings without what says nothing about drafting."""
        num_layers = self.target.config.num_layers
        return replace(self.block, source="", num_target_layers=num_layers, model=comparable(self.block.model))

    @property
    def default_tokens(self) -> int:
        """The drafts of a whole block, as far as its size is known."""
        return max(1, (self.block.block_size or 1) - (not self.block.sample_from_anchor))

    @property
    def ends(self) -> Ends:
        """The drafter's own ends."""
        return Ends.of(self.checkpoint, self.target, self.block.draft_vocab_size)

    @property
    def causal(self) -> bool | None:
        """Whether all layers are causal or none is; None where each is as its kind says."""
        masks = self.block.masks
        by_kind = all(mask.causal == (mask.window is not None) for mask in masks)
        return None if by_kind else masks[0].causal

    @property
    def uniform(self) -> bool | None:
        """The same, None only where layers differ."""
        found = {mask.causal for mask in self.block.masks}
        return found.pop() if len(found) == 1 else None

    def layers(self) -> dict[str, Any]:
        """The layers' keys."""
        return layer_keys(self.block.model, [mask.window for mask in self.block.masks]) | dict(self.layer_extras)

    def network(self) -> dict[str, Tensor]:
        """Every tensor but the ends."""
        return {name: self.checkpoint.tensors[name] for name in {**backbone_shapes(self.block), **self.own}}

    def require(self, format_name: str, limits: Iterable[Limit]) -> None:
        """Refuse what the format cannot hold, and a block of unknown size, which none can."""
        has_size = Limit("block_size", self.block.block_size, self.block.block_size or "a whole number", _ADD_SIZE)
        require(self.checkpoint, format_name, [has_size, *limits])

    def flat_keys(self) -> dict[str, Any]:
        """What every flat file says of the block."""
        return {"block_size": self.block.block_size, "num_target_layers": self.target.config.num_layers}

    def layer_ids(self) -> list[int]:
        """The tapped layers as flat files number them; -1 is the embedding."""
        return [tap - 1 for tap in self.block.taps]

    def speculators(self, method: str, class_name: str, num_speculative_tokens: int) -> Written:
        """In the Speculators format, without the method's own keys."""
        table = speculators_keys(method, class_name, self.layers(), self.target, num_speculative_tokens)
        table |= self.block.speculators_keys(self.target.config.num_layers)
        return Written(table, self.network() | self.ends.tensors(self.target, (HEAD,)))

    def deepspec(self, limits: Iterable[Limit]) -> Written:
        """In DeepSpec's format, without the heads' keys; `limits` are the method's further ones."""
        block = self.block
        mine = [
            Limit("sample_from_anchor", block.sample_from_anchor, True),
            Limit("draft_vocab_size", block.draft_vocab_size, block.model.vocab_size),
            Limit("target_hidden_size", block.target_hidden_size, block.model.hidden_size),
            Limit("sliding_window", self._window(), None),
            Limit("is_causal", self.uniform, False),
        ]
        self.require("deepspec", [*mine, *limits])
        table = {"architectures": ["Qwen3DSparkModel"]} | self.layers() | self.flat_keys()
        table |= {
            "layer_types": ["full_attention"] * block.model.num_layers,
            "target_layer_ids": self.layer_ids(),
            "mask_token_id": block.mask_token_id,
        }
        return Written(table, self.network() | self.ends.tensors(self.target, (EMBEDDING, HEAD)))

    def _window(self) -> int | None:
        return next((mask.window for mask in self.block.masks if mask.window is not None), None)
