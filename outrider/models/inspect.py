"""What a target's folder or GGUF file holds, said from its headers: family, shape, size, and what would run it.

No weight is read, and no code that a checkpoint brings. Not here: drafters (drafting/inspect.py) and loading. Source of
the marks of recurrent layers and experts: the config keys and tensor names that transformers 5.24 writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.errors import LoadError
from outrider.models.arch import read_files
from outrider.models.families import runs_here
from outrider.models.gemma import text_name
from outrider.models.gemma_config import GemmaConfig
from outrider.models.headers import Stored, read_headers
from outrider.models.loading import parse_any, tensor_shapes
from outrider.models.quantisation import seen_scheme, stated_scheme
from outrider.models.unknown_keys import UnknownKey, target_keys, unknown_keys

Runner = Literal["own code", "transformers", "nothing"]
_STATELESS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "minimax_m3_sparse"}
_STATE_TENSOR = ".A_log"
"""A tensor that every layer with a state has, whatever its family: the decay of the state."""
_NO_WEIGHTS = ("BOOL", "I64")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Weights:
    """What the headers say of all tensors together; types as the file spells them. Token ids are no parameters."""

    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Iterable[Stored]) -> Weights:
        """The sums."""
        found = list(tensors)
        kinds = sorted({tensor.dtype for tensor in found})
        num_parameters = sum(tensor.num_elements for tensor in found if tensor.dtype not in _NO_WEIGHTS)
        return cls(num_parameters, sum(tensor.num_bytes for tensor in found), tuple(kinds))


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What is known of a target; None where the files do not say. `why_not`: the reason why nothing runs it.

    `num_states`: layers that keep a state in place of keys. `quantisation`: the scheme. `has_code`: it brings code of
    its own, which is never run.
    """

    family: str
    runs_on: Runner
    why_not: str | None
    num_layers: int | None
    hidden_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    max_position_embeddings: int | None
    sliding_window: int | None
    num_states: int
    num_experts: int | None
    weights: Weights
    quantisation: str | None
    has_code: bool
    unknown: tuple[UnknownKey, ...]


def inspect_folder(folder: Path) -> TargetFacts:
    """From config.json and the headers of the weights. Raises LoadError in one line for files that cannot be read."""
    raw, _ = read_files(folder)
    tensors = read_headers(folder)
    runs_on, why_not = _runner(folder, raw, tensors)
    scheme = stated_scheme(folder, raw) or seen_scheme((name, tensor.dtype) for name, tensor in tensors.items())
    if scheme is not None:
        runs_on, why_not = "nothing", f"its weights are quantised ({scheme})"
    return _facts(raw, runs_on, why_not, Weights.of(tensors.values()), _num_states(raw, tensors), scheme)


def inspect_gguf(path: Path) -> TargetFacts:
    """From a GGUF file's header; it would be converted to bfloat16 once. Raises LoadError as converting it does."""
    from outrider.models.gguf import gguf_config, open_gguf

    reader = open_gguf(path)
    raw = gguf_config(reader, path)
    kinds = tuple(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    sizes = [(int(tensor.n_elements), int(tensor.n_bytes)) for tensor in reader.tensors]
    weights = Weights(sum(size for size, _ in sizes), sum(size for _, size in sizes), kinds)
    return _facts(raw, "own code", None, weights, 0, None)


def _facts(
    raw: Mapping[str, Any], runs_on: Runner, why_not: str | None, weights: Weights, num_states: int, scheme: str | None
) -> TargetFacts:
    text = {**raw, **inner} if isinstance(inner := raw.get("text_config"), Mapping) else raw
    return TargetFacts(
        family=str(raw.get("model_type")),
        runs_on=runs_on,
        why_not=why_not,
        num_layers=_count(text, "num_hidden_layers"),
        hidden_size=_count(text, "hidden_size"),
        num_heads=_count(text, "num_attention_heads"),
        num_kv_heads=_count(text, "num_key_value_heads"),
        head_dim=_count(text, "head_dim"),
        vocab_size=_count(text, "vocab_size"),
        max_position_embeddings=_count(text, "max_position_embeddings"),
        sliding_window=_window(text),
        num_states=num_states,
        num_experts=next((count for key in _EXPERT_KEYS if (count := _count(text, key))), None),
        weights=weights,
        quantisation=scheme,
        has_code="auto_map" in raw,
        unknown=tuple(unknown_keys(raw, keys)) if (keys := target_keys(raw)) else (),
    )


def _count(text: Mapping[str, Any], key: str) -> int | None:
    value = text.get(key)
    return value if type(value) is int else None


def _window(text: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one."""
    kinds = text.get("layer_types")
    slides = "sliding_attention" in kinds if isinstance(kinds, list) else text.get("use_sliding_window", True)
    return _count(text, "sliding_window") if slides else None


def _num_states(raw: Mapping[str, Any], tensors: Mapping[str, Stored]) -> int:
    inner = raw.get("text_config")
    kinds = (inner if isinstance(inner, Mapping) else raw).get("layer_types")
    by_kind = [kind for kind in kinds if kind not in _STATELESS] if isinstance(kinds, list) else []
    return len(by_kind) or sum(name.endswith(_STATE_TENSOR) and ".layers." in name for name in tensors)


def _runner(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Stored]) -> tuple[Runner, str | None]:
    """What would load it, found by the same readers; for code of our own the names and shapes are looked at too."""
    source = str(folder / "config.json")
    try:
        if runs_here(raw):
            _hold_against_config(raw, tensors, source)
            return "own code", None
        from outrider.models.hf_loading import read_hf

        read_hf(raw, source)
    except LoadError as error:
        return "nothing", str(error).removeprefix(f"{source}: ").removeprefix(f"{source} ")
    return "transformers", None


def _hold_against_config(raw: Mapping[str, Any], tensors: Mapping[str, Stored], source: str) -> None:
    config = parse_any(raw, {}, source=source)
    if isinstance(config, GemmaConfig):
        tensors = {text_name(name): tensor for name, tensor in tensors.items()}
    for name, shape in tensor_shapes(config).items():
        if name not in tensors:
            raise LoadError(f"it lacks {name}")
        if tensors[name].shape != shape:
            raise LoadError(f"{name} is {list(tensors[name].shape)}, expected {list(shape)} from config.json")
