"""Native multi-token prediction: a module of the target's own checkpoint drafts one token after the other.

One decoder layer of the target's kind reads the target's last state beside the embedding of the row's next token; from
the second draft on, the module's own state stands in for that one. Embedding and output matrix are the target's; of
the matrix a module may bring its own, for a part of the vocabulary (`mtp.lm_head.weight`, `mtp.d2t`; an extension). In
what published layouts differ is in `drafting/mtp_layouts.py`.

Not here: the loops (`drafting/autoregressive.py`; of several modules, `drafting/modules.py`), and Gemma 4's module,
which has no cache of its own. Sources: Gloeckle et al., arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437; vLLM 0.32
`mimo_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py`, `config/speculative.py`. Legend: T rows, R last rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting.autoregressive import AutoregressiveLoop, first_seen
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.checkpoint import (
    MODULE_KEYS,
    Checkpoint,
    MadeFor,
    check_tensors,
    module_folder,
    module_of,
    placed,
    read_checkpoint,
)
from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.modules import ModuleLoop
from outrider.drafting.mtp_layouts import Layout, layout_of
from outrider.drafting.vocabulary import HEAD, OFFSETS, UNREAD, draft_vocabulary, end_shapes
from outrider.errors import ConfigError
from outrider.models.arch import FAMILIES, ModelConfig, TargetConfig, expected_shapes, parse_config
from outrider.models.attention import Batch, LayerCache
from outrider.models.hf import HfModel
from outrider.models.hf_loading import read_hf, target_config
from outrider.models.layers import RMSNorm, rope_tables, take_rows
from outrider.models.linear import Linear
from outrider.models.llama import DecoderLayer
from outrider.types import Proposal

_LAYER = "model.layers.0."
_ENDS = {f"mtp.{name}": name for name in (HEAD, OFFSETS, UNREAD)}


@dataclass(frozen=True)
class MtpConfig:
    """What a folder says of its module. `model`: the target that it belongs to, whose layer is the module's too."""

    model: TargetConfig
    layout: Layout
    num_modules: int
    draft_vocab_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> MtpConfig:
        """From config.json, which is the target's, and the names of the tensors. Raises LoadError naming the key."""
        keys = ConfigKeys(checkpoint.config, checkpoint.source, "text_config")
        if keys.is_speculators or "speculators_model_type" in keys.raw:
            raise keys.error("a module in the Speculators format has to be put into its target's checkpoint first")
        model = _target_of(keys)
        layout = layout_of(checkpoint.tensors, model.model_type, model.num_layers)
        stated = [key for key in MODULE_KEYS if keys.get(key) is not None]
        num_modules = keys.count(stated[0]) if stated else 1
        return cls(model, layout, num_modules, keys.count("draft_vocab_size", model.vocab_size))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the modules must have; of their layers only where they are our own."""
        layout, shapes = self.layout, dict[str, tuple[int, ...]]()
        for index in range(self.num_modules):
            shapes |= layout.own_shapes(self.model.hidden_size, index)
            if isinstance(self.model, ModelConfig):
                names = expected_shapes(self.model).items()
                prefix = layout.layer_prefix(index)
                shapes |= {prefix + name.removeprefix(_LAYER): size for name, size in names if name.startswith(_LAYER)}
        return shapes

    def end_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of what a module may have of an output matrix; one over all of the target's it may not."""
        size, model = self.draft_vocab_size, self.model
        shapes = end_shapes(model.vocab_size, size, model.hidden_size) if size < model.vocab_size else {}
        return {name: shape for name, shape in shapes.items() if name in _ENDS.values()}

    def check_length(self, num_speculative_tokens: int) -> None:
        """Raise ConfigError for an N that is longer than the modules are many, and no multiple of it."""
        if num_speculative_tokens > self.num_modules and num_speculative_tokens % self.num_modules:
            raise ConfigError(
                f"num_speculative_tokens is {num_speculative_tokens}, expected a multiple of {self.num_modules}, the"
                " number of the target's prediction modules, or less",
                param="num_speculative_tokens",
            )


class MtpDrafter:
    """Drafts token by token from the target's last state; `model` may name a folder with another module for it."""

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        checkpoint = _module(config.model or module_folder(target.model), target)
        ours = MtpConfig.read(checkpoint)
        ours.check_length(config.num_speculative_tokens)
        theirs, model = target.model.config, ours.model
        self.taps: tuple[int, ...] = (theirs.num_layers,)
        made_for = MadeFor(model.vocab_size, model.hidden_size, model.num_layers, self.taps, ours.draft_vocab_size)
        made_for.check(checkpoint, theirs)
        if not isinstance(model, ModelConfig) and not isinstance(target.model, HfModel):
            raise checkpoint.mismatch(f"is a {model.model_type}'s module, the target a {theirs.model_type}")
        known = _known_by_name(checkpoint, ours)
        check_tensors(known, ours.shapes(), ours.end_shapes())
        tensors = placed(known, target.model.embedding)
        vocabulary = draft_vocabulary(
            tensors,
            target,
            width=model.hidden_size,
            draft_vocab_size=ours.draft_vocab_size,
            source=checkpoint.source,
        )
        parts = _Parts(ours, tensors, vocabulary.head, target, checkpoint)
        length = config.num_speculative_tokens
        networks = [_Network(parts, index) for index in range(min(length, ours.num_modules))]
        self._loop: AutoregressiveLoop | ModuleLoop
        if len(networks) == 1:
            self._loop = AutoregressiveLoop(networks[0], vocabulary, self.taps, target)
        else:
            self._loop = ModuleLoop(networks, vocabulary, self.taps, target, length)

    def begin(self, slot: int) -> None:
        """Nothing to prepare: what is filled is known by block."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    def propose(self, context: DraftContext) -> Proposal:
        """As many drafts as wanted for each request. Cost: one pass over new rows, one row for each further draft."""
        return self._loop.propose(context)


def _module(name: str, target: TargetInfo) -> Checkpoint:
    """The module in that folder: all that a folder of its own holds, a part of what the target's does."""
    checkpoint = read_checkpoint(name)
    module, own = module_of(checkpoint), target.model.folder
    if not module:
        raise checkpoint.mismatch("holds no multi-token prediction module: no tensor mtp.* or mtp_layers.*")
    is_targets = own is not None and own.resolve() == Path(checkpoint.source).resolve()
    tensors = module if is_targets else checkpoint.tensors
    return replace(checkpoint, tensors={_ENDS.get(name, name): tensor for name, tensor in tensors.items()})


