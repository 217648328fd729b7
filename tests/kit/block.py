"""Tiny block drafters for the tiny cyclic target: random layers of small effect, so that context matters and the
drafts are still often right.

The first draft is right because the anchor's own embedding points at its follower. DSpark's correction knows the
followers as well, so its later drafts are right too; DFlash's later ones come from the mask token and are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.drafters.dspark import DSparkConfig
from outrider.drafting.block_layers import backbone_shapes
from tests.kit import tiny

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": tiny.VOCAB,
    "hidden_size": tiny.WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "target_layer_ids": [0, 1],
    "mask_token_id": tiny.VOCAB - 1,
    "block_size": 4,
    "is_causal": False,
    "sample_from_anchor": True,
}


def save_block(folder: Path, *, markov: bool, **changes: Any) -> Path:
    """A checkpoint folder for method dflash or, with `markov`, for dspark with correction and confidence head."""
    heads = {"markov_rank": tiny.VOCAB, "enable_confidence_head": True, "confidence_head_with_markov": True}
    raw = CONFIG | (heads if markov else {}) | changes
    config = DSparkConfig.read(raw, source="tiny")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in (backbone_shapes(config.block) | config.shapes()).items():
        tensors[name] = 0.3 * torch.randn(shape, generator=generator) * (shape[-1] ** -0.5)
        if "norm" in name:
            tensors[name] = torch.ones(shape)
    if markov:
        # A one-hot row for each token, and 9 for its follower's logit.
        tensors["markov_head.markov_w1.weight"] = torch.eye(tiny.VOCAB)
        follower = tiny.followers(tiny.VOCAB)
        tensors["markov_head.markov_w2.weight"] = 9 * torch.eye(tiny.VOCAB)[follower].T.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
