"""EAGLE-3 and 3.1: a decoder layer over the target's inner states drafts one token after the other.

Taps of three target layers (or as many as the checkpoint says) are fused into one state a row. The layer reads it
beside the embedding of the row's next token; from the second draft on, its own output stands in for the target's state.
The loop is `drafting/autoregressive.py`; here are the network, its loading, and the formats, written.
The layer's attention is a Llama's, a Qwen3's, or DeepSeek's latent one (drafting/latent.py). Not here: heads that draft
in parallel (P-EAGLE). Sources: Li et al., "EAGLE-3", arXiv:2503.01840; vLLM 0.32 `llama_eagle3.py`, `qwen3_eagle3.py`,
`deepseek_eagle3.py`, `configs/speculators/algos.py`; DeepSpec `modeling/eagle3`. Legend: T rows, R last rows, D draft
width, Dt target width, K taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting.autoregressive import AutoregressiveLoop, first_seen, keep_rows
from outrider.drafting.base import DraftContext, TargetInfo
from outrider.drafting.checkpoint import Checkpoint, MadeFor, check_tensors, placed, read_checkpoint
from outrider.drafting.eagle3_config import FIRST, NESTED, OLD_FIRST, Eagle3Config, first_of, renamed
from outrider.drafting.export import (
    Ends,
    ExportTarget,
    Limit,
    Written,
    comparable,
    layer_keys,
    require,
    values,
)
from outrider.drafting.latent import LatentAttention
from outrider.drafting.speculators import speculators_keys
from outrider.drafting.vocabulary import EMBEDDING, HEAD, DraftVocabulary, draft_vocabulary, end_shapes
from outrider.errors import DrafterMismatch
from outrider.models.attention import Batch, Heads, LayerCache, attend, rope_store
from outrider.models.layers import RMSNorm, rope_tables, silu_mul, take_rows
from outrider.models.linear import Linear, fused_linear
from outrider.types import Proposal


class Eagle3Drafter:
    """Drafts token by token from the target's taps; `model` in the configuration names the checkpoint."""

    def __init__(self, config: SpeculativeConfig, target: TargetInfo) -> None:
        if config.model is None:
            raise DrafterMismatch('eagle3 needs a drafter: add "model" to the speculative config', param="model")
        checkpoint = read_checkpoint(config.model)
        num_layers = target.model.config.num_layers
        ours = Eagle3Config.read(checkpoint.config, source=checkpoint.source, num_target_layers=num_layers)
        tensors = _checked(checkpoint, ours, target)
        vocabulary = draft_vocabulary(
            tensors,
            target,
            width=ours.model.hidden_size,
            draft_vocab_size=ours.draft_vocab_size,
            source=checkpoint.source,
        )
        self.taps = ours.taps
        self._loop = AutoregressiveLoop(_Network(ours, tensors, vocabulary, target), vocabulary, self.taps, target)

    def begin(self, slot: int) -> None:
        """Nothing to prepare: what is filled is known by block."""

    def end(self, slot: int) -> None:
        """Nothing to release: the blocks are the target's."""

    def propose(self, context: DraftContext) -> Proposal:
        """As many drafts as wanted for each request. Cost: one pass over new rows, one row for each further draft."""
        return self._loop.propose(context)


def _checked(checkpoint: Checkpoint, config: Eagle3Config, target: TargetInfo) -> dict[str, Tensor]:
    """The tensors, held against config and target, with the first layer under its present name."""
    theirs, width = target.model.config, config.model.hidden_size
    made_for = MadeFor(
        config.model.vocab_size,
        config.target_hidden_size,
        config.num_target_layers,
        config.taps,
        config.draft_vocab_size,
    )
    made_for.check(checkpoint, theirs)
    if not config.fuses_taps and width != theirs.hidden_size:
        raise checkpoint.mismatch(f"has width {width} and no fc, the target's state is {theirs.hidden_size} wide")
    fusion = checkpoint.tensors.get("fc.weight")
    if fusion is not None and config.fuses_taps and tuple(fusion.shape) != config.shapes()["fc.weight"]:
        layers = ", ".join(map(str, config.taps))
        raise checkpoint.mismatch(
            f"has fc.weight of shape {list(fusion.shape)}, expected {list(config.shapes()['fc.weight'])}"
            f" for target layers {layers} of width {theirs.hidden_size}"
        )
    first = first_of(checkpoint)
    check_tensors(checkpoint, config.shapes(first), end_shapes(theirs.vocab_size, config.draft_vocab_size, width))
    return {renamed(name, first, FIRST): t for name, t in placed(checkpoint, target.model.embedding).items()}


