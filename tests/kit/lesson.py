"""Something to train on in seconds: a tiny target that walks in cycles, a corpus of its own text, and a short run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafting.train_config import TrainConfig
from outrider.llm import LLM
from outrider.train.corpus import Corpus, Sample
from outrider.train.trainer import Places, Trainer
from outrider.types import SamplingParams
from tests.kit.talker import VOCAB, save_talker
from tests.kit.tiny import random_prompt, save_tiny

KNOWN = 40
"""Ids that prompts are made of, and so those that answers have."""
ANSWER = 20
"""Tokens of each response."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "epochs": 8.0,
    "learning_rate": 0.01,
    "muon_learning_rate": 0.05,
    "batch_tokens": 240,
    "draft_vocab_size": KNOWN,
    "block_size": 4,
    "anchors": 4.0,
    "markov_rank": 8,
    "intermediate_size": 32,
    "num_layers": 1,
    "ttt_steps": 2,
    "held_out": 0.2,
    "eval_every": 4,
    "eval_prompts": 6,
    "eval_tokens": 12,
    "num_speculative_tokens": 3,
    "max_len": 64,
}
"""Small enough that a step takes milliseconds."""


def save_target(folder: Path) -> Path:
    """The target, with a tokenizer and a chat template."""
    save_talker(folder)
    return save_tiny(folder, 3, cyclic=True, vocab=VOCAB)


def load_target(folder: Path) -> LLM:
    """An engine over it in float32."""
    return LLM(str(folder), dtype="float32", max_num_seqs=8, kv_cache_tokens=2048)


def answers(llm: LLM, count: int) -> list[tuple[list[int], list[int]]]:
    """Random prompts and the target's greedy answers to them."""
    prompts = [list(random_prompt(seed, 4 + seed % 9, KNOWN)) for seed in range(count)]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]


def corpus_of(pairs: Sequence[tuple[list[int], list[int]]]) -> Corpus:
    """Those conversations as they are trained on."""
    samples = []
    for prompt, response in pairs:
        ids = np.array([*prompt, *response], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return Corpus(samples)


def write_corpus(pairs: Sequence[tuple[list[int], list[int]]], path: Path) -> Path:
    """Those conversations as a file."""
    lines = [json.dumps({"prompt_ids": prompt, "response_ids": response}) for prompt, response in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def trainer_of(method: str, llm: LLM, corpus: Corpus, run: Path, **changes: Any) -> Trainer:
    """A run with those settings."""
    places = Places(run=run, states=changes.pop("states", None))
    progress = changes.pop("progress", lambda *_: None)
    return Trainer(method, llm, corpus, TrainConfig(**(SETTINGS | changes)), places, progress)
