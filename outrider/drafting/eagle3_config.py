"""What an EAGLE-3 checkpoint's config.json says, in every published format, and the tensors that it asks for.

Not here: the network, and writing the formats (drafters/eagle3.py). Sources: vLLM 0.32 `llama_eagle3.py`,
`qwen3_eagle3.py`, `deepseek_eagle3.py`, `eagle3_utils.py`, `configs/speculators/algos.py`; DeepSpec `modeling/eagle3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafting.checkpoint import Checkpoint
from outrider.drafting.config_keys import ConfigKeys, layer_config, sliding_layers
from outrider.drafting.latent import LatentShape
from outrider.models.arch import ModelConfig, expected_shapes

NESTED = "eagle_config"
FIRST, OLD_FIRST = "layers.0.", "midlayer."
# The classes that files are written for, and whose layers they have; a name without Eagle3 means the one with it.
_LLAMA = ("Llama", "MiniMaxM2", "Qwen2_5vl", "Qwen3vl")
_FAMILY_OF = {f"Eagle3{name}ForCausalLM": "llama" for name in _LLAMA}
_FAMILY_OF |= {"Eagle3Qwen3ForCausalLM": "qwen3", "LlamaForCausalLMEagle3": "llama", "Qwen3Eagle3Model": "qwen3"}
_LATENT = "deepseek"
_FAMILY_OF |= {"Eagle3DeepseekV2ForCausalLM": _LATENT, "Eagle3DeepseekV3ForCausalLM": _LATENT}
# Where the tapped layers are listed: table, key, and what turns an entry into a number of layers that have run.
_TAP_KEYS = (
    (None, "eagle_aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 1),
    (NESTED, "layer_ids", 0),
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint's config says. `taps` count target layers that have run; `windows` has one a layer.

    `norm_before_residual`: the first layer's residual starts from the normed state. `norm_before_fc`: one norm over all
    taps; `fc_norm`: one for each of them. `norm_output`: the next draft's row reads the normed output. `fuses_taps`
    False: the state is the target's last one, normed, and nothing is fused. `logit_scale` multiplies the logits.
    `latent`: the layers' attention, where it is not `model`'s.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    windows: tuple[int | None, ...]
    draft_vocab_size: int
    target_hidden_size: int
    num_target_layers: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fuses_taps: bool = True
    logit_scale: float = 1.0
    latent: LatentShape | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any], *, source: str, num_target_layers: int) -> Eagle3Config:
        """From config.json, flat or in the Speculators format. Raises LoadError naming the key."""
        keys = ConfigKeys(raw, source, NESTED)
        family, layers, latent = _family(keys), keys, None
        if family == _LATENT:
            family, layers, latent = "llama", replace(keys, raw=_without_latent(raw)), LatentShape.read(keys)
        # The published implementations have no bias on the attention's output, whatever attention_bias says.
        model = replace(layer_config(layers, family, ("llama", "qwen3")), output_bias=False)
        fuses = keys.flag("use_aux_hidden_state", True)
        slides = sliding_layers(keys, model.num_layers)
        window = keys.count("sliding_window") if any(slides) else None
        return cls(
            model=model,
            taps=_taps(keys, num_target_layers) if fuses else (num_target_layers,),
            windows=tuple(window if slide else None for slide in slides),
            draft_vocab_size=keys.count("draft_vocab_size", model.vocab_size),
            target_hidden_size=keys.count("target_hidden_size", model.hidden_size),
            num_target_layers=keys.count("num_target_layers", num_target_layers),
            norm_before_residual=keys.flag("norm_before_residual", keys.is_speculators),
            norm_before_fc=keys.flag("norm_before_fc", False),
            fc_norm=keys.flag("fc_norm", False),
            norm_output=keys.flag("norm_output", False),
            fuses_taps=fuses,
            logit_scale=keys.number("logit_scale", 1.0),
            latent=latent,
        )

    def shapes(self, first: str = FIRST) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the network must have; `first` is the prefix of its first layer."""
        width, fused = self.model.hidden_size, len(self.taps) * self.target_hidden_size
        layers = {name.removeprefix("model."): shape for name, shape in expected_shapes(self.model).items()}
        shapes = {name: shape for name, shape in layers.items() if name.startswith("layers.")}
        if self.latent is not None:
            shapes = {name: shape for name, shape in shapes.items() if ".self_attn." not in name}
            for index in range(self.model.num_layers):
                shapes |= self.latent.shapes(f"layers.{index}.self_attn.", width if index else 2 * width, width)
        for name in ("q", "k", "v") if self.latent is None else ():
            key = f"{FIRST}self_attn.{name}_proj.weight"
            shapes[key] = (shapes[key][0], 2 * width)
        shapes[FIRST + "hidden_norm.weight"] = (width,)
        shapes = {renamed(name, FIRST, first): shape for name, shape in shapes.items()}
        shapes["norm.weight"] = (width,)
        if self.fuses_taps:
            shapes["fc.weight"] = (width, fused)
            if self.norm_before_fc:
                shapes["input_norm.weight"] = (fused,)
            if self.fc_norm:
                shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(len(self.taps))}
        return shapes


def _without_latent(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the layers around a latent attention, which has its own rotation and as many keys as queries."""
    plain = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_parameters", "head_dim")}
    return plain | {"num_key_value_heads": raw.get("num_attention_heads"), "head_dim": 2}


def first_of(checkpoint: Checkpoint) -> str:
    """What the names of the first layer's tensors begin with in a file."""
    return OLD_FIRST if any(name.startswith(OLD_FIRST) for name in checkpoint.tensors) else FIRST


def renamed(name: str, prefix: str, other: str) -> str:
    """The name with another beginning, if it begins so."""
    return other + name.removeprefix(prefix) if name.startswith(prefix) else name


def _family(keys: ConfigKeys) -> object:
    """Whose layers the draft network has: as its class says, where it says one, else as its layers' model_type."""
    keys.expect_kind("eagle3")
    if keys.is_speculators or not keys.architectures:
        return keys.layer_keys.get("model_type", "llama")
    name = keys.architectures[0]
    known = name if "Eagle3" in name else f"Eagle3{name}"
    if known not in _FAMILY_OF:
        raise keys.error(f"architectures names {name}, expected one of {', '.join(_FAMILY_OF)}")
    return _FAMILY_OF[known]


def _taps(keys: ConfigKeys, num_target_layers: int) -> tuple[int, ...]:
    """The tapped layers, ascending; vLLM's choice for a file that names none."""
    for table, key, offset in _TAP_KEYS:
        holder = keys.raw if table is None else keys.raw.get(table)
        ids = holder.get(key) if isinstance(holder, Mapping) else None
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(entry) is int and entry + offset >= 0 for entry in ids):
            raise keys.error(f"{key} is {ids!r}, expected a list of layer numbers from {-offset}")
        return tuple(sorted({entry + offset for entry in ids}))
    return tuple(sorted({2, num_target_layers // 2, max(0, num_target_layers - 3)}))
