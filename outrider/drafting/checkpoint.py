"""Published drafter checkpoints: a folder of config.json and safetensors, and which drafting method it is for.

The one place that tells formats apart by their marks. What a format's keys mean is read by the method's own leaf; here
nothing is renamed but the `model.` prefix that some exporters put before every tensor. Sources of the marks: vLLM 0.32
`config/speculative.py` and `transformers_utils/configs/speculators`, and the published files themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.models.arch import read_json
from outrider.models.loading import load_tensors
from outrider.models.store import resolve

_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
_PREFIX = "model."


@dataclass(frozen=True)
class Checkpoint:
    """config.json as it is, the tensors by name as stored, and the folder that errors name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    source: str


def read_checkpoint(name: str) -> Checkpoint:
    """Read a drafter's folder or hub name. Raises LoadError in one line. Cost: tensors are mapped, not copied."""
    folder = resolve(name)
    config = read_json(Path(folder) / "config.json")
    tensors = {key.removeprefix(_PREFIX): tensor for key, tensor in load_tensors(folder).items()}
    return Checkpoint(config, tensors, str(folder))


def method_of(checkpoint: Checkpoint) -> str | None:
    """The drafting method that a checkpoint is for, None where nothing in it says so.

    What the file says of itself counts first, the shapes of its tensors last; the folder's name never does.
    """
    config = checkpoint.config
    if "speculators_config" in config or "speculators_model_type" in config:
        return _SPECULATORS.get(str(config.get("speculators_model_type")))
    if str(config.get("model_type")).startswith("gemma4") and "assistant" in str(config.get("model_type")):
        return "gemma4_mtp"
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if "eagle3" in str(name).lower():
            return "eagle3"
        if "DSpark" in str(name):
            # DeepSpec trains DFlash as a DSpark network without its correction.
            return "dspark" if _has_correction(checkpoint) else "dflash"
        if "DFlash" in str(name):
            return "dflash"
    return _method_by_tensors(checkpoint.tensors)


def _has_correction(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("markov_head.") for name in checkpoint.tensors)


def _method_by_tensors(tensors: Mapping[str, Tensor]) -> str | None:
    if any(name.startswith("markov_head.") for name in tensors):
        return "dspark"
    if any(name.startswith("mtp.") for name in tensors):
        return "mtp"
    fusion, query = tensors.get("fc.weight"), tensors.get("layers.0.self_attn.q_proj.weight")
    query = tensors.get("midlayer.self_attn.q_proj.weight", query)
    if fusion is None or query is None:
        return None
    # EAGLE-3's first layer reads embedding and state side by side; a block drafter's reads one width.
    if query.shape[1] == 2 * fusion.shape[0]:
        return "eagle3"
    return "dflash" if "hidden_norm.weight" in tensors else None
