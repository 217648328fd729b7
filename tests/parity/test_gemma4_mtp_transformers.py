"""Our draft steps against transformers' on the same tiny weights and the same keys of the target.

Its generation loop stands at P + 1; here its network is asked for a step at P, as ours stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import scripted
from tests.kit.gemma4_mtp import VARIANTS, Made
from tests.kit.gemma4_mtp_reference import read_afresh
from tests.kit.overheard import overheard, requests_of, rounds_of

# The others say what transformers has no word for.
PUBLISHED = ("dense", "keys as values", "centroids")


def theirs(made: Made, folder: Path) -> Any:
    """transformers' network with these weights and none left over."""
    transformers = pytest.importorskip("transformers")
    made.config["text_config"]["vocab_size_per_layer_input"] = 0
    made.save(folder)
    kind = transformers.AutoModelForCausalLM
    model, notes = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["unexpected_keys"]
    assert not notes["mismatched_keys"]
    assert set(notes["missing_keys"]) <= {"lm_head.weight"}
    return model.eval()


def drafts_of(network: Any, made: Made, target: Any, history: tuple[int, ...], chain: tuple[int, ...]) -> Tensor:
    """Their logits [N, V] before each draft, given those before it."""
    state, cache = read_afresh(target, history[:-1])
    kinds = made.config["text_config"]["layer_types"]
    shared = {}
    for kind, layer in zip(kinds, made.meaning.layers, strict=True):
        # What a sliding layer's cache holds of a text is no more than its window.
        part = slice(-layer.window, None) if layer.window is not None else slice(None)
        shared[kind] = tuple(entry[part].transpose(0, 1)[None] for entry in cache[layer.reads])
    place, rows = torch.tensor([[len(history) - 2]]), []
    for token in [history[-1], *chain[:-1]]:
        embedded = target.embedding[token] * target.embedding.shape[1] ** 0.5
        inputs = torch.cat([embedded, state])[None, None]
        with torch.no_grad():
            out = network(inputs_embeds=inputs, position_ids=place, shared_kv_states=shared)
        state = out.last_hidden_state[0, 0]
        rows.append(out.logits[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("name", PUBLISHED)
def test_drafts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = VARIANTS[name]()
    # Neither its network caps logits nor suppresses tokens; its generation loop does the latter.
    made.config["text_config"].pop("final_logit_softcapping", None)
    made.generation = {}
    network, target, requests = theirs(made, tmp_path), made.target(), requests_of((4, 18, 37))
    script = scripted.Mixed(scripted.Truth(target, requests), 0.5, seed=2)
    rounds = rounds_of(overheard(target, {"method": "gemma4_mtp", "model": str(tmp_path)}, script), requests)
    assert len(rounds) > 10
    assert len({item.chain for item in rounds}) > 5
    for item in rounds:
        logits = drafts_of(network, made, target, item.history, item.chain)
        chosen = logits.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - 2e-4).all()), item.history
