"""How a drafter is trained: every setting with its default, written once, and its checks. Help and docs read it.

Settings that a method has no use for are ignored by it (a block drafter unrolls nothing, EAGLE-3 has no blocks).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from outrider.errors import ConfigError

Optimizer = Literal["muon", "adamw"]
Init = Literal["target", "random"]
TrainDtype = Literal["bfloat16", "float32"]


def _set(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one training run. Raises ConfigError naming the setting."""

    epochs: float = _set("passes over the corpus", 1.0)
    batch_tokens: int = _set("response tokens in one optimiser step, over all processes", 2048)
    learning_rate: float = _set("peak rate of norms, tables and heads (AdamW)", 1e-3)
    muon_learning_rate: float = _set("peak rate of the matrices, where Muon trains them", 2e-2)
    optimizer: Optimizer = _set("what trains the matrices: muon or adamw; all else is AdamW's", "muon")
    warmup: float = _set("share of the steps in which the rate rises, before its cosine to zero", 0.04)
    grad_clip: float = _set("largest norm of the whole gradient", 1.0)
    dtype: TrainDtype = _set("products in this type; masters, norms and softmax are float32", "bfloat16")
    seed: int = _set("of weights, order and anchors", 0)
    init: Init = _set("layers start from the target's last ones, or at random", "target")
    start_from: str | None = _set("checkpoint to start from: its tensors replace fresh ones of the same name", None)
    draft_vocab_size: int = _set("tokens that can be drafted: the most frequent of the responses", 8192)
    num_layers: int | None = _set(
        "draft layers; none takes the method's own: 1 for eagle3, 2 for blocks, 4 for gemma4_mtp", None
    )
    hidden_size: int = _set("gemma4_mtp: width of the draft layers", 256)
    intermediate_size: int | None = _set("width inside the draft layers' MLP; none takes the target's", None)
    num_kv_heads: int | None = _set("key and value heads of the draft layers; none takes the target's", None)
    taps: tuple[int, ...] | None = _set("target layers to read, as numbers of layers run; none spreads three", None)
    ttt_steps: int = _set("eagle3, mtp, gemma4_mtp: drafts unrolled in training", 3)
    ttt_decay: float = _set("eagle3, mtp, gemma4_mtp: weight of each further draft, relative to the one before", 0.8)
    block_size: int = _set("dflash, dspark: tokens of a block, the anchor among them", 5)
    causal: bool = _set("dflash, dspark: a draft sees only the block before it, so that N changes no draft", True)
    anchors: float = _set("dflash, dspark: block rows for each response token", 1.5)
    position_decay: float = _set("dflash, dspark: draft k weighs exp(-(k-1) / position_decay)", 4.0)
    markov_rank: int = _set("dspark: rank of the correction", 32)
    held_out: float = _set("share of prompts kept from training, to judge by", 0.02)
    eval_every: int = _set("steps between two measurements of acceptance in the engine", 100)
    eval_prompts: int = _set("held-out prompts that a measurement serves", 24)
    eval_tokens: int = _set("tokens of each of their answers", 64)
    num_speculative_tokens: int = _set("N of the measurements, and what the checkpoint will recommend", 4)
    max_len: int = _set("longer conversations are left out", 2048)

    def __post_init__(self) -> None:
        for name, choices in (("optimizer", Optimizer), ("init", Init), ("dtype", TrainDtype)):
            if getattr(self, name) not in get_args(choices):
                raise _error(name, getattr(self, name), f"one of {', '.join(get_args(choices))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise _error(name, value, f"a whole number of at least {least}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
                raise _error(name, value, f"a number above {low:g}, at most {high:g}")
        if self.start_from is not None and (type(self.start_from) is not str or not self.start_from):
            raise _error("start_from", self.start_from, "a folder or a hub name")
        taps = self.taps
        if taps is not None and not _is_ascending(taps):
            raise _error("taps", taps, "a list of layer numbers from 0, ascending")
        if type(self.causal) is not bool:
            raise _error("causal", self.causal, "true or false")

    def with_overrides(self, overrides: Sequence[str]) -> TrainConfig:
        """Apply NAME=VALUE settings (values read as JSON, else as text). Raises ConfigError."""
        known = [item.name for item in dataclasses.fields(self)]
        changes: dict[str, Any] = {}
        for text in overrides:
            name, sep, value = text.removeprefix("train.").partition("=")
            if not sep or name not in known:
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean train.{nearest[0]}?" if nearest else f"known: {', '.join(known)}"
                raise ConfigError(f"--set {text}: expected train.NAME=VALUE; {hint}", param=name)
            try:
                changes[name] = json.loads(value)
            except ValueError:
                changes[name] = value
            if isinstance(changes[name], list):
                changes[name] = tuple(changes[name])
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """The settings as plain data."""
        return dataclasses.asdict(self)


_LEAST = {
    "batch_tokens": 1,
    "seed": 0,
    "draft_vocab_size": 2,
    "num_layers": 1,
    "hidden_size": 2,
    "intermediate_size": 1,
    "num_kv_heads": 1,
    "ttt_steps": 1,
    "block_size": 2,
    "markov_rank": 1,
    "eval_every": 1,
    "eval_prompts": 1,
    "eval_tokens": 1,
    "num_speculative_tokens": 1,
    "max_len": 3,
}
_RANGES = {
    "epochs": (0, 1e4),
    "learning_rate": (0, 1),
    "muon_learning_rate": (0, 1),
    "warmup": (0, 1),
    "grad_clip": (0, 1e6),
    "ttt_decay": (0, 1),
    "anchors": (0, 1e4),
    "position_decay": (0, 1e6),
    "held_out": (0, 0.5),
}


def _is_ascending(taps: object) -> bool:
    if not isinstance(taps, tuple) or not taps or not all(type(tap) is int and tap >= 0 for tap in taps):
        return False
    return list(taps) == sorted(set(taps))


def _error(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}, expected {expected}", param=name)
