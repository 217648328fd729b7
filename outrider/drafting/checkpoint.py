"""Published drafter checkpoints: a folder of config.json and safetensors, and which drafting method it is for.

The one place that tells formats apart by their marks, and that holds tensors against the shapes that a config asks for.
What a format's keys mean is read by the method's own leaf; here nothing is renamed but the `model.` prefix that some
exporters put before every tensor. Sources of the marks: vLLM 0.32 `config/speculative.py` and
`transformers_utils/configs/speculators`, and the published files themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.config_keys import ConfigKeys
from outrider.drafting.vocabulary import OFFSETS, UNREAD
from outrider.errors import DrafterMismatch
from outrider.models.arch import TargetConfig, read_json
from outrider.models.gemma import text_name
from outrider.models.loading import load_tensors
from outrider.models.quantisation import refuse_quantised
from outrider.models.store import resolve
from outrider.models.target import Target

_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
_PREFIX = "model."
_INTEGERS = {OFFSETS: torch.int64, UNREAD: torch.bool, "masked_embedding.token_ordering": torch.int64}
MODULE_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys that say how many prediction modules a target's checkpoint has; they are the depth it was trained for."""
_MODULES = ("mtp.", "mtp_layers.")
# DeepSeek's modules are numbered on from the target's layers; this norm tells them apart.
_NUMBERED = ".enorm.weight"
_CORRECTION = "markov_head."
_GEMMA4_DRAFTER = {"pre_projection.weight", "post_projection.weight"}
# What a class's name has in it, in lower case, and the method; the first that fits counts.
_CLASS_MARKS = {"eagle3": "eagle3", "peagle": "eagle3", "dspark": "dspark", "dflash2": "dflash2", "dflash": "dflash"}
_CLASS_MARKS |= {"museglimmerassistant": "dflash"}
_ELSEWHERE = ("medusa", "mlp_speculator")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """config.json as it is, the tensors by name as stored, and the folder that errors name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    source: str

    def mismatch(self, what: str) -> DrafterMismatch:
        """The error for this checkpoint."""
        return DrafterMismatch(f"drafter {self.source} {what}", param="model")


@dataclass(frozen=True)
class MadeFor:
    """The target that a config says it was made for; `taps` ascending, `num_layers` None where it does not say."""

    vocab_size: int
    hidden_size: int
    num_layers: int | None
    taps: tuple[int, ...]
    draft_vocab_size: int

    def check(self, checkpoint: Checkpoint, target: TargetConfig) -> None:
        """Raise DrafterMismatch naming the first thing in which the target is not the one it was made for."""
        pairs = [
            ("vocabulary", self.vocab_size, target.vocab_size),
            ("target width", self.hidden_size, target.hidden_size),
            ("number of target layers", self.num_layers or target.num_layers, target.num_layers),
        ]
        for what, ours, given in pairs:
            if ours != given:
                raise checkpoint.mismatch(
                    f"has a {what} of {ours}, the target one of {given}: use the drafter of this target"
                )
        if self.taps[-1] > target.num_layers:
            raise checkpoint.mismatch(f"reads layer {self.taps[-1]}, the target has {target.num_layers}: wrong target")
        if self.draft_vocab_size > self.vocab_size:
            raise checkpoint.mismatch(f"drafts from {self.draft_vocab_size} tokens, more than its {self.vocab_size}")


def read_checkpoint(name: str) -> Checkpoint:
    """Read a drafter's folder or hub name. Raises LoadError in one line, also for quantised weights, by their scheme.

    Cost: tensors are mapped, not copied.
    """
    folder = resolve(name)
    config = read_json(Path(folder) / "config.json")
    refuse_quantised(Path(folder), config)
    tensors = {plain_name(name): tensor for name, tensor in load_tensors(folder).items()}
    return Checkpoint(config, tensors, str(folder))


def plain_name(name: str) -> str:
    """A stored tensor's name without what a larger model and `model.` put before it."""
    return text_name(name).removeprefix(_PREFIX)


def module_names(names: Collection[str]) -> set[str]:
    """Those of some tensors' plain names that are a multi-token prediction module's."""
    numbered = tuple(name.removesuffix(_NUMBERED) + "." for name in names if name.endswith(_NUMBERED))
    return {name for name in names if name.startswith(_MODULES) or name.startswith(numbered)}


def module_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Those of the tensors that are a multi-token prediction module's; none where there is no such module."""
    names = module_names(checkpoint.tensors)
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name in names}


def module_folder(target: Target) -> str:
    """The target's own folder, which a module came in. Raises DrafterMismatch for a target without one."""
    if target.folder is None or not module_of(read_checkpoint(str(target.folder))):
        raise DrafterMismatch(
            f"the target {target.folder or 'in memory'} has no multi-token prediction module (tensors mtp.*,"
            " model.mtp_layers.* or layers after its last): take a target that ships one, or name a folder that holds"
            ' one as "model"',
            param="model",
        )
    return str(target.folder)


