"""Ways to damage a checkpoint's tensor that leave it a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def recast(tensor: Tensor) -> Tensor:
    """Of a type that no weight has."""
    return tensor.to(torch.int32)


def longer(tensor: Tensor) -> Tensor:
    """With its first row once more."""
    return torch.cat([tensor, tensor[:1]])


def deeper(tensor: Tensor) -> Tensor:
    """With one more dimension."""
    return tensor[None]


DAMAGES = (recast, longer, deeper)
