"""The Speculators format as it is written: the keys that every drafter's config has, and its layers' table.

Reading is config_keys.py's. Source: vLLM 0.32 `configs/speculators/base.py`; vLLM Speculators 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from outrider.models.arch import ModelConfig

_VERSION = "0.9.0"


class Verifies(Protocol):
    """The target as the file states it: a name, and its classes."""

    @property
    def name(self) -> str:
        """A folder or hub name."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names, as in the target's own config."""


def speculators_keys(
    method: str, class_name: str, layers: Mapping[str, Any], verifies: Verifies, num_speculative_tokens: int
) -> dict[str, Any]:
    """What every config in the Speculators format has. Source: vLLM 0.32 `configs/speculators/base.py`."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [class_name],
        "speculators_model_type": method,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [proposal],
            "default_proposal_method": proposal["proposal_type"],
            "verifier": {"name_or_path": verifies.name, "architectures": list(verifies.architectures)},
        },
        "transformer_layer_config": dict(layers),
    }


def layer_table(model: ModelConfig) -> dict[str, Any]:
    """The draft layers' part of a config in the Speculators format."""
    table: dict[str, Any] = {
        "model_type": "qwen3" if model.qk_norm else "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": model.attention_bias,
        "tie_word_embeddings": False,
    }
    if model.rope_scaling is not None:
        scaling = asdict(model.rope_scaling)
        table["rope_scaling"] = {"rope_type": scaling.pop("kind"), **scaling}
    return table