class Eagle3Exporter:
    """One checkpoint, to be written in the Speculators format, EAGLE's flat one, or DeepSpec's.

    The flat file is the one that vLLM and SpecForge read today, 3.1 included; since they differ in what a missing norm
    key means, each is written out. DeepSpec's class has none of these keys.
    """

    default_tokens = 3

    def __init__(self, checkpoint: Checkpoint, target: ExportTarget) -> None:
        num_layers = target.config.num_layers
        config = Eagle3Config.read(checkpoint.config, source=checkpoint.source, num_target_layers=num_layers)
        self.meaning = replace(config, model=comparable(config.model))
        self.formats = {"speculators": self._speculators, "eagle": self._eagle, "deepspec": self._deepspec}
        self._config, self._checkpoint, self._target = config, checkpoint, target
        self._norms = values(config, ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
        self._sizes = values(config, ("draft_vocab_size", "target_hidden_size"))
        self._layers = layer_keys(config.model, config.windows, config.logit_scale)
        # vLLM's Llama class counts three taps, however many are listed, unless this key says otherwise.
        self._num_taps = {"num_aux_hidden_states": len(config.taps)} if config.fuses_taps else {}
        rank = None if config.latent is None else config.latent.rank
        self._plain = Limit("kv_lora_rank", rank, None, "keep it as it is")

    def _speculators(self, num_speculative_tokens: int) -> Written:
        config, flat = self._config, "take --format eagle"
        both = Limit("fc_norm beside norm_before_fc", config.fc_norm and config.norm_before_fc, False, flat)
        fuses = Limit("use_aux_hidden_state", config.fuses_taps, True, flat)
        require(self._checkpoint, "speculators", [self._plain, fuses, both])
        layers = self._layers | self._num_taps
        table = speculators_keys("eagle3", "Eagle3Speculator", layers, self._target, num_speculative_tokens)
        table |= {"eagle_aux_hidden_state_layer_ids": list(config.taps), "num_target_layers": config.num_target_layers}
        return self._written(table | self._sizes | self._norms, FIRST, (HEAD,))

    def _eagle(self, _: int) -> Written:
        config = self._config
        limits = [
            self._plain,
            Limit("model_type", config.model.model_type, "llama"),
            Limit("num_hidden_layers", config.model.num_layers, 1),
        ]
        require(self._checkpoint, "eagle", limits)
        taps = {"eagle_aux_hidden_state_layer_ids": list(config.taps)} if config.fuses_taps else {}
        table = {"architectures": ["LlamaForCausalLMEagle3"]} | self._layers | self._sizes | self._norms
        own = {"use_aux_hidden_state": config.fuses_taps, "norm_before_fc": config.norm_before_fc} | taps
        return self._written(table | taps | self._num_taps | {NESTED: own}, OLD_FIRST, (HEAD,))

    def _deepspec(self, _: int) -> Written:
        config, model = self._config, self._config.model
        limits = [
            self._plain,
            Limit("model_type", model.model_type, "qwen3"),
            Limit("num_hidden_layers", model.num_layers, 1),
            Limit("draft_vocab_size", config.draft_vocab_size, model.vocab_size),
            Limit("target_hidden_size", config.target_hidden_size, model.hidden_size),
            Limit("use_aux_hidden_state", config.fuses_taps, True),
            *(Limit(key, given, False) for key, given in self._norms.items()),
            Limit("logit_scale", config.logit_scale, 1.0),
            Limit("attention_bias", model.attention_bias, False),
            Limit("sliding_window", config.windows[0], None),
        ]
        require(self._checkpoint, "deepspec", limits)
        # Numbered by the layer whose output it is; -1 is the embedding's.
        taps = {"target_layer_ids": [tap - 1 for tap in config.taps], "num_target_layers": config.num_target_layers}
        table = {"architectures": ["Qwen3Eagle3Model"]} | self._layers | {"layer_types": ["full_attention"]}
        return self._written(table | taps, FIRST, (EMBEDDING, HEAD))

    def _written(self, table: dict[str, Any], first: str, fill: Sequence[str]) -> Written:
        """With the network's tensors, its first layer under that prefix, and the ends."""
        config, tensors = self._config, self._checkpoint.tensors
        pairs = zip(config.shapes(first), config.shapes(first_of(self._checkpoint)), strict=True)
        ends = Ends.of(self._checkpoint, self._target, config.draft_vocab_size)
        return Written(table, {name: tensors[old] for name, old in pairs} | ends.tensors(self._target, fill))


class _Network:
    """The draft network's weights, and its forward under the loop's layout."""

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Tensor], vocabulary: DraftVocabulary, target: TargetInfo
    ) -> None:
        model, eps = config.model, config.model.rms_norm_eps
        self._config, self._embedding, self._head = config, vocabulary.embedding, vocabulary.head
        # Drafts go as far as the target's text, whatever length the head was trained with.
        if config.latent is None:
            tables = rope_tables(model.head_dim, target.max_len, model.rope_theta, model.rope_scaling)
            rope = (tables[0].to(target.model.device), tables[1].to(target.model.device))
        else:
            rope = config.latent.tables(target.max_len, target.model.device)
        self._layers = [_Layer(config, tensors, index, rope) for index in range(model.num_layers)]
        later = [f"layers.{index}.input_layernorm.weight" for index in range(1, model.num_layers)]
        self._norms = [RMSNorm(tensors[name], eps) for name in later]
        self._embedding_norm = RMSNorm(tensors[FIRST + "input_layernorm.weight"], eps)
        self._hidden_norm = RMSNorm(tensors[FIRST + "hidden_norm.weight"], eps)
        self._norm = RMSNorm(tensors["norm.weight"], eps)
        self._target_norm = target.model.norm
        self._fc = Linear(tensors["fc.weight"]) if config.fuses_taps else None
        self._taps_norm = RMSNorm(tensors["input_norm.weight"], eps) if "input_norm.weight" in tensors else None
        names = [f"fc_norm.{i}.weight" for i in range(len(config.taps))]
        self._tap_norms = [RMSNorm(tensors[name], eps) for name in names if name in tensors]

    def new_cache(self, num_slots: int) -> list[LayerCache]:
        """Empty keys and values for that many slots, one entry a layer."""
        return [layer.attention.new_cache(num_slots, self._embedding) for layer in self._layers]

    def combine(self, taps: Sequence[Tensor]) -> Tensor:
        """The state [T, D] of each row from K taps [T, Dt]; never for states of the network's own."""
        if self._fc is None:
            return self._target_norm(taps[0])
        fused = torch.cat(list(taps), dim=1)
        if self._taps_norm is not None:
            fused = self._taps_norm(fused)
        if self._tap_norms:
            parts = [part.contiguous() for part in fused.chunk(len(taps), dim=1)]
            fused = torch.cat([norm(part) for norm, part in zip(self._tap_norms, parts, strict=True)], dim=1)
        return self._fc(fused)

    def forward(self, ids: Tensor, hidden: Tensor, batch: Batch, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Normed states [R, D] of the batch's `logit_rows`, and what the next draft's rows read."""
        embedded, normed = self._embedding_norm(take_rows(self._embedding, ids)), self._hidden_norm(hidden)
        inputs = torch.cat([embedded, normed], dim=1)
        residual = normed if self._config.norm_before_residual else hidden
        for layer, norm, entry in zip(self._layers, self._norms, cache, strict=False):
            inputs = norm(residual, layer(inputs, residual, batch, entry))
        rows = batch.logit_rows
        if len(rows) < len(ids):
            # Of the other rows nothing is wanted but the last layer's keys and values.
            self._layers[-1].fill(inputs, batch, cache[-1])
            inputs, residual, batch = take_rows(inputs, rows), take_rows(residual, rows), keep_rows(batch, rows)
        states = self._norm(residual, self._layers[-1](inputs, residual, batch, cache[-1]))
        return states, states if self._config.norm_output else residual

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, Vd] float32."""
        logits = self._head(states, wide=True)
        return logits if self._config.logit_scale == 1 else logits * self._config.logit_scale


class _Layer:
    """One decoder layer after its input norms, which differ between the first layer and others."""

    def __init__(
        self, config: Eagle3Config, tensors: Mapping[str, Tensor], index: int, rope: tuple[Tensor, Tensor]
    ) -> None:
        prefix = f"layers.{index}."
        self._window = config.windows[index]
        self._post_norm = RMSNorm(tensors[prefix + "post_attention_layernorm.weight"], config.model.rms_norm_eps)
        attention = prefix + "self_attn."
        self.attention: _Attention | LatentAttention
        if config.latent is None:
            self.attention = _Attention(Heads.of(config.model, tensors, attention, rope), tensors, attention)
        else:
            self.attention = LatentAttention(config.latent, tensors, attention, rope)
        self._gate_up = fused_linear(tensors, prefix + "mlp.", ("gate_proj", "up_proj"))
        self._down = fused_linear(tensors, prefix + "mlp.", ("down_proj",))

    def fill(self, inputs: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Write the rows' keys and values, and no more."""
        self.attention.fill(inputs, batch, cache)

    def __call__(self, inputs: Tensor, residual: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """What the layer adds to the residual [T, D], which has taken in the attention's part already."""
        attended = self.attention(inputs, batch, first_seen(batch, self._window), cache)
        return self._down(silu_mul(self._gate_up(self._post_norm(residual, attended))))


class _Attention:
    """Attention of plain heads. Queries apart from keys and values: most rows of a first pass need only the latter."""

    def __init__(self, heads: Heads, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._query = fused_linear(tensors, prefix, ("q_proj",))
        self._key_value = fused_linear(tensors, prefix, ("k_proj", "v_proj"))
        self._output = fused_linear(tensors, prefix, ("o_proj",))
        self._heads, self._no_query = heads, replace(heads, num_heads=0, q_norm=None)

    def new_cache(self, num_slots: int, like: Tensor) -> LayerCache:
        """Empty keys and values for that many slots."""
        return LayerCache(num_slots, self._heads.num_kv_heads, self._heads.head_dim, like)

    def fill(self, inputs: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Write the rows' keys and values."""
        rope_store(self._key_value(inputs), batch, self._no_query, cache)

    def __call__(self, inputs: Tensor, batch: Batch, starts: Tensor, cache: LayerCache) -> Tensor:
        """Fill, and attend: [T, D]."""
        qkv = torch.cat([self._query(inputs), self._key_value(inputs)], dim=1)
        rope_store(qkv, batch, self._heads, cache)
        return self._output(attend(qkv, batch, starts, self._heads, cache))
