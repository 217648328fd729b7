"""Which weights a loaded model has, as one short text that other weights of the same shape do not share.

A sample, not a checksum of the file: it tells a fine-tuned copy from its base, whatever either is called, and says
nothing about damage (models/loading.py checks tensors). A drafter records its target's fingerprint.
"""

from __future__ import annotations

import hashlib

import torch

from outrider.models.target import Target

_MOST_ROWS = 768


def fingerprint(model: Target) -> str:
    """The sha256, in hex, of evenly spaced rows of the embedding and of the last norm, after rounding to bfloat16.

    The rounding makes copies of a checkpoint that were loaded in bfloat16 and in float32 equal. Cost: a few
    milliseconds.
    """
    step = max(1, len(model.embedding) // _MOST_ROWS)
    digest = hashlib.sha256(f"{len(model.embedding)}".encode())
    for part in (model.embedding[::step], model.norm.weight):
        digest.update(part.to(torch.bfloat16).float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
