"""What the config.json of a Gemma 4 MTP drafter says, as published (`gemma4_assistant`) and as we write it.

`text_config` describes the draft layers in Gemma 4's own keys. Two keys are ours, for other targets than Gemma, and
mean the published behaviour where they are absent: `target_kv_layers`, the target layer whose keys and values each
draft layer reads, and `draft_vocab_size`, the tokens that an output matrix of its own scores. Not here: tensors'
values, the target. Sources: vLLM 0.32 `gemma4_mtp.py`; transformers 5.24 `models/gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.vocabulary import EMBEDDING, HEAD, OFFSETS, UNREAD
from outrider.models.gemma_config import GemmaConfig, gemma_shapes, parse_gemma

CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
_KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
_TEXT_KINDS = ("gemma4_text", "gemma4_unified_text")
_NONE_OF_THESE = -1
"""A draft layer's source of keys and values: none of the draft layers."""


@dataclass(frozen=True, kw_only=True)
class Gemma4MtpConfig:
    """`model`: the draft layers, none of which has keys of its own. `target_width`: that of the target's states.

    `kv_layers`: the target layer that each draft layer reads, None for the target's last one of the layer's kind.
    `num_centroids` and `top_centroids`: how many groups of tokens there are and are scored; 0 for all tokens at once.
    """

    model: GemmaConfig
    target_width: int
    draft_vocab_size: int
    kv_layers: tuple[int, ...] | None = None
    num_centroids: int = 0
    top_centroids: int = 0

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, source: str) -> Gemma4MtpConfig:
        """From config.json of the folder `source`. Raises LoadError naming the key."""
        keys = ConfigKeys(raw, source, "")
        if (kind := raw.get("model_type")) not in _KINDS:
            raise keys.error(f"model_type is {kind!r}, expected {' or '.join(_KINDS)}")
        model = _draft_layers(keys)
        found = cls(
            model=model,
            target_width=keys.count("backbone_hidden_size"),
            draft_vocab_size=keys.count("draft_vocab_size", model.vocab_size),
            kv_layers=_kv_layers(keys, model.num_layers),
        )
        if not keys.flag("use_ordered_embeddings", False):
            return found
        return found._with_centroids(keys)

    def _with_centroids(self, keys: ConfigKeys) -> Gemma4MtpConfig:
        if self.draft_vocab_size < self.model.vocab_size:
            raise keys.error("draft_vocab_size and use_ordered_embeddings are both set, expected one of them")
        count, top = keys.count("num_centroids", 2048), keys.count("centroid_intermediate_top_k", 32)
        if self.model.vocab_size % count:
            raise keys.error(f"num_centroids is {count}, expected a divisor of vocab_size {self.model.vocab_size}")
        if top > count:
            raise keys.error(f"centroid_intermediate_top_k is {top}, expected at most num_centroids {count}")
        return replace(self, num_centroids=count, top_centroids=top)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the checkpoint must have."""
        width, vocab_size = self.model.hidden_size, self.model.vocab_size
        layers = {name.removeprefix("model."): shape for name, shape in gemma_shapes(self.model).items()}
        shapes = {name: shape for name, shape in layers.items() if name.startswith(("layers.", "norm."))}
        shapes["pre_projection.weight"] = (width, 2 * self.target_width)
        shapes["post_projection.weight"] = (self.target_width, width)
        if self.draft_vocab_size < vocab_size:
            return shapes | {HEAD: (self.draft_vocab_size, width), OFFSETS: (self.draft_vocab_size,)}
        shapes[EMBEDDING] = (vocab_size, width)
        if self.num_centroids:
            shapes |= {CENTROIDS: (self.num_centroids, width), ORDERING: (vocab_size,)}
        return shapes

    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of what it may have besides, and nobody reads."""
        return {UNREAD: (self.model.vocab_size,)} if self.draft_vocab_size < self.model.vocab_size else {}


def _draft_layers(keys: ConfigKeys) -> GemmaConfig:
    text = keys.raw.get("text_config")
    if not isinstance(text, Mapping):
        raise keys.error(f"text_config is {text!r}, expected the keys of the draft layers")
    if (kind := text.get("model_type", _TEXT_KINDS[0])) not in _TEXT_KINDS:
        raise keys.error(f"text_config.model_type is {kind!r}, expected {' or '.join(_TEXT_KINDS)}")
    # All draft layers share keys with the target and none with another: to the reader, nothing is shared.
    plain = {**text, "model_type": _TEXT_KINDS[0], "num_kv_shared_layers": 0}
    model = parse_gemma(plain, {}, source=str(Path(keys.source) / "config.json"))
    for key, given in (("hidden_size_per_layer_input", model.per_layer_size), ("use_double_wide_mlp", None)):
        if text.get(key) or given:
            raise keys.error(f"text_config.{key} is {text.get(key)!r}, expected 0 or false: draft layers have none")
    return replace(model, layers=tuple(replace(layer, kv_source=_NONE_OF_THESE) for layer in model.layers))


def _kv_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...] | None:
    given = keys.get("target_kv_layers")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != num_layers or not all(type(i) is int and i >= 0 for i in given):
        raise keys.error(f"target_kv_layers is {given!r}, expected {num_layers} layer numbers from 0")
    return tuple(given)
