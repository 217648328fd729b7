"""A module that vLLM's Speculators trained, stitched into a target that transformers runs: it drafts as recomputed.

The file is laid out as their fine-tuning run leaves it: names of its own, experts in one stack each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.errors import DrafterMismatch
from outrider.train.export import stitch
from tests.kit import hf, hf_mtp, scripted, threads, tiny
from tests.kit.hf_mtp import Made
from tests.kit.overheard import overheard, rounds_of

NAMES = {
    "mtp.fc.": "input_proj.",
    "mtp.pre_fc_norm_embedding.": "token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
    "mtp.norm.": "final_layernorm.",
    "mtp.layers.0.": "",
}
EXPERTS = "mtp.layers.0.mlp.experts."


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


def stacked(module: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module with its experts in two stacks, gate above up in the first."""
    single = {name: tensor for name, tensor in module.items() if name.startswith(EXPERTS)}
    rest = {name: tensor for name, tensor in module.items() if name not in single}
    if not single:
        return rest
    every = range(len(single) // 3)

    def of(index: int, kind: str) -> Tensor:
        return single[f"{EXPERTS}{index}.{kind}_proj.weight"]

    rest[EXPERTS + "gate_up_proj"] = torch.stack([torch.cat([of(i, "gate"), of(i, "up")]) for i in every])
    rest[EXPERTS + "down_proj"] = torch.stack([of(i, "down") for i in every])
    return rest


def save_speculators(made: Made, name: str, folder: Path) -> Path:
    """The module alone, in the Speculators format, with the frozen table that it may carry."""
    tensors = {"embed_tokens.weight": made.target.model.embed_tokens.weight.detach().clone()}
    for old_name, tensor in stacked(made.module).items():
        old, new = next(pair for pair in NAMES.items() if old_name.startswith(pair[0]))
        tensors["mtp_layers.0." + new + old_name.removeprefix(old)] = tensor.contiguous()
    config = {"speculators_model_type": "mtp", "speculators_config": {}, "transformer_layer_config": hf.CONFIGS[name]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def remove_module(made: Made) -> None:
    """Take the module, and the key that counts it, out of the target's folder."""
    whole = {name: tensor.clone() for name, tensor in load_file(made.folder / "model.safetensors").items()}
    save_file({name: t for name, t in whole.items() if name not in made.module}, made.folder / "model.safetensors")
    raw = json.loads((made.folder / "config.json").read_text())
    del raw[made.meaning.key]
    (made.folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "outer"),
    [("qwen3_next", ""), ("qwen3_5", ""), ("qwen3_5", "qwen3_5"), ("qwen3_5_moe", ""), ("qwen3_5_moe", "qwen3_5_moe")],
)
def test_a_stitched_target_drafts_as_recomputed(name: str, outer: str, tmp_path: Path) -> None:
    """Alone, and as the text part of a larger model."""
    (tmp_path / "target").mkdir()
    made = hf_mtp.make(name, tmp_path / "target")
    remove_module(made)
    if outer:
        hf.wrap(made.folder, "model.language_model.", "", {"model_type": outer})
    module = save_speculators(made, name, tmp_path / "module")
    with pytest.raises(DrafterMismatch, match="no multi-token prediction module"):
        registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), made.load())
    done = replace(made, folder=stitch(str(module), target=str(made.folder), output=tmp_path / "out"))
    model, requests = done.load(), [tiny.make_request(f"{n}", tiny.random_prompt(n, n), max_tokens=9) for n in (5, 20)]
    found = registry.resolve(SpeculativeConfig.parse({"method": "mtp"}), model)
    assert (found.num_speculative_tokens, found.model) == (1, str(done.folder))
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=8)
    rounds = rounds_of(overheard(model, {"method": "mtp", "num_speculative_tokens": 4}, script), requests)
    assert len(rounds) > 5
    for item in rounds:
        logits = done.logits(item.history, item.chain)
        chosen = logits.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - 1e-3).all()), item.history