def check_tensors(checkpoint: Checkpoint, required: Shapes, optional: Shapes) -> None:
    """Raise DrafterMismatch naming the first tensors that are missing, left over, of another shape or type, or hold a
    value that is not finite. Cost: one pass over the weights.
    """
    tensors = checkpoint.tensors
    if missing := [name for name in required if name not in tensors]:
        raise checkpoint.mismatch(f"lacks {_some(missing)}, which its config asks for: fetch it again")
    if left := sorted(tensors.keys() - required.keys() - optional.keys()):
        raise checkpoint.mismatch(
            f"has {_some(left)}, which its config has no use for: config and tensors do not belong"
        )
    for name, shape in {**required, **optional}.items():
        if name in tensors:
            _check_tensor(checkpoint, name, shape)


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    tensor = checkpoint.tensors[name]
    if tuple(tensor.shape) != shape:
        raise checkpoint.mismatch(f"has {name} of shape {list(tensor.shape)}, expected {list(shape)} from its config")
    if name in _INTEGERS:
        if tensor.dtype != _INTEGERS[name]:
            raise checkpoint.mismatch(f"has {name} in {tensor.dtype}, expected {_INTEGERS[name]}")
        return
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise checkpoint.mismatch(f"has {name} in {tensor.dtype}, expected bfloat16, float16 or float32")
    # NaN and infinity show in the extremes, which cost one pass and no copy.
    if not all(torch.isfinite(edge) for edge in torch.aminmax(tensor)):
        raise checkpoint.mismatch(f"has NaN or infinity in {name}, expected finite weights: fetch it again")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def placed(checkpoint: Checkpoint, like: Tensor) -> dict[str, Tensor]:
    """The tensors that drafting reads, on the device of `like` and, weights, of its type."""
    return {
        name: tensor.to(device=like.device, dtype=like.dtype if tensor.is_floating_point() else None)
        for name, tensor in checkpoint.tensors.items()
        if name != UNREAD
    }


def method_of(checkpoint: Checkpoint) -> str | None:
    """The drafting method that a checkpoint is for, None where nothing in it says so."""
    return method_by_marks(checkpoint.config, {name: tuple(t.shape) for name, t in checkpoint.tensors.items()})


def method_by_marks(config: Mapping[str, Any], shapes: Shapes) -> str | None:
    """The same from config.json and the shapes of the tensors, by their plain names.

    What the file says of itself counts first (the Speculators format's key, the model's type, its classes), the shapes
    of its tensors last; a folder's or repository's name never does. May be a method that is not here.
    """
    if "speculators_config" in config or "speculators_model_type" in config:
        kind = config.get("speculators_model_type")
        return None if kind is None else _SPECULATORS.get(str(kind), str(kind))
    if (by_type := _method_by_type(str(config.get("model_type")))) is not None:
        return by_type
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        found = next((method for mark, method in _CLASS_MARKS.items() if mark in str(name).lower()), None)
        # DeepSpec trains DFlash as a DSpark network without its correction.
        if found == "dspark" and not any(_CORRECTION in tensor for tensor in shapes):
            return "dflash"
        if found is not None:
            return found
    return _method_by_tensors(shapes)


def _method_by_type(model_type: str) -> str | None:
    if model_type == "gemma4_mtp" or (model_type.startswith("gemma4") and model_type.endswith("assistant")):
        return "gemma4_mtp"
    if model_type.endswith("_mtp"):
        return "mtp"
    return model_type if model_type in _ELSEWHERE else None


def _method_by_tensors(shapes: Shapes) -> str | None:
    if any(_CORRECTION in name for name in shapes):
        return "dspark"
    if shapes.keys() >= _GEMMA4_DRAFTER:
        return "gemma4_mtp"
    if module_names(shapes):
        return "mtp"
    fusion, query = shapes.get("fc.weight"), shapes.get("layers.0.self_attn.q_proj.weight")
    query = shapes.get("midlayer.self_attn.q_proj.weight", query)
    if fusion is None or query is None or len(fusion) != 2 or len(query) != 2:
        return None
    # EAGLE-3's first layer reads embedding and state side by side; a block drafter's reads one width.
    if query[1] == 2 * fusion[0]:
        return "eagle3"
    return "dflash" if "hidden_norm.weight" in shapes else None


def own_method(method: str, model: str | None) -> str:
    """The method's name here for one that vLLM has: its `<family>_mtp` all mean mtp, and mtp with a Gemma 4 drafter is
    a method of its own. Raises LoadError where the drafter's config.json cannot be read.
    """
    if method.endswith("_mtp") and method != "gemma4_mtp":
        method = "mtp"
    if method != "mtp" or model is None:
        return method
    config = read_json(Path(resolve(model)) / "config.json")
    return "gemma4_mtp" if _method_by_type(str(config.get("model_type"))) == "gemma4_mtp" else method


def stated_length(config: Mapping[str, Any], source: str) -> int | None:
    """The N that a Speculators file was trained for, None where it states none. Raises LoadError naming the key."""
    table = config.get("speculators_config")
    methods = table.get("proposal_methods") if isinstance(table, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    if not isinstance(first, Mapping) or first.get("speculative_tokens") is None:
        return None
    return ConfigKeys(first, f"{source} (proposal_methods)", "").count("speculative_tokens")
