"""Prediction modules of the families that transformers runs, in their published layouts, and their slow recomputation.

A module's decoder layer is the last one of a second random model of the same config, so that transformers itself names
its tensors and runs it: over the whole text, with its own attention and no cache. `Meaning` is written down by hand
beside every family; the recomputation reads it and never our config.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.models.hf import HfModel
from tests.kit import hf, tiny

LAST = 3
ENDS = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class Meaning:
    """Names as published. `one_more`: what a stored norm weight leaves off; `hands_on`: what the next draft reads."""

    key: str
    layer: str
    own: str
    token_norm: str
    state_norm: str
    fusion: str
    norm: str
    one_more: float
    blind_start: bool
    hands_on: str

    def of(self, number: int) -> Meaning:
        """The same for another of several modules; Qwen's share all but the layer."""
        first = 4 if "layers.4." in self.layer else 0
        old, new = f"layers.{first}.", f"layers.{first + number}."
        return replace(self, layer=self.layer.replace(old, new), own=self.own.replace(old, new))


_QWEN = ("mtp.layers.0.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_DEEPSEEK = ("model.layers.4.", "model.layers.4.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_MINIMAX = ("model.mtp.layers.0.transformer_layer.", "model.mtp.layers.0.", "enorm", "hnorm", "eh_proj")
MEANINGS = {
    "qwen3_next": Meaning("num_nextn_predict_layers", *_QWEN, 1.0, False, "normed"),
    "qwen3_5": Meaning("mtp_num_hidden_layers", *_QWEN, 1.0, False, "normed"),
    "qwen3_5_moe": Meaning("mtp_num_hidden_layers", *_QWEN, 1.0, False, "normed"),
    "deepseek_v3": Meaning("num_nextn_predict_layers", *_DEEPSEEK, 0.0, True, "normed"),
    "glm4_moe": Meaning("num_nextn_predict_layers", *_DEEPSEEK, 0.0, True, "before"),
    "minimax_m3": Meaning("num_mtp_modules", *_MINIMAX, "final_layernorm", 1.0, True, "before"),
}


@dataclass
class Made:
    """One target with its module, on disk and as it is recomputed."""

    folder: Path
    target: Any
    donors: list[Any]
    module: dict[str, Tensor]
    meaning: Meaning

    def load(self) -> HfModel:
        """The target as we run it."""
        return hf.load(self.folder)

    def logits(self, history: Sequence[int], chain: Sequence[int]) -> Tensor:
        """Logits [N, V] before each draft, given those before it.

        Row p reads the token after it and the target's normed state at p; rows after the text's last read a draft and
        what the row before them gave. Of several modules each makes a draft in turn: it reads one token further than
        the one before it, and what that one gave at the same row.
        """
        with torch.no_grad():
            states = self.target.model(torch.tensor([history[:-1]])).last_hidden_state[0]
            text, rows, in_turn = [*history, *chain], [], len(self.donors) > 1
            for step in range(len(chain)):
                ids = text[1 + step if in_turn else 1 :][: len(states)]
                before, normed = self._module(ids, states, step % len(self.donors))
                rows.append(self.target.lm_head(normed[-1]))
                after = normed if self.meaning.hands_on == "normed" else before
                states = after if in_turn else torch.cat([states, after[-1:]])
        return torch.stack(rows)

    def _module(self, ids: Sequence[int], states: Tensor, number: int) -> tuple[Tensor, Tensor]:
        meaning = self.meaning.of(number)
        embedded = self.target.model.embed_tokens.weight[torch.tensor(ids)]
        if meaning.blind_start:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = torch.cat(
            [
                self._normed(embedded, meaning.own + meaning.token_norm),
                self._normed(states, meaning.own + meaning.state_norm),
            ],
            1,
        )
        base = self.donors[number].model
        fused = both @ self.module[f"{meaning.own}{meaning.fusion}.weight"].T
        before = base(inputs_embeds=fused[None]).last_hidden_state[0]
        return before, self._normed(before, meaning.own + meaning.norm)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.module[f"{name}.weight"] + self.meaning.one_more
        return x / (x.pow(2).mean(-1, keepdim=True) + self.target.config.rms_norm_eps).sqrt() * weight


def make(name: str, folder: Path, modules: int = 1) -> Made:
    """A family's target with its modules inside, as it is published."""
    meaning, generator = MEANINGS[name], torch.Generator().manual_seed(5)
    target, donors = hf.reference(name), [hf.reference(name, seed=9 + number) for number in range(modules)]
    module: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for number, donor in enumerate(donors):
        hf.save(donor, name, folder / "donor")
        module |= _module(meaning.of(number), load_file(folder / "donor" / "model.safetensors"), generator)
        if "enorm" in meaning.token_norm:
            copies |= {meaning.of(number).own + end: torch.zeros(tiny.VOCAB, tiny.WIDTH) for end in ENDS}
        donor.model.layers, donor.model.norm = donor.model.layers[LAST:], nn.Identity()
        # Masks are chosen by a layer's place in the list, not by its number.
        if kinds := getattr(donor.config, "layer_types", None):
            donor.config.layer_types = kinds[LAST:] * len(kinds)
    hf.save(target, name, folder)
    inside = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(inside | module | copies, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {meaning.key: modules}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return Made(folder, target, donors, module, meaning)


def _module(meaning: Meaning, donated: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    prefix, width = f"model.layers.{LAST}.", tiny.WIDTH
    module = {meaning.layer + n.removeprefix(prefix): t.clone() for n, t in donated.items() if n.startswith(prefix)}
    for norm in (meaning.token_norm, meaning.state_norm, meaning.norm):
        noise = torch.randn(width, generator=generator)
        module[f"{meaning.own}{norm}.weight"] = 1 - meaning.one_more + 0.3 * noise
    fusion = torch.randn(width, 2 * width, generator=generator) * (2 * width) ** -0.5
    module[f"{meaning.own}{meaning.fusion}.weight"] = fusion
    return module