def _target_of(keys: ConfigKeys) -> TargetConfig:
    """The target that config.json is of, run by code of our own or by transformers. Raises LoadError."""
    source = str(Path(keys.source) / "config.json")
    if keys.raw.get("model_type") in FAMILIES:
        return parse_config(keys.raw, {}, source=source)
    return target_config(read_hf(keys.raw, source), keys.raw, {}, source)


def _known_by_name(checkpoint: Checkpoint, config: MtpConfig) -> Checkpoint:
    """The tensors without those of a layer that transformers runs: it looks after them itself."""
    if isinstance(config.model, ModelConfig):
        return checkpoint
    layout, known, tensors = config.layout, config.shapes(), dict(checkpoint.tensors)
    for index in range(config.num_modules):
        prefix, ends = layout.layer_prefix(index), layout.ends(index)
        tensors = {n: t for n, t in tensors.items() if n in known or not (n.startswith(prefix) or n in ends)}
    return replace(checkpoint, tensors=tensors)


class _Layer(Protocol):
    """A module's decoder layer."""

    def new_cache(self, num_slots: int) -> LayerCache:
        """Empty keys and values for that many slots."""

    def __call__(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Residual streams [T, D] before the layer -> after it."""


class _OwnLayer:
    """The decoder layer of a target that our own code runs."""

    def __init__(self, model: ModelConfig, tensors: Mapping[str, Tensor], prefix: str, target: TargetInfo) -> None:
        tables = rope_tables(model.head_dim, target.max_len, model.rope_theta, model.rope_scaling)
        rope = (tables[0].to(target.model.device), tables[1].to(target.model.device))
        self._model, self._like = model, target.model.embedding
        self._layer = DecoderLayer(model, tensors, prefix, rope)

    def new_cache(self, num_slots: int) -> LayerCache:
        """Empty keys and values for that many slots."""
        return LayerCache(num_slots, self._model.num_kv_heads, self._model.head_dim, self._like)

    def __call__(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """Residual streams [T, D] before the layer -> after it."""
        return hidden + self._layer(hidden, None, batch, first_seen(batch, self._model.sliding_window), cache)


@dataclass(frozen=True)
class _Parts:
    """What the modules are made from; `tensors` are on the target's device, without what transformers looks after."""

    config: MtpConfig
    tensors: Mapping[str, Tensor]
    head: Linear
    target: TargetInfo
    checkpoint: Checkpoint

    def layer(self, index: int) -> _Layer:
        """A module's decoder layer."""
        layout, model = self.config.layout, self.config.model
        if isinstance(model, ModelConfig):
            return _OwnLayer(model, self.tensors, layout.layer_prefix(index), self.target)
        assert isinstance(self.target.model, HfModel)
        tensors = layout.layer_tensors(self.checkpoint.tensors, index)
        return self.target.model.extra_layer(tensors, self.checkpoint.source)

    def norm(self, name: str, index: int) -> RMSNorm:
        """One of a module's norms, by the rules of the target's family."""
        weight = self.tensors[self.config.layout.name(name, index)]
        if isinstance(self.config.model, ModelConfig):
            return RMSNorm(weight, self.config.model.rms_norm_eps)
        assert isinstance(self.target.model, HfModel)
        return self.target.model.norm_like(weight)


class _Network:
    """A module's weights, and its forward under the loop's layout."""

    def __init__(self, parts: _Parts, index: int) -> None:
        layout, model = parts.config.layout, parts.target.model
        self._layout, self._layer = layout, parts.layer(index)
        self._embedding, self._head, self._target_norm = model.embedding, parts.head, model.norm
        names = (layout.token_norm, layout.state_norm, layout.norm)
        self._token_norm, self._state_norm, self._norm = (parts.norm(name, index) for name in names)
        self._fusion = Linear(parts.tensors[layout.name(layout.fusion, index)])

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots, of the one layer."""
        return [self._layer.new_cache(num_slots)]

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        """The state [T, D] of each row from the target's last tap; never for states of the module's own."""
        return self._target_norm(taps[0]) if self._layout.after_norm else taps[0]

    def forward(self, ids: Tensor, hidden: Tensor, batch: Batch, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Normed states [R, D] of the batch's `logit_rows`, and what the next draft's rows read."""
        embedded = take_rows(self._embedding, ids)
        if self._layout.blind_start:
            embedded[batch.positions == 0] = 0
        halves = [self._token_norm(embedded), self._state_norm(hidden)]
        fused = self._fusion(torch.cat(halves[::-1] if self._layout.state_first else halves, dim=1))
        after = take_rows(self._layer(fused, batch, cache[0]), batch.logit_rows)
        states = self._norm(after)
        return states, states if self._layout.hands_on_normed else after

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] float32."""
        return self._head(states, wide=True)
