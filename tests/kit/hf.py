"""Tiny targets of the published families that transformers runs: config.json with the real keys, random weights.

transformers itself makes the weights and writes them, in the spelling of the published files; `reference` is its own
model over them with its own attention, which knows one whole text and no cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models.attention import Batch
from outrider.models.hf import HfModel, load_hf
from outrider.models.hf_loading import quiet
from tests.kit import tiny

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
BLOCK = 16


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


_SHARED: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
}
_GEMMA4 = _SHARED | {
    "model_type": "gemma4_text",
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 20,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _SHARED
    | {
        "model_type": "gemma3_text",
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    },
    "gemma2": _SHARED
    | {
        "model_type": "gemma2",
        "sliding_window": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "tie_word_embeddings": True,
    },
    "gemma4": _GEMMA4,
    "gemma4, experts": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4, small": _GEMMA4
    | {
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny.VOCAB,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "qwen3": _SHARED | {"model_type": "qwen3"},
    "qwen3_moe": _SHARED | _EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_next": _SHARED
    | _EXPERTS
    | _DELTA
    | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25},
    "qwen3_5": _SHARED | _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": _SHARED
    | _EXPERTS
    | _DELTA
    | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32},
    "deepseek_v3": _without(_SHARED, "head_dim") | _MLA | {"model_type": "deepseek_v3"},
    "minimax_m2": _SHARED
    | {
        "model_type": "minimax_m2",
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "use_qk_norm": True,
    },
    "minimax_m3": _SHARED
    | {
        "model_type": "minimax_m3_vl_text",
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 8,
            "sparse_topk_blocks": 3,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1, 0, 1],
        },
    },
    "glm4_moe": _SHARED
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "mimo_v2_flash": _SHARED
    | {
        "model_type": "mimo_v2_flash",
        "v_head_dim": 16,
        "sliding_window": 20,
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": _SHARED
    | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 20},
    "phi": _without(_SHARED, "head_dim") | {"model_type": "phi", "num_key_value_heads": 4},
}
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@dataclass
class Target:
    """A family's tiny target: transformers' own model, and ours over the same files."""

    name: str
    reference: Any
    model: HfModel


def make(name: str, folder: Path, seed: int = 0) -> Target:
    """Make, save and load a family's target."""
    theirs = reference(name, seed)
    return Target(name, theirs, load(save(theirs, name, folder)))


def reference(name: str, seed: int = 0) -> Any:
    """transformers' own model of a family, its weights spread so that near-ties do not decide a test."""
    raw = dict(CONFIGS[name])
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _spread(tensor_name, tensor, generator)
    return model.eval()


def _spread(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if "inv_freq" in name or not tensor.is_floating_point() or tensor.numel() == 1:
        return
    noise = torch.randn(tensor.shape, generator=generator)
    if "A_log" in name:
        # Fast decay leaves states near zero, where rounding is all that there is to see.
        tensor.copy_(0.3 * noise - 1)
    elif tensor.ndim == 1:
        tensor += 0.2 * noise
    elif "embed_tokens" in name:
        tensor.copy_(noise * 0.5)
    else:
        sharp = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
        tensor.copy_(noise * sharp * tensor.shape[-1] ** -0.5)


def save(model: Any, name: str, folder: Path) -> Path:
    """A family's checkpoint as it is published: its config.json as it is written here, the tensors' published names."""
    with quiet():
        model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "minimax_m3":
        tensors = load_file(folder / "model.safetensors")
        save_file(published_minimax(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return folder


def published_minimax(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MiniMax-M3's tensors as the published file spells them; transformers does so for the whole model only."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = name.partition(".mlp.")[0]
        moe = f"{layer}.block_sparse_moe."
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out |= {f"{moe}experts.{expert}.w1.weight": gate, f"{moe}experts.{expert}.w3.weight": up}
        elif name.endswith(".experts.down_proj"):
            out |= {f"{moe}experts.{expert}.w2.weight": down for expert, down in enumerate(tensor)}
        elif name.endswith(".gate_up_proj.weight"):
            for half, part in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                out[name.replace("gate_up_proj", half)] = part
        else:
            out[name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".indexer.", ".index_")] = tensor
    sparse = {name.partition(".block_sparse_moe.")[0] + ".mlp." for name in out if ".block_sparse_moe." in name}
    for prefix in sparse:
        for name in [name for name in out if name.startswith(prefix)]:
            out[name.replace(".mlp.", ".block_sparse_moe.")] = out.pop(name)
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def wrap(folder: Path, prefix: str, head: str, outer: Mapping[str, Any]) -> Path:
    """Turn a saved text model into the text part of a larger one."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(outer) | {"text_config": raw}), encoding="utf-8")
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("lm_head"):
            name = head + name
        elif not name.startswith("mtp."):  # Qwen's modules lie beside the text model, not in it
            name = prefix + name.removeprefix("model.")
        tensors[name] = tensor.clone()
    tensors["vision_tower.patch.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> HfModel:
    """The checkpoint as transformers runs it for us, whoever else could."""
    return load_hf(folder, dtype=dtype, device=torch.device("cpu"))


class Reading:
    """Texts in one cache, each in blocks of its own; rows may come in any chunks, and again after a roll back."""

    def __init__(self, model: Any, num_texts: int = 1, max_len: int = 160) -> None:
        self.model = model
        per_text = -(-max_len // BLOCK)
        self._blocks = [list(range(text, num_texts * per_text, num_texts)) for text in range(num_texts)]
        self.cache = model.new_cache(num_texts * per_text * BLOCK)
        for layer in self.cache:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))

    def read(self, chunks: Mapping[int, tuple[int, Sequence[int]]], taps: Sequence[int] = ()) -> Any:
        """One forward over chunks by text: (position of the first, ids); logits after every row, text by text."""
        ids = np.concatenate([np.array(part, dtype=np.int64) for _, part in chunks.values()])
        spans = [(first, len(part)) for first, part in chunks.values()]
        blocks = [self._blocks[text] for text in chunks]
        batch = Batch.pack(ids, spans, blocks, np.arange(len(ids)), BLOCK, self.model.device)
        return self.model(batch, self.cache, taps)
