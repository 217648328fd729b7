"""`outrider check`: verdicts in words and JSON, and an exit code that a script can trust."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.models.llama import LlamaModel
from tests.kit.command import Here

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
QUICK = ("--dataset", "copy", "--num-prompts", "3", "--max-tokens", "16")


@pytest.mark.real
def test_every_section_is_judged_and_written(smollm2: str, here: Here, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = (*QUICK, "--num-samples", "12", "--n-range", "2:3", "--json", str(file))
    ended = here("check", smollm2, "--speculative-config", NGRAM, *words)
    assert ended.code == 0, ended.out + ended.err
    found = json.loads(file.read_text())
    assert found["verdict"] == "same"
    assert [run["speculative_config"]["num_speculative_tokens"] for run in found["runs"]] == [2, 3]
    for run in found["runs"]:
        assert set(run["sections"]) == {"greedy", "sampled", "distribution"}
        assert run["num_drafted"] > 0
    assert "ngram N=2 greedy: same, 3 prompts" in ended.out


@pytest.mark.real
def test_standard_verification_is_judged_by_its_distribution(smollm2: str, here: Here) -> None:
    config = NGRAM[:-1] + ', "rejection_sample_method": "standard"}'
    ended = here("check", smollm2, "--speculative-config", config, *QUICK, "--num-samples", "12")
    assert ended.code == 0 and "sampled: not-applicable" in ended.out and "distribution: same" in ended.out


@pytest.mark.real
def test_nothing_drafted_is_no_proof(smollm2: str, here: Here) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 40, "prompt_lookup_max": 40}'
    words = ("--dataset", "chat", "--num-prompts", "2", "--max-tokens", "4", "--num-samples", "0")
    ended = here("check", smollm2, "--speculative-config", config, *words)
    assert ended.code == 1 and "nothing was drafted" in ended.out


@pytest.mark.real
def test_a_forward_that_depends_on_its_rows_is_found(smollm2: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this command is for: rows with drafts beside them come out as another token's."""
    whole = LlamaModel.__call__

    def faulty(self: LlamaModel, *arguments: object, **more: object) -> object:
        result = whole(self, *arguments, **more)  # type: ignore[arg-type]
        if result.logits.shape[0] != 4:
            return result
        return replace(result, logits=torch.cat([result.logits[:-1], result.logits[-1:].flip(1)]))

    monkeypatch.setattr(LlamaModel, "__call__", faulty)
    words = ("--dataset", "copy", "--num-prompts", "1", "--max-tokens", "24", "--num-samples", "0")
    ended = here("check", smollm2, "--speculative-config", NGRAM, *words)
    assert ended.code == 1 and "divergence at prompt 0, token" in ended.out
    assert "again: outrider check smollm2" in ended.out and "--prompt-index 0" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--n-range", "3:1"), "n_range"),
        (("--temperature", "0"), "temperature"),
        (("--prompt-index", "4000"), "prompt-index"),
        (("--json", "/nowhere/out.json"), "no such folder"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(here: Here, words: tuple[str, ...], said: str) -> None:
    ended = here("check", "smollm2", "--speculative-config", NGRAM, *words)
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert said in ended.err or said.replace("_", "-") in ended.err
