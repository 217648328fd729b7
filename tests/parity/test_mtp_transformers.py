"""Our prediction modules against transformers' own, on the same files: a draft of each module from one whole text.

Three differences are evened out. transformers embeds the first row's token where vLLM reads zeros; it places a row at
its token, one further than we do, which turns by the distance do not see; and it hands on a normed state in every
family, so that GLM-4's later drafts are not compared. A module of its is never run twice in a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.hf_loading import quiet
from tests.kit import hf_mtp, scripted, threads, tiny
from tests.kit.hf_mtp import Made
from tests.kit.overheard import overheard, rounds_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


class Theirs:
    """transformers' target and modules, read from a folder."""

    def __init__(self, made: Made) -> None:
        from transformers.modeling_layers import MtpModel

        kind = transformers.AutoModelForCausalLM
        with quiet():
            self.target = kind.from_pretrained(made.folder, dtype=torch.float32, attn_implementation="eager").eval()
            # It knows modules by the layer numbers of the published sizes.
            self.target._keys_to_ignore_on_load_unexpected = [r"layers\.[4-9]\."]
            self.modules = MtpModel.from_pretrained(self.target).eval()

    @torch.no_grad()
    def drafts(self, history: tuple[int, ...]) -> tuple[int, ...]:
        """One draft of each module."""
        from transformers.cache_utils import MtpCache

        states = self.target.model(torch.tensor([history[:-1]])).last_hidden_state
        blind = self.target.get_input_embeddings().register_forward_hook(_blind_start)
        try:
            ids, _, _ = self.modules(
                input_ids=torch.tensor([history[1:]]),
                last_hidden_states=states,
                attention_mask=None,
                position_ids=torch.arange(1, len(history))[None],
                mtp_cache=MtpCache(config=self.target.config.get_mtp_config()),
            )
        finally:
            blind.remove()
        return tuple(ids[0].tolist())


def _blind_start(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)


@pytest.mark.parametrize(("name", "modules"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1)])
def test_drafts_are_those_of_transformers(name: str, modules: int, tmp_path: Path) -> None:
    made = hf_mtp.make(name, tmp_path, modules=modules)
    theirs, model = Theirs(made), made.load()
    requests = [tiny.make_request(f"{n}", tiny.random_prompt(n, n), seed=n, max_tokens=14) for n in (2, 18, 37)]
    script = scripted.Mixed(scripted.Truth(model, requests), 0.5, seed=2)
    settings = {"method": "mtp", "num_speculative_tokens": modules}
    rounds = rounds_of(overheard(model, settings, script, max_num_batched_tokens=32), requests)
    assert len(rounds) > 15
    assert len({item.chain for item in rounds}) > 8
    for item in rounds:
        assert theirs.drafts(item.history)[: len(item.chain)] == item.chain, item.history
