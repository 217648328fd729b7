"""What config.json says of a Gemma target: the text model of Gemma 3 or of dense Gemma 4, alone or in a larger one.

The generations differ in fields here, never in names to compare with; what differs between layers is in one record a
layer. Keys that a file leaves out mean what they mean in transformers. Mixtures of experts are not read. Source of the
keys and their defaults: transformers 5.24, `models/gemma3` and `models/gemma4`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.models.arch import ConfigReader, RopeScaling, TargetConfig, read_ends

if TYPE_CHECKING:
    from outrider.models.target import AttentionKind

GEMMA_FAMILIES = ("gemma3_text", "gemma3", "gemma4_text", "gemma4")
"""Values of `model_type`; those without _text hold their text model's keys in `text_config`."""

_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_OLD_THETA = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_ROPE_KINDS = ("default", "linear", "proportional")
_LAYER_KEYS = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True, kw_only=True)
class GemmaLayer:
    """One layer. `window`: tokens that it sees, None for all; `kv_source`: the layer whose keys and values it reads.

    `key_is_value`: values are the key projection's output, normed in their own way.
    """

    kind: AttentionKind
    window: int | None
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    kv_source: int
    key_is_value: bool = False


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(TargetConfig):
    """The shape and the rules of a Gemma. `norm_offset`: what its files leave off every norm weight.

    `value_norm`: values are normed, without a weight. `layer_scalar`: a stored number multiplies a layer's output.
    `per_layer_size`: width of what each layer is told of the token beside the residual; 0 where there is none.
    """

    num_heads: int
    layers: tuple[GemmaLayer, ...]
    rms_norm_eps: float
    norm_offset: float
    attention_scale: float
    value_norm: bool
    layer_scalar: bool
    per_layer_size: int = 0
    per_layer_vocab_size: int = 0
    final_soft_cap: float | None = None
    tie_word_embeddings: bool = True


