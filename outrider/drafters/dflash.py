"""DFlash: one pass over a block of mask tokens drafts all of it, reading the target's states in every layer.

The drafts of a round are independent of each other given the text, so they are drawn at once. The loop and the layers
are in `drafting`; here are the method's own settings, read and written, and its sampling. DeepSpec's `dflash_*`
checkpoints, DSpark networks without a correction, run here too, in the layout that predicts from the anchor on.
Sources: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", z-lab/dflash; vLLM 0.32
`qwen3_dflash.py` and `configs/speculators/algos.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import SpeculativeConfig
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.block import split_chains
from outrider.drafting.block_config import NESTED, BlockConfig, read_block_config
from outrider.drafting.block_export import BlockExport
from outrider.drafting.block_loading import load_block
from outrider.drafting.checkpoint import Checkpoint, read_checkpoint
from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.drawing import top_probs, top_probs_of
from outrider.drafting.export import ExportTarget, Limit, Written
from outrider.errors import DrafterMismatch
from outrider.sampling import distributions, draft_group, draw, greedy
from outrider.types import Proposal


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """What a DFlash checkpoint's config says; `logit_scale` multiplies the logits."""

    block: BlockConfig
    logit_scale: float = 1.0

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, source: str) -> DFlashConfig:
        """From config.json in the z-lab, DeepSpec or Speculators format. Raises LoadError naming the key."""
        keys = ConfigKeys(raw, source, NESTED)
        causal = keys.optional_flag("is_causal")
        if causal is None:
            causal = keys.optional_flag("causal")
        if causal is None and keys.is_speculators:
            # vLLM reads the missing key as true, and false as causal for every layer, whatever its kind.
            causal = not keys.flag("sliding_window_non_causal", True)
        anchored = any("DSpark" in name for name in keys.architectures)
        block = read_block_config(keys, sample_from_anchor=anchored, causal=causal)
        if anchored and keys.count("markov_rank", 0, least=0):
            raise keys.error("markov_rank is above 0, so this is a DSpark drafter: use method dspark")
        return cls(block=block, logit_scale=keys.number("logit_scale", 1.0))


class DFlashDrafter:
    """Drafts whole blocks in one pass; `model` in the configuration names the checkpoint."""

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.model is None:
            raise DrafterMismatch('dflash needs a drafter: add "model" to the speculative config', param="model")
        checkpoint = read_checkpoint(config.model)
        ours = DFlashConfig.read(checkpoint.config, source=checkpoint.source)
        parts = load_block(checkpoint, ours.block, {}, target)
        self.taps = ours.block.taps
        self._loop, self._vocabulary, self._scale = parts.loop, parts.vocabulary, ours.logit_scale

    def begin(self, slot: int) -> None:
        """Nothing to prepare: what is filled is known by block."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    def propose(self, context: DraftContext) -> Proposal:
        """As many drafts as wanted for each request, all at once. Cost: one pass, and one for new context rows."""
        budgets = self._loop.budgets(context)
        if not any(budgets):
            return Proposal(((),) * len(budgets))
        logits = self._vocabulary.head(self._loop.states(context, budgets), wide=True)
        if self._scale != 1:
            logits *= self._scale
        if context.sample_method == "greedy":
            chosen = greedy(logits)
            sure = None if context.pace is None else split_chains(top_probs(logits, chosen).tolist(), budgets)
            return Proposal(split_chains(self._vocabulary.to_target(chosen).tolist(), budgets), top_probs=sure)
        pairs = zip(context.groups, budgets, strict=True)
        groups = [draft_group(group, 0, budget) for group, budget in pairs if budget]
        drawn_from = distributions(self._vocabulary.widen(logits), groups)
        sure = None if context.pace is None else split_chains(top_probs_of(drawn_from).tolist(), budgets)
        return Proposal(split_chains(draw(drawn_from, groups, context.purpose), budgets), drawn_from, top_probs=sure)


class DFlashExporter:
    """One checkpoint, to be written in the Speculators format, z-lab's flat one, or DeepSpec's.

    z-lab's own code embeds and scores with the target's matrices, whatever the file holds. vLLM would read others from
    it, but then one file would draft differently here and there: z-lab's format is for drafters whose ends are the
    target's. DeepSpec's file is a DSpark network without a correction.
    """

    def __init__(self, checkpoint: Checkpoint, target: ExportTarget) -> None:
        config = DFlashConfig.read(checkpoint.config, source=checkpoint.source)
        extras = {} if config.logit_scale == 1 else {"logit_scale": config.logit_scale}
        self._config, self._block = config, BlockExport(checkpoint, config.block, {}, extras, target)
        self.meaning = replace(config, block=self._block.meaning)
        self.default_tokens = self._block.default_tokens
        self.formats = {"speculators": self._speculators, "z-lab": self._zlab, "deepspec": self._deepspec}

    def _speculators(self, num_speculative_tokens: int) -> Written:
        # The format's readers take its one key for all layers alike, whatever their kinds.
        mixed = None if self._block.uniform is not None else "one for sliding, another for full layers"
        self._block.require("speculators", [Limit("causality of layers", mixed, None, "take --format z-lab")])
        return self._block.speculators("dflash", "DFlashSpeculator", num_speculative_tokens)

    def _zlab(self, _: int) -> Written:
        block, ends, own = self._config.block, self._block.ends, "its own, not the target's"
        limits = [
            Limit("sample_from_anchor", block.sample_from_anchor, False),
            Limit("draft_vocab_size", block.draft_vocab_size, block.model.vocab_size),
            Limit("target_hidden_size", block.target_hidden_size, block.model.hidden_size),
            Limit("embed_tokens", None if ends.embedding is None else own, None),
            Limit("lm_head", None if ends.head is None else own, None),
        ]
        self._block.require("z-lab", limits)
        nested: dict[str, Any] = {"mask_token_id": block.mask_token_id, "target_layer_ids": self._block.layer_ids()}
        if self._block.causal is not None:
            nested["causal"] = self._block.causal
        table = {"architectures": ["DFlashDraftModel"]} | self._block.layers() | self._block.flat_keys()
        return Written(table | {NESTED: nested}, self._block.network())

    def _deepspec(self, _: int) -> Written:
        written = self._block.deepspec([Limit("logit_scale", self._config.logit_scale, 1.0)])
        return Written(written.config | {"markov_rank": 0, "enable_confidence_head": False}, written.tensors)
