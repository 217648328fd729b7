"""Native multi-token prediction: a module of the target's own checkpoint drafts one token after the other.

One decoder layer of the target's kind reads the target's last state beside the embedding of the row's next token; from
the second draft on, its own normed output stands in for that state. Embedding and output matrix are the target's; of
the matrix a module may bring its own, for a part of the vocabulary (`mtp.lm_head.weight`, `mtp.d2t`; an extension). The
two published layouts differ in names, in the order of the two halves, in whether the target's final norm comes first,
and in what the text's first row reads. Of several modules the first drafts every token.

Not here: the loop (`drafting/autoregressive.py`), modules whose layer the target's forward does not have (experts,
linear or latent attention), and Gemma 4's, which has no cache of its own. Norms are the target's: a weight is not one
less than it says, as Qwen3.5's own are. Sources: Gloeckle et al., arXiv:2404.19737; DeepSeek-V3, arXiv:2412.19437; vLLM
0.32 `mimo_mtp.py`, `qwen3_5_mtp.py`, `config/speculative.py`. Legend: T rows, R last rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from outrider.drafting.vocabulary import HEAD, OFFSETS, UNREAD, draft_vocabulary, end_shapes
from outrider.errors import ConfigError
from outrider.models.arch import ModelConfig, expected_shapes, parse_config
from outrider.models.attention import Batch, LayerCache
from outrider.models.layers import RMSNorm, rope_tables, take_rows
from outrider.models.linear import Linear
from outrider.models.llama import DecoderLayer
from outrider.types import Proposal

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
_LAYER = "model.layers.0."
_ENDS = {f"mtp.{name}": name for name in (HEAD, OFFSETS, UNREAD)}


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """A published layout. `layer` and `own`: prefixes of a module's decoder layer and of its four tensors, by number.

    `state_first`: which half `fusion` reads first; `after_norm`: the target's state is the one after its final norm;
    `blind_start`: the row at position 0 reads no embedding.
    """

    layer: str
    own: str
    token_norm: str
    state_norm: str
    fusion: str
    norm: str
    state_first: bool
    after_norm: bool
    blind_start: bool

    def name(self, part: str, index: int = 0) -> str:
        """A tensor's full name."""
        return f"{self.own.format(index)}{part}.weight"


_MIMO = _Layout(
    layer="mtp_layers.{}.",
    own="mtp_layers.{}.",
    token_norm="token_layernorm",
    state_norm="hidden_layernorm",
    fusion="input_proj",
    norm="final_layernorm",
    state_first=True,
    after_norm=False,
    blind_start=True,
)
_QWEN = _Layout(
    layer="mtp.layers.{}.",
    own="mtp.",
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    fusion="fc",
    norm="norm",
    state_first=False,
    after_norm=True,
    blind_start=False,
)


@dataclass(frozen=True)
class MtpConfig:
    """What a folder says of its module. `model`: the target that it belongs to, whose layer is the module's too."""

    model: ModelConfig
    layout: _Layout
    num_modules: int
    draft_vocab_size: int

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> MtpConfig:
        """From config.json, which is the target's, and the names of the tensors. Raises LoadError naming the key."""
        keys = ConfigKeys(checkpoint.config, checkpoint.source, "")
        if keys.is_speculators or "speculators_model_type" in keys.raw:
            raise keys.error("a module in the Speculators format has to be put into its target's checkpoint first")
        if (family := keys.raw.get("model_type")) not in _FAMILIES:
            raise keys.error(f"model_type is {family!r}, expected one of {', '.join(_FAMILIES)}")
        model = parse_config(keys.raw, {}, source=str(Path(checkpoint.source) / "config.json"))
        layout = _MIMO if any(name.startswith("mtp_layers.") for name in checkpoint.tensors) else _QWEN
        stated = [key for key in MODULE_KEYS if keys.get(key) is not None]
        num_modules = keys.count(stated[0]) if stated else 1
        return cls(model, layout, num_modules, keys.count("draft_vocab_size", model.vocab_size))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the modules must have."""
        layout, width = self.layout, self.model.hidden_size
        names = expected_shapes(self.model)
        layer = {name.removeprefix(_LAYER): shape for name, shape in names.items() if name.startswith(_LAYER)}
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.num_modules):
            shapes |= {layout.layer.format(index) + name: shape for name, shape in layer.items()}
            shapes[layout.name(layout.fusion, index)] = (width, 2 * width)
            norms = (layout.token_norm, layout.state_norm, layout.norm)
            shapes |= {layout.name(norm, index): (width,) for norm in norms}
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

    needs_target_kv = False

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        checkpoint = _module(config.model or module_folder(target.model), target)
        ours = MtpConfig.read(checkpoint)
        ours.check_length(config.num_speculative_tokens)
        theirs, model = target.model.config, ours.model
        self.taps: tuple[int, ...] = (theirs.num_layers,)
        made_for = MadeFor(model.vocab_size, model.hidden_size, model.num_layers, self.taps, ours.draft_vocab_size)
        made_for.check(checkpoint, theirs)
        check_tensors(checkpoint, ours.shapes(), ours.end_shapes())
        tensors = placed(checkpoint, target.model.embedding)
        vocabulary = draft_vocabulary(
            tensors,
            target,
            width=model.hidden_size,
            draft_vocab_size=ours.draft_vocab_size,
            source=checkpoint.source,
        )
        network = _Network(ours, tensors, vocabulary.head, target)
        self._loop = AutoregressiveLoop(network, vocabulary, self.taps, target)

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


class _Network:
    """The first module's weights, and its forward under the loop's layout."""

    def __init__(self, config: MtpConfig, tensors: Mapping[str, Tensor], head: Linear, target: TargetInfo) -> None:
        model, layout = config.model, config.layout
        self._model, self._layout = model, layout
        self._embedding, self._head = target.model.embedding, head
        self._target_norm = target.model.norm
        self._token_norm, self._state_norm, self._norm = (
            RMSNorm(tensors[layout.name(part)], model.rms_norm_eps)
            for part in (layout.token_norm, layout.state_norm, layout.norm)
        )
        self._fusion = Linear(tensors[layout.name(layout.fusion)])
        tables = rope_tables(model.head_dim, target.max_len, model.rope_theta, model.rope_scaling)
        rope = (tables[0].to(target.model.device), tables[1].to(target.model.device))
        self._layer = DecoderLayer(model, tensors, layout.layer.format(0), rope)

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots, of the one layer."""
        return [LayerCache(num_slots, self._model.num_kv_heads, self._model.head_dim, self._embedding)]

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        """The state [T, D] of each row from the target's last tap; never for states of the module's own."""
        return self._target_norm(taps[0]) if self._layout.after_norm else taps[0]

    def forward(self, ids: Tensor, hidden: Tensor, batch: Batch, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Normed states [R, D] of the batch's `logit_rows`, which are also what the next draft's rows read."""
        embedded = take_rows(self._embedding, ids)
        if self._layout.blind_start:
            embedded[batch.positions == 0] = 0
        halves = [self._token_norm(embedded), self._state_norm(hidden)]
        residual = self._fusion(torch.cat(halves[::-1] if self._layout.state_first else halves, dim=1))
        delta = self._layer(residual, None, batch, first_seen(batch, self._model.sliding_window), cache[0])
        rows = batch.logit_rows
        states = self._norm(take_rows(residual, rows), take_rows(delta, rows))
        return states, states

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] float32."""
        return self._head(states, wide=True)
