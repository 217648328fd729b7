"""How published checkpoints store multi-token prediction modules, and in what the modules of families differ.

All fuse the embedding of a row's next token with a state of the target, run one decoder layer of the target's kind, and
score with the target's own matrix; names, order and norms differ. Which layout a file has is told by its tensors' names
(without `model.` before them). Not here: anything that runs. Sources: DeepSeek-V3, arXiv:2412.19437; vLLM 0.32
`deepseek_mtp.py`, `glm4_moe_mtp.py`, `minimax_m3_mtp.py`, `mimo_mtp.py`, `qwen3_next_mtp.py`, `qwen3_5_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

_OWN_ENDS = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published layout. `layer` and `own`: prefixes of a module's decoder layer and of its four tensors, by number.

    `state_first`: which half `fusion` reads first; `after_norm`: the target's state is the one after its final norm;
    `blind_start`: the row at position 0 reads no embedding; `hands_on_normed`: the next draft's row reads the module's
    state after its last norm, not before; `first`: the first module's number.
    """

    layer: str
    own: str
    token_norm: str
    state_norm: str
    fusion: str
    norm: str
    state_first: bool = False
    after_norm: bool = True
    blind_start: bool = True
    hands_on_normed: bool = True
    first: int = 0

    def name(self, part: str, index: int = 0) -> str:
        """The full name of one of a module's own tensors."""
        return f"{self.own.format(self.first + index)}{part}.weight"

    def layer_prefix(self, index: int = 0) -> str:
        """What stands before the names of a module's decoder layer."""
        return self.layer.format(self.first + index)

    def own_shapes(self, width: int, index: int = 0) -> dict[str, tuple[int, ...]]:
        """Name and shape of a module's tensors beside its decoder layer."""
        shapes: dict[str, tuple[int, ...]] = {self.name(self.fusion, index): (width, 2 * width)}
        return shapes | {self.name(norm, index): (width,) for norm in (self.token_norm, self.state_norm, self.norm)}

    def ends(self, index: int = 0) -> set[str]:
        """Names of a module's copies of the target's two ends, which are not read: it shares the target's."""
        return {self.own.format(self.first + index) + end for end in _OWN_ENDS}

    def layer_tensors(self, tensors: Mapping[str, Tensor], index: int = 0) -> dict[str, Tensor]:
        """A module's decoder layer, named as in the layer."""
        own = {self.name(part, index) for part in (self.fusion, self.token_norm, self.state_norm, self.norm)}
        own |= self.ends(index)
        prefix = self.layer_prefix(index)
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix) and n not in own}


MIMO = Layout(
    layer="mtp_layers.{}.",
    own="mtp_layers.{}.",
    token_norm="token_layernorm",
    state_norm="hidden_layernorm",
    fusion="input_proj",
    norm="final_layernorm",
    state_first=True,
    after_norm=False,
)
QWEN = Layout(
    layer="mtp.layers.{}.",
    own="mtp.",
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    fusion="fc",
    norm="norm",
    blind_start=False,
)
DEEPSEEK = Layout(
    layer="layers.{}.",
    own="layers.{}.",
    token_norm="enorm",
    state_norm="hnorm",
    fusion="eh_proj",
    norm="shared_head.norm",
)
MINIMAX = Layout(
    layer="mtp.layers.{}.transformer_layer.",
    own="mtp.layers.{}.",
    token_norm="enorm",
    state_norm="hnorm",
    fusion="eh_proj",
    norm="final_layernorm",
    hands_on_normed=False,
)


def layout_of(names: Iterable[str], model_type: str, num_layers: int) -> Layout:
    """The layout that a checkpoint's tensors are in; of a family whose modules hand on another state, with that."""
    names = set(names)
    if any(name.startswith("mtp_layers.") for name in names):
        return MIMO
    if MINIMAX.name("enorm") in names:
        return MINIMAX
    deepseek = replace(DEEPSEEK, first=num_layers, hands_on_normed=not model_type.startswith("glm4_moe"))
    return deepseek if deepseek.name("enorm") in names else QWEN
