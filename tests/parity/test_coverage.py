"""The coverage matrix: every target and method of the published table, at tiny size with the real architecture.

Each cell loads the target from a folder with its real config keys and tensor names, drafts by the real method in the
engine at N = 1 to 8 while a script decides what is verified, holds every round against a recomputation that takes the
target's states from transformers' own model, and holds the text against plain decoding's. docs/coverage.md is the
result, printed: `OUTRIDER_COVERAGE_PAGE=docs/coverage.md pytest tests/parity/test_coverage.py` writes it. Source of the
table: AMD and Embedded LLM, "Exploring Speculative Decoding in vLLM on AMD GPUs", vLLM blog, 2026-08-23.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.families import load_model
from outrider.models.hf import rms_norm_of
from tests.kit import block_checkpoints, eagle3, gemma4_mtp, hf, hf_mtp, scripted, threads, tiny
from tests.kit.block_reference import BlockReference
from tests.kit.eagle3_reference import Eagle3Reference
from tests.kit.gemma4_mtp_reference import Gemma4MtpReference
from tests.kit.overheard import overheard, rounds_of

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
LENGTHS = range(1, 9)


@dataclass(frozen=True)
class Published:
    """A target of the table: its tiny stand-in, the larger model that holds it, and the methods measured on it.

    `outer`: the larger model's model_type, and what its tensors' and its output matrix's names begin with.
    """

    family: str
    outer: tuple[str, str, str] | None
    methods: tuple[str, ...]


_GEMMA4 = ("gemma4", "model.language_model.", "")
_QWEN35 = ("qwen3_5", "model.language_model.", "")
_QWEN35_MOE = ("qwen3_5_moe", "model.language_model.", "")
_KIMI = ("kimi_k25", "language_model.model.", "language_model.")
_MINIMAX = ("minimax_m3_vl", "language_model.model.", "language_model.")
TABLE = {
    "gemma-4-26B-A4B-it": Published("gemma4, experts", _GEMMA4, ("gemma4_mtp", "eagle3", "dflash")),
    "gemma-4-31B-it": Published("gemma4", _GEMMA4, ("gemma4_mtp", "eagle3", "dflash", "dspark")),
    "Qwen3-8B": Published("qwen3", None, ("eagle3", "dflash", "dspark")),
    "Qwen3.5-27B": Published("qwen3_5", _QWEN35, ("mtp", "dflash")),
    "Qwen3.5-122B-A10B": Published("qwen3_5_moe", _QWEN35_MOE, ("mtp", "dflash")),
    "Qwen3.6-27B": Published("qwen3_5", _QWEN35, ("mtp", "dflash")),
    "Qwen3.6-35B-A3B": Published("qwen3_5_moe", _QWEN35_MOE, ("mtp", "dflash")),
    "Kimi-K2.5": Published("deepseek_v3", _KIMI, ("eagle3", "dflash")),
    "MiniMax-M3-MXFP8": Published("minimax_m3", _MINIMAX, ("eagle3",)),
}
CELLS = [(name, method) for name, entry in TABLE.items() for method in entry.methods]
METHODS = ("mtp", "gemma4_mtp", "eagle3", "dflash", "dspark")
KINDS = {"LlamaModel": "own", "GemmaModel": "own", "HfModel": "transformers"}
passed: dict[tuple[str, str], str] = {}


class Slow:
    """A target as transformers runs it: whole texts, no cache."""

    def __init__(self, family: str) -> None:
        self.family, self.model = family, hf.reference(family)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()
        self._last: Tensor | None = None
        base = self.model.base_model
        base.norm.register_forward_pre_hook(self._keep)
        self.norm = rms_norm_of(base.norm).weight

    def _keep(self, _: Any, given: tuple[Tensor, ...]) -> None:
        self._last = given[0]

    def taps(self, text: Sequence[int], layers: Sequence[int]) -> Tensor:
        """States of a text by the number of layers that have run, side by side: [length, layers x width]."""
        with torch.no_grad():
            hidden = self.model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        assert self._last is not None
        states = [*hidden[:-1], self._last]
        return torch.cat([states[layer][0] for layer in layers], dim=1)


Logits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""Logits over the target's vocabulary [N, V] before each draft, from a history and the drafts."""
Cell = Callable[[Slow, Any, Path], tuple[dict[str, Any], Logits]]
"""From the target, slow and ours, and a folder to the speculative config and the recomputation."""


def eagle3_cell(slow: Slow, _: Any, folder: Path) -> tuple[dict[str, Any], Logits]:
    """Kimi's heads have its attention; others a Llama's."""
    taps = (1, 2, 4)
    if slow.family == "deepseek_v3":
        made = eagle3.latent(taps=taps)
    else:
        made = eagle3.flat(0, eagle3.Meaning(taps=taps), eagle_aux_hidden_state_layer_ids=list(taps))
    reference = Eagle3Reference(made.tensors, made.meaning, slow.embedding, slow.head, slow.norm)

    def logits(history: Sequence[int], chain: Sequence[int]) -> Tensor:
        return reference.logits(slow.taps(history[:-1], taps), history, chain)

    return made.save(folder), logits


