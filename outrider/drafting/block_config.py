"""What a block drafter's config.json says, in any of its published spellings, as one record.

Read are the flat files of z-lab and DeepSpec (`dflash_config` inside them first), SpecForge's, which nest everything
there, and Speculators', which keep the layers' own keys in `transformer_layer_config`. Keys that only one method has
are read by its leaf through the same `ConfigKeys`. Not here: the tensors, and whether the target fits
(block_layers.py). Sources: vLLM 0.32 `qwen3_dflash.py` and `transformers_utils/configs/speculators`; DeepSpec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.drafting.config_keys import ConfigKeys, layer_config, sliding_layers
from outrider.models.arch import ModelConfig

NESTED = "dflash_config"
"""The table of their own keys in flat files."""
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Where the tapped layers are listed, and what turns an entry into a number of layers that have run.
TAP_KEYS = (
    ("eagle_aux_hidden_state_layer_ids", 0),
    ("aux_hidden_state_layer_ids", 0),
    ("target_layer_ids", 1),
    ("layer_ids", 0),
)
# Settings that change the forward pass and that no published Qwen3-style drafter uses; honoured by refusing others.
_ONLY = {"attention_value_scale": 1.0, "is_neox_style": True, "attention_sink_bias": False}
_ONLY |= {"add_swa_attention_sink_bias": False, "use_aux_hidden_state": True}


@dataclass(frozen=True)
class LayerMask:
    """What a row of the block sees: everything to the block's end or to itself, and how many tokens of it at most."""

    causal: bool
    window: int | None


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The backbone that DFlash and DSpark share. `taps` count target layers that have run; `masks` has one a layer.

    `sample_from_anchor`: every row of the block predicts the token after it, the anchor's too; else each row after the
    anchor predicts its own.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    mask_token_id: int
    masks: tuple[LayerMask, ...]
    block_size: int | None
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int | None
    sample_from_anchor: bool
    source: str

    def speculators_keys(self, num_target_layers: int) -> dict[str, Any]:
        """What a file in the Speculators format says of the block, beside its layers."""
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "num_target_layers": num_target_layers,
            "aux_hidden_state_layer_ids": list(self.taps),
            "mask_token_id": self.mask_token_id,
            "block_size": self.block_size,
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_window_non_causal": not any(mask.causal for mask in self.masks),
        }


def read_block_config(keys: ConfigKeys, *, sample_from_anchor: bool, causal: bool | None) -> BlockConfig:
    """The shared part of a config; `sample_from_anchor` is the method's default for a file that is silent on it.

    `causal` is what the method found for all layers; None leaves it to each layer's kind: sliding ones are causal.
    Raises LoadError naming the key that is missing, malformed, or asks for a forward pass that is not implemented.
    """
    model = layer_config(keys, keys.layer_keys.get("model_type", "qwen3"), ("qwen3",))
    for key, only in _ONLY.items():
        if keys.get(key) not in (None, only):
            raise keys.error(f"{key} is {keys.get(key)!r}, expected {only!r} (nothing else is implemented)")
    size = next((key for key in ("block_size", "dspark_block_size") if keys.get(key) is not None), None)
    return BlockConfig(
        model=model,
        taps=_taps(keys),
        mask_token_id=_mask_token(keys),
        masks=_masks(keys, model.num_layers, causal),
        block_size=None if size is None else keys.count(size),
        draft_vocab_size=keys.count("draft_vocab_size", model.vocab_size),
        target_hidden_size=keys.count("target_hidden_size", model.hidden_size),
        num_target_layers=None if keys.get("num_target_layers") is None else keys.count("num_target_layers"),
        sample_from_anchor=keys.flag("sample_from_anchor", sample_from_anchor and not keys.is_speculators),
        source=keys.source,
    )


def _taps(keys: ConfigKeys) -> tuple[int, ...]:
    for key, offset in TAP_KEYS:
        ids = keys.get(key)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(entry) is int for entry in ids):
            raise keys.error(f"{key} is {ids!r}, expected a list of layer numbers")
        taps = tuple(entry + offset for entry in ids)
        if taps[0] < 0 or list(taps) != sorted(set(taps)):
            raise keys.error(f"{key} is {ids}, expected layer numbers that rise from {-offset}")
        return taps
    raise keys.error("target_layer_ids is missing, expected the target layers that the drafter reads")


def _mask_token(keys: ConfigKeys) -> int:
    for key in MASK_KEYS:
        if keys.get(key) is not None:
            return keys.count(key, least=0)
    raise keys.error("mask_token_id is missing, expected the token that fills the block; no other can stand in for it")


def _masks(keys: ConfigKeys, num_layers: int, causal: bool | None) -> tuple[LayerMask, ...]:
    kinds = sliding_layers(keys, num_layers)
    # use_swa gives every layer a window and leaves its causality to the kind that it has.
    slides = kinds if any(kinds) else [keys.flag("use_swa", False)] * num_layers
    window = None
    if any(slides):
        window = keys.count("swa_window_size" if keys.get("swa_window_size") is not None else "sliding_window")
    pairs = zip(kinds, slides, strict=True)
    return tuple(LayerMask(kind if causal is None else causal, window if slide else None) for kind, slide in pairs)