def parse_gemma(raw: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> GemmaConfig:
    """The config from the contents of config.json and generation_config.json; `source` names the file in errors.

    Raises LoadError naming the key for a value that the forward pass cannot honour.
    """
    family = str(raw.get("model_type"))
    text = ConfigReader(raw if family.endswith("_text") else ConfigReader(raw, source).table("text_config"), source)
    _refuse_unknown_behaviour(text)
    modern = family.startswith("gemma4")
    layers = _layers(text, modern=modern)
    cap = text.raw.get("final_logit_softcapping")
    per_layer = text.count("hidden_size_per_layer_input", 256, least=0) if modern else 0
    return GemmaConfig(
        model_type=family,
        vocab_size=text.count("vocab_size", 262_144 if modern else 262_208),
        hidden_size=text.count("hidden_size", 2304),
        num_layers=len(layers),
        max_position_embeddings=text.count("max_position_embeddings", 131_072),
        **read_ends(generation, {**text.raw} | {key: value for key, value in raw.items() if value is not None}, source),
        dtype=next((name for key in ("dtype", "torch_dtype") if (name := raw.get(key) or text.raw.get(key))), None),
        num_heads=text.count("num_attention_heads", 8),
        layers=layers,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        norm_offset=0.0 if modern else 1.0,
        attention_scale=1.0 if modern else text.number("query_pre_attn_scalar", 256) ** -0.5,
        value_norm=modern,
        layer_scalar=modern,
        per_layer_size=per_layer,
        per_layer_vocab_size=text.count("vocab_size_per_layer_input", 262_144) if per_layer else 0,
        final_soft_cap=None if cap is None else text.number("final_logit_softcapping"),
        tie_word_embeddings=text.flag("tie_word_embeddings", True),
    )


def gemma_shapes(config: GemmaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config must hold, named as in the text model's own."""
    width, per_layer = config.hidden_size, config.per_layer_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for index, layer in enumerate(config.layers):
        own = _layer_shapes(config, layer, has_kv=layer.kv_source == index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (width,)
    if per_layer:
        both = config.num_layers * per_layer
        shapes["model.embed_tokens_per_layer.weight"] = (config.per_layer_vocab_size, both)
        shapes["model.per_layer_model_projection.weight"] = (both, width)
        shapes["model.per_layer_projection_norm.weight"] = (per_layer,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def _layer_shapes(config: GemmaConfig, layer: GemmaLayer, *, has_kv: bool) -> dict[str, tuple[int, ...]]:
    width, queries, keys = config.hidden_size, config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "pre_feedforward_layernorm.weight": (width,),
        "post_feedforward_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (layer.intermediate_size, width),
        "mlp.up_proj.weight": (layer.intermediate_size, width),
        "mlp.down_proj.weight": (width, layer.intermediate_size),
    }
    if has_kv:
        shapes |= {"self_attn.k_proj.weight": (keys, width), "self_attn.k_norm.weight": (layer.head_dim,)}
    if has_kv and not layer.key_is_value:
        shapes["self_attn.v_proj.weight"] = (keys, width)
    if config.layer_scalar:
        shapes["layer_scalar"] = (1,)
    if config.per_layer_size:
        shapes["per_layer_input_gate.weight"] = (config.per_layer_size, width)
        shapes["per_layer_projection.weight"] = (width, config.per_layer_size)
        shapes["post_per_layer_input_norm.weight"] = (width,)
    return shapes


def _layers(text: ConfigReader, *, modern: bool) -> tuple[GemmaLayer, ...]:
    kinds = _kinds(text, modern=modern)
    first_shared = len(kinds) - (text.count("num_kv_shared_layers", 0, least=0) if modern else 0)
    doubled = 2 if modern and text.flag("use_double_wide_mlp") else 1
    width = text.count("intermediate_size", 9216)
    ropes = {kind: _rope(text, kind, modern=modern) for kind in set(kinds)}
    layers = []
    for index, kind in enumerate(kinds):
        shared = index >= first_shared
        head_dim, kv_heads = _head_shape(text, index, kind, modern=modern)
        layers.append(
            GemmaLayer(
                kind=kind,
                window=None if kind == "full_attention" else text.count("sliding_window", 512 if modern else 4096),
                head_dim=head_dim,
                num_kv_heads=kv_heads,
                intermediate_size=width * doubled if shared else width,
                rope_theta=ropes[kind][0],
                rope_scaling=ropes[kind][1],
                kv_source=_source(text, kinds[:first_shared], kind) if shared else index,
                key_is_value=modern and kind == "full_attention" and text.flag("attention_k_eq_v"),
            )
        )
    return tuple(layers)


def _kinds(text: ConfigReader, *, modern: bool) -> list[AttentionKind]:
    count = text.count("num_hidden_layers", 30 if modern else 26)
    given = text.raw.get("layer_types")
    if given is None:
        every = 6 if modern else text.count("sliding_window_pattern", 6)
        given = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(count)]
    if not isinstance(given, list) or len(given) != count or not set(given) <= _THETA.keys():
        raise text.refuse(f"layer_types is {given!r}, expected {count} entries of {', '.join(_THETA)}")
    # Gemma 4's last layer sees everything, whatever the file says.
    return [*given[:-1], "full_attention"] if modern else given


def _source(text: ConfigReader, own: list[AttentionKind], kind: AttentionKind) -> int:
    """The last layer of a kind that has keys and values of its own."""
    if kind not in own:
        raise text.refuse(f"num_kv_shared_layers leaves no {kind} layer with keys of its own, expected fewer")
    return len(own) - 1 - own[::-1].index(kind)


def _head_shape(text: ConfigReader, index: int, kind: AttentionKind, *, modern: bool) -> tuple[int, int]:
    """Head size and number of key heads of a layer; newer files write them layer by layer, older ones by kind."""
    heads, head_dim = text.count("num_attention_heads", 8), text.count("head_dim", 256)
    kv_heads = text.count("num_key_value_heads", 4)
    listed = text.raw.get("per_layer_config")
    if modern and listed is not None:
        layer = _layer_table(text, index)
        head_dim, kv_heads = layer.count("head_dim", head_dim), layer.count("num_key_value_heads", kv_heads)
    elif modern and kind == "full_attention":
        head_dim = text.count("global_head_dim", 512)
        if text.flag("attention_k_eq_v"):
            kv_heads = text.count("num_global_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise text.refuse(f"num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads {heads}")
    if head_dim % 2:
        raise text.refuse(f"head_dim is {head_dim}, expected an even number (rotary pairs)")
    return head_dim, kv_heads


def _layer_table(text: ConfigReader, index: int) -> ConfigReader:
    listed = text.table("per_layer_config")
    found: Any = next((value for key, value in listed.items() if key.isdecimal() and int(key) == index), {})
    if not isinstance(found, dict) or not found.keys() <= _LAYER_KEYS:
        raise text.refuse(f"per_layer_config of layer {index} is {found!r}, expected {' and '.join(_LAYER_KEYS)} only")
    return ConfigReader(found, text.source)


def _rope(text: ConfigReader, kind: AttentionKind, *, modern: bool) -> tuple[float, RopeScaling | None]:
    rules = text.table("rope_parameters")
    # Older files have one base for each kind beside a scaling that only full attention heeds.
    default = text.raw.get("rope_scaling") if not modern and kind == "full_attention" else None
    if modern and not rules and kind == "full_attention":
        default = _PROPORTIONAL
    rope = ConfigReader(ConfigReader(rules, text.source).table(kind) or default or {}, text.source)
    theta = rope.number("rope_theta", text.number(_OLD_THETA[kind], _THETA[kind]))
    name: Any = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if name not in _ROPE_KINDS:
        raise text.refuse(f"rope scaling is of type {name!r}, expected one of {', '.join(_ROPE_KINDS)}")
    if name == "default":
        return theta, None
    factor = rope.number("factor", None if name == "linear" else 1.0)
    rotated = rope.number("partial_rotary_factor", 1.0) if name == "proportional" else 1.0
    return theta, RopeScaling(kind=name, factor=factor, rotated=rotated)


def _refuse_unknown_behaviour(text: ConfigReader) -> None:
    activation = text.raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise text.refuse(f"hidden_activation is {activation!r}, expected gelu_pytorch_tanh")
    if text.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise text.refuse("use_bidirectional_attention is set, expected a causal model")
    for key in ("attention_bias", "enable_moe_block"):
        if text.flag(key):
            raise text.refuse(f"{key} is true, expected false (not implemented here)")
    if cap := text.raw.get("attn_logit_softcapping"):
        raise text.refuse(f"attn_logit_softcapping is {cap}, expected none (attention has no cap here)")
    if method := text.table("quantization_config").get("quant_method"):
        raise text.refuse(f"the weights are quantised ({method}), expected bf16, fp16 or fp32, or a GGUF")
