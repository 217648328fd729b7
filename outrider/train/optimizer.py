"""What turns gradients into steps: Muon for the matrices of the layers, AdamW for all else, one schedule for both.

Tables that are looked up and heads keep AdamW, as Muon's authors advise. Source: Jordan et al., Muon (2024), as in
torch.optim.Muon; Loshchilov and Hutter, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter

from outrider.drafting.train_config import TrainConfig


class Optimizer:
    """Both optimisers as one: `step(share)` at a share of the run done, with its state as plain tensors."""

    def __init__(self, parameters: Mapping[str, Parameter], config: TrainConfig) -> None:
        self._config, self._parameters = config, list(parameters.values())
        muon = [p for name, p in parameters.items() if config.optimizer == "muon" and _is_matrix(name, p)]
        taken = {id(p) for p in muon}
        rest = [p for p in self._parameters if id(p) not in taken]
        self._parts: list[torch.optim.Optimizer] = []
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0))
        if muon:
            rate = config.muon_learning_rate
            self._parts.append(torch.optim.Muon(muon, lr=rate, momentum=0.95, weight_decay=0))
        self._rates = [part.param_groups[0]["lr"] for part in self._parts]

    def step(self, done: float) -> float:
        """Clip, step and clear the gradients, at the rate for this share of the run; the gradient's norm."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        for part, rate in zip(self._parts, self._rates, strict=True):
            part.param_groups[0]["lr"] = rate * self._schedule(done)
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def _schedule(self, done: float) -> float:
        warmup = self._config.warmup
        rising = (done + 1e-3) / (warmup + 1e-3)
        return min(1.0, rising) * 0.5 * (1 + math.cos(math.pi * max(0.0, done - warmup) / max(1e-9, 1 - warmup)))

    def state(self) -> list[dict[str, Any]]:
        """What `restore` takes."""
        return [part.state_dict() for part in self._parts]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from another's state."""
        for part, saved in zip(self._parts, state, strict=True):
            part.load_state_dict(saved)


def _is_matrix(name: str, parameter: Parameter) -> bool:
    inside = "layers." in name or name == "fc.weight" or name.endswith("_projection.weight")
    return parameter.dim() == 2 and inside
