"""What Outrider needs to know from a checkpoint's config.json, and nothing else of it.

Families: llama (SmolLM2 is one), mistral, qwen2, qwen3 and mimo; they differ in biases, query and key norms and sliding
windows, which are fields here, never names to compare with. Both spellings of the files are read: `rope_theta` with
`rope_scaling`, and `rope_parameters`, which transformers 5 writes. What the forward pass cannot honour is refused.
Imports no torch, so that a command line can read a config at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.errors import LoadError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Published values of `model_type` that name another family's architecture in transformers."""
_ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched: all by one factor (linear), or the long wavelengths only (llama3).

    proportional: all by one factor, and only the first `rotated` share of the pairs turns at all.
    """

    kind: Literal["linear", "llama3", "proportional"]
    factor: float
    rotated: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What everybody may know of a target, of whatever family. `num_layers`: those that a tap can name, from 0 up."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TargetConfig):
    """The shape and the rules of a model of these families. Widths in elements; `sliding_window` in tokens or None."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None


def read_config(folder: Path) -> ModelConfig:
    """Read a checkpoint folder's config.json and generation_config.json.

    Raises LoadError naming the file and the key for a missing or broken file, an unknown family, or a setting that the
    forward pass cannot honour.
    """
    return parse_config(*read_files(folder), source=str(Path(folder) / "config.json"))


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a folder's config.json and generation_config.json, the latter empty where there is none."""
    generation = Path(folder) / "generation_config.json"
    raw = read_json(Path(folder) / "config.json")
    return raw, read_json(generation) if generation.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; LoadError naming the file where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LoadError(f"{path} is missing, expected a model folder in the Hugging Face format") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {_one_line(error)}; fetch the file again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelConfig:
    """The config from the two files' contents; `source` names the file in errors."""
    read = ConfigReader(raw, source)
    family = _family(read)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    theta, scaling = _rope(read)
    _refuse_unknown_behaviour(read)
    return ModelConfig(
        model_type=family,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(read, heads),
        head_dim=_head_dim(read, family, hidden, heads),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=family in ("qwen2", "mimo") or (family != "mistral" and read.flag("attention_bias")),
        output_bias=family in ("llama", "qwen3") and read.flag("attention_bias"),
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(read, family),
        max_position_embeddings=read.count("max_position_embeddings", 2048),
        **read_ends(generation, raw, source),
        dtype=read.text("dtype") or read.text("torch_dtype"),
    )


def read_ends(generation: Mapping[str, Any], raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`eos_token_ids` and `bos_token_id` for a config; the generation file's win. Raises LoadError."""
    ends, begins = (_token_ids(generation.get(key), raw.get(key), source) for key in ("eos_token_id", "bos_token_id"))
    return {"eos_token_ids": ends, "bos_token_id": next(iter(begins), None)}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config must hold, in the Hugging Face spelling."""
    width, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (config.intermediate_size, width),
        "mlp.up_proj.weight": (config.intermediate_size, width),
        "mlp.down_proj.weight": (width, config.intermediate_size),
    }
    if config.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (width,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


@dataclass(frozen=True)
class ConfigReader:
    """Typed reads of a config's keys; a key that is absent or null takes the default, and has to have one.

    Each raises LoadError naming the source and the key where the value is of another kind.
    """

    raw: Mapping[str, Any]
    source: str

    def refuse(self, what: str) -> LoadError:
        """The error for something in this file."""
        return LoadError(f"{self.source}: {what}")

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(f"{key} is {value!r}, expected a number above 0")
        return float(value)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(f"{key} is {value!r}, expected a whole number of at least {least}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A true or false."""
        value = self.raw.get(key)
        if value not in (None, True, False):
            raise self.refuse(f"{key} is {value!r}, expected true or false")
        return default if value is None else bool(value)

    def text(self, key: str) -> str | None:
        """A text, None for anything else."""
        value = self.raw.get(key)
        return value if isinstance(value, str) else None

    def table(self, key: str) -> Mapping[str, Any]:
        """An object; an empty one where the key is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(f"{key} is {value!r}, expected an object")
        return value or {}


def _family(read: ConfigReader) -> str:
    family = read.raw.get("model_type")
    if family not in FAMILIES:
        named = read.raw.get("architectures")
        also = f" (architectures {', '.join(map(str, named))})" if isinstance(named, list) and named else ""
        raise read.refuse(f"model_type is {family!r}{also}, expected one of {', '.join(FAMILIES)}")
    return str(family)


def _kv_heads(read: ConfigReader, heads: int) -> int:
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.refuse(f"num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads {heads}")
    return kv_heads


def _head_dim(read: ConfigReader, family: str, hidden: int, heads: int) -> int:
    # qwen3 checkpoints may leave the key out and then mean 128, whatever the width; the others mean an equal share.
    head_dim = read.count("head_dim", 128 if family == "qwen3" else max(hidden // heads, 1))
    if head_dim % 2:
        raise read.refuse(f"head_dim is {head_dim}, expected an even number (rotary pairs)")
    return head_dim


def _rope(read: ConfigReader) -> tuple[float, RopeScaling | None]:
    modern, old = read.table("rope_parameters"), read.table("rope_scaling")
    rope = ConfigReader(modern or old, read.source)
    theta = rope.number("rope_theta") if "rope_theta" in rope.raw else read.number("rope_theta", 10000.0)
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise read.refuse(f"rope scaling is of type {kind!r}, expected one of {', '.join(_ROPE_KINDS)}")
    for holder in (read, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise read.refuse("partial_rotary_factor is not 1, expected rotary positions over the whole head")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.number("factor"))
    return theta, RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def _refuse_unknown_behaviour(read: ConfigReader) -> None:
    activation = read.raw.get("hidden_act", read.raw.get("hidden_activation")) or "silu"
    if activation != "silu":
        raise read.refuse(f"hidden_act is {activation!r}, expected silu")
    if read.flag("mlp_bias"):
        raise read.refuse("mlp_bias is true, expected false (biases in the MLP are not implemented)")
    if method := read.table("quantization_config").get("quant_method"):
        raise read.refuse(f"the weights are quantised ({method}), expected bf16, fp16 or fp32, or a GGUF")


def _sliding_window(read: ConfigReader, family: str) -> int | None:
    if family == "llama" or read.raw.get("sliding_window") is None:
        return None
    if family != "mistral" and not read.flag("use_sliding_window"):
        return None
    num_layers = read.count("num_hidden_layers")
    kinds = read.raw.get("layer_types")
    if not isinstance(kinds, list):
        first = 0 if family == "mistral" else read.count("max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise read.refuse("sliding_window covers only some layers (layer_types), expected all or none")
    return read.count("sliding_window")


def _token_ids(first: object, second: object, source: str) -> tuple[int, ...]:
    value = second if first is None else first
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise LoadError(f"{source}: a bos or eos token id is {value!r}, expected whole numbers of at least 0")
    return ids


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
