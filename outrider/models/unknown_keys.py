"""Keys of a config.json that nobody here reads: which they are, and whether they may change what comes out.

Three kinds of keys are told apart: those that some reader honours or refuses, those that are known to change nothing
here, and the rest, which are named. A key of the rest that is null, false or empty is switched off and only listed.
Not here: reading (arch.py, gemma_config.py) and drafters' keys (drafting/known_keys.py). Sources: transformers 5.24's
configurations, and the published files. Imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from outrider.models.arch import ALIASES, FAMILIES
from outrider.models.gemma_config import GEMMA_FAMILIES

_log = logging.getLogger(__name__)


def keys(text: str) -> frozenset[str]:
    """The keys that a text lists."""
    return frozenset(text.split())


# Where the file comes from and what its classes are called; how others run, train or generate with it, which our own
# settings say here; parts for pictures and sound; what the tokenizer's own files say, or only padded batches need.
HARMLESS = keys("""
    _name_or_path architectures auto_map dtype torch_dtype transformers_version transformers.js_config model_name
    speculators_version unsloth_version unsloth_fixed library_name
    use_cache initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop pretraining_tp is_llama_config
    ep_size aux_loss_alpha seq_aux
    _attn_implementation attn_implementation _attn_implementation_autoset attn_implementation_autoset return_dict
    chunk_size_feed_forward output_attentions output_hidden_states use_return_dict gradient_checkpointing problem_type
    id2label label2id is_encoder_decoder is_decoder router_aux_loss_coef output_router_logits
    do_sample temperature top_k top_p min_p repetition_penalty max_length num_beams begin_suppress_tokens
    typical_p length_penalty diversity_penalty num_beam_groups num_return_sequences min_length no_repeat_ngram_size
    encoder_no_repeat_ngram_size
    vision_config audio_config image_token_id image_token_index video_token_id audio_token_id boi_token_id eoi_token_id
    boi_token_index eoi_token_index boa_token_id eoa_token_index mm_tokens_per_image vision_soft_tokens_per_image
    pad_token_id unk_token_id sep_token_id tokenizer_class
""")
"""Keys that change neither text nor drafts here, whatever their value."""

LAYERS = keys("""
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor tie_word_embeddings
    attention_bias mlp_bias sliding_window use_sliding_window layer_types max_window_layers max_position_embeddings
    eos_token_id bos_token_id hidden_act hidden_activation quantization_config compression_config
    num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules
""")
"""What arch.py reads or refuses, and the keys of a prediction module beside the target."""

GEMMA = LAYERS | keys("""
    text_config global_head_dim num_global_key_value_heads attention_k_eq_v num_kv_shared_layers use_double_wide_mlp
    per_layer_config hidden_size_per_layer_input vocab_size_per_layer_input query_pre_attn_scalar enable_moe_block
    final_logit_softcapping attn_logit_softcapping sliding_window_pattern rope_local_base_freq
    use_bidirectional_attention _sliding_window_pattern num_experts top_k_experts moe_intermediate_size
""")
"""What gemma_config.py reads or refuses."""

_GATED_DELTA = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_SIGMOID = {"scoring_func": "sigmoid"}
_AS_BUILT: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _SIGMOID | {"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    "minimax_m2": _SIGMOID | {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
}
"""Values in published files, by family, that say what transformers' code of the family does whatever they say."""
_POPPED = re.compile(r'kwargs\.(?:pop|get)\(\s*"(\w+)"')
"""How transformers' configuration classes read what is none of their fields."""
_TABLES = ("text_config", "transformer_layer_config", "dflash_config", "eagle_config")
_MOST_SHOWN = 40


@dataclass(frozen=True)
class UnknownKey:
    """A key by its path in the file, with its value; `is_off`: null, false or empty, so that it asks for nothing."""

    key: str
    value: Any

    @property
    def is_off(self) -> bool:
        """Whether it asks for nothing."""
        return self.value is None or self.value is False or self.value in ("", [], {})

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{self.key} = {text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + '…'}"


def target_keys(raw: Mapping[str, Any]) -> frozenset[str]:
    """The keys of a target's config.json that whoever runs it reads or refuses: our readers, or transformers' class.

    Empty where nobody runs it. Cost: for transformers' families, its import.
    """
    family = raw.get("model_type")
    if family in FAMILIES:
        return LAYERS
    if family in GEMMA_FAMILIES:
        return GEMMA
    theirs = _class_keys(_aliased(family))
    return theirs and LAYERS | {"text_config"} | theirs | _as_built(raw)


def _aliased(family: Any) -> str:
    return ALIASES.get(str(family), str(family))


def _as_built(raw: Mapping[str, Any]) -> frozenset[str]:
    """The keys that state what the code of the text's family does anyway."""
    text = raw.get("text_config") or raw
    built = _AS_BUILT.get(_aliased(text.get("model_type")).removesuffix("_text"), {})
    return frozenset(key for key, value in built.items() if text.get(key) == value)


@cache
def _class_keys(family: str) -> frozenset[str]:
    """What transformers' configuration class of a family has or reads, its text part's keys among them."""
    try:
        whole = importlib.import_module("transformers").CONFIG_MAPPING[family]()
        return _keys_of(whole) | _keys_of(whole.get_text_config(decoder=True))
    except Exception:
        # Broad on purpose: it is not there, does not know the family, or its class makes nothing without arguments.
        return frozenset()


def _keys_of(config: Any) -> frozenset[str]:
    """The fields of a configuration, other names for them, and keys that its class turns into them."""
    source = inspect.getsource(type(config))
    return frozenset([*config.to_dict(), *config.attribute_map, *_POPPED.findall(source)])


def unknown_keys(raw: Mapping[str, Any], known: Collection[str]) -> list[UnknownKey]:
    """The keys of a config and of the tables in it that are neither among `known` nor harmless, in their order."""
    return list(_unknown(raw, known, ""))


def _unknown(table: Mapping[str, Any], known: Collection[str], prefix: str) -> Iterator[UnknownKey]:
    for key, value in table.items():
        if key in _TABLES and isinstance(value, Mapping):
            yield from _unknown(value, known, f"{prefix}{key}.")
        elif key not in known and key not in HARMLESS:
            yield UnknownKey(prefix + key, value)


def warn_of_unknown_keys(raw: Mapping[str, Any], known: Collection[str], *, source: str, effect: str) -> None:
    """Log one line that names the unknown keys that are not off, once for each file; `effect`: what they may change.

    Without `known` keys nothing can be said, and nothing is.
    """
    if known and (found := [str(key) for key in unknown_keys(raw, known) if not key.is_off]):
        _warn_once(f"{source}: config.json has {', '.join(found)}, not known here: {effect}")


@cache
def _warn_once(line: str) -> None:
    _log.warning(line)