def gemma4_mtp_cell(slow: Slow, model: Any, folder: Path) -> tuple[dict[str, Any], Logits]:
    """The assistant reads keys and values, which the recomputation takes from our target, run afresh."""
    made = gemma4_mtp.VARIANTS["dense"]()
    last_of_kind = {4: 2, 5: 3}
    layers = tuple(replace(layer, reads=last_of_kind[layer.reads]) for layer in made.meaning.layers)
    reference = Gemma4MtpReference(made.tensors, replace(made.meaning, layers=layers), model)
    return {"method": "mtp", "model": str(made.save(folder))}, reference.logits


def block_cell(name: str) -> Cell:
    """A block drafter's cell, of that variant."""

    def cell(slow: Slow, _: Any, folder: Path) -> tuple[dict[str, Any], Logits]:
        made = block_checkpoints.VARIANTS[name]()
        reference = BlockReference(made.tensors, made.meaning, slow.embedding, slow.head)
        ids = reference.draft_ids()

        def logits(history: Sequence[int], chain: Sequence[int]) -> Tensor:
            taps = slow.taps(history[:-1], made.meaning.taps)
            wide = torch.full((len(chain), tiny.VOCAB), -torch.inf, dtype=torch.float64)
            wide[:, ids] = reference.logits(taps, history[-1], chain)[0]
            return wide

        return made.save(folder), logits

    return cell


CELL: dict[str, Cell] = {
    "gemma4_mtp": gemma4_mtp_cell,
    "eagle3": eagle3_cell,
    "dflash": block_cell("dflash zlab"),
    "dspark": block_cell("dspark deepspec"),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with threads.one_thread():
        yield


@pytest.fixture(scope="module", autouse=True)
def _page() -> Iterator[None]:
    """After the whole matrix the page is written, or held against what ran."""
    yield
    if len(passed) < len(CELLS):
        return
    text = page()
    if chosen := os.environ.get("OUTRIDER_COVERAGE_PAGE"):
        Path(chosen).write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "docs/coverage.md is not what ran: write it again"


@pytest.mark.parametrize(("name", "method"), CELLS)
def test_cell(name: str, method: str, tmp_path: Path) -> None:
    entry = TABLE[name]
    slow = Slow(entry.family)
    made = hf_mtp.make(entry.family, tmp_path) if method == "mtp" else hf.save(slow.model, entry.family, tmp_path)
    model = target_of(slow, entry, tmp_path)
    if isinstance(made, hf_mtp.Made):
        settings, logits = {"method": "mtp"}, made.logits
    else:
        settings, logits = CELL[method](slow, model, tmp_path / "drafter")
    requests = [
        tiny.make_request(f"{seed}", tiny.random_prompt(60 + seed, length), seed=seed, max_tokens=14)
        for seed, length in enumerate((3, 18, 37))
    ]
    expected = tiny.tokens_of(tiny.make_engine(model), requests)
    script = scripted.Mixed(scripted.Truth(model, requests), 0.7, seed=7)
    chains = set()
    for length in LENGTHS:
        speculative = settings | {"num_speculative_tokens": length}
        engine = overheard(model, speculative, script, max_num_batched_tokens=32)
        rounds = rounds_of(engine, requests)
        assert len(rounds) > 3
        assert tiny.tokens_of(overheard(model, speculative, script), requests) == expected
        for item in rounds[:: 1 + length // 3]:
            assert len(item.chain) <= length
            wanted = logits(item.history, item.chain)
            chosen = wanted.gather(1, torch.tensor(item.chain)[:, None])[:, 0]
            assert bool((chosen >= wanted.amax(1) - 2e-4).all()), item.history
            chains.add(item.chain)
    assert len(chains) > 15
    passed[name, method] = KINDS[type(model).__name__]


def target_of(slow: Slow, entry: Published, folder: Path) -> Any:
    """A saved target as its published folder would be loaded, by whoever runs it."""
    if entry.outer is not None:
        model_type, prefix, head = entry.outer
        tied = slow.model.config.tie_word_embeddings
        hf.wrap(folder, prefix, head, {"model_type": model_type, "tie_word_embeddings": tied})
    return load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def page() -> str:
    """docs/coverage.md."""
    lines = [
        "# Coverage",
        "",
        "Every target and method of the published measurements, at tiny random size with the real architecture,",
        "config keys and tensor names. `yes`: loaded from its folder; in the engine at N = 1 to 8, with some drafts",
        "accepted and some not, every draft is the one that an independent recomputation of the whole text gives, over",
        "states of transformers' own model; and the greedy text is plain decoding's. Printed by",
        "`tests/parity/test_coverage.py`.",
        "",
        "| target | run by | " + " | ".join(f"`{method}`" for method in METHODS) + " |",
        "|---" * (2 + len(METHODS)) + "|",
    ]
    for name, entry in TABLE.items():
        (runner,) = {passed[name, method] for method in entry.methods}
        marks = " | ".join("yes" if (name, method) in passed else "" for method in METHODS)
        lines.append(f"| {name} | {runner} | {marks} |")
    lines += [
        "",
        f"{len(passed)} of {len(CELLS)} cells. A cell without a mark was not measured in that publication.",
        "",
    ]
    return "\n".join(lines)
