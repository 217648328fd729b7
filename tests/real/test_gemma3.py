"""Gemma 3 270M end to end: logits are transformers', ids are SentencePiece's, and drafts change no text.

It is the base model, without a chat template. Half a gigabyte once it is converted: where it is not in the cache yet it
is fetched, but not on a continuous-integration machine, which would do so in every run.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import OutriderError
from outrider.models import store
from outrider.models.attention import Batch
from outrider.native import library
from outrider.text.tokenizer import Tokenizer
from tests.kit.gemma_pieces import CONTROL, NORMAL, USER_DEFINED, Pieces

pytestmark = pytest.mark.real
NAME = "gemma3-270m"
PROMPTS = ["Once upon a time", "The capital of France is Paris. The capital of Italy is", "def add(a, b):\n    return"]
PIECES = [
    *(
        "word",
        " the",
        "Ünï",
        "日本",
        "한국어",
        "مرحبا",
        "🙂",
        "👩‍👩‍👧",
        "e\u0301",
        "\u00a0",
        "\u3000",
        "\u200b",
        "1",
        " 45",
        "½",
        "٣",
    ),
    *(
        " ",
        "  ",
        " " * 35,
        "\n",
        "\n\n\n",
        "\r\n",
        "\t\t",
        "'s",
        "!?",
        "->",
        "\x00",
        "aaaa",
        "=====",
        "\U0010ffff",
        "ababab",
    ),
    *("def f(x):\n    return {x: [1]}", "<start_of_turn>", "<bos>", "<table>", "<0x41>", "<unused3>", "<h1>x</h1>"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    is_ready = any(record.name == NAME and record.state == "ready" for record in store.list_models())
    if not is_ready and os.environ.get("CI"):
        pytest.skip(f"{NAME} is not in the cache; `outrider models pull {NAME}` fetches 238 MB")
    try:
        return store.resolve(NAME)
    except OutriderError as error:
        pytest.skip(f"{NAME} cannot be had here: {error}")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def pieces_of(folder: Path) -> Pieces:
    """The vocabulary by the definition. Merges stand in order of their score, which is all of it that ids need."""
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = raw["model"]["vocab"]
    merged = ["".join(pair) for pair in raw["model"]["merges"]]
    score = {token: -float(rank) for rank, token in reversed(list(enumerate(merged)))}
    added = {entry["content"]: CONTROL if entry["special"] else USER_DEFINED for entry in raw["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    is_byte = {f"<0x{byte:02X}>" for byte in range(256)}
    kinds = [added.get(token, 6 if token in is_byte else NORMAL) for token in tokens]
    fields = {"tokens": tokens, "scores": [score.get(token, 0.0) for token in tokens], "token_type": kinds}
    return Pieces({f"tokenizer.ggml.{key}": value for key, value in (fields | {"bos_token_id": 2}).items()})


def test_ids_are_those_of_sentencepiece_on_varied_texts(folder: Path, tokenizer: Tokenizer) -> None:
    chance, reference = random.Random(3), pieces_of(folder)
    for _ in range(1000):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 12)))
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_recorded_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.encode("Question: Why is the sky blue?\nAnswer:") == [
        *(2, 14977, 236787, 8922, 563, 506, 7217, 3730, 236881, 107, 7925, 236787)
    ]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template, tokenizer.vocab_size) == (
        2,
        (1,),
        None,
        262144,
    )


def test_logits_are_those_of_transformers(folder: Path) -> None:
    """Past the sliding window of 512."""
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    llm = LLM(str(folder), dtype="float32", kv_cache_tokens=1024)
    ids = llm.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[:600]
    rows = np.array([0, 100, 510, 511, 512, 513, 599])
    batch = Batch.pack(np.array(ids), [(0, 600)], [list(range(38))], rows, 16, torch.device("cpu"))
    ours = llm.engine.model(batch, llm.engine.model.new_cache(38 * 16)).logits
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, rows]
    assert torch.allclose(ours, expected, atol=2e-3 * float(expected.abs().max()))
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_drafts_change_no_text_and_the_text_makes_sense(folder: Path) -> None:
    if library() is None:
        pytest.skip("without the C kernels a bfloat16 row depends on how many rows come with it")
    llm = LLM(str(folder), kv_cache_tokens=2048)
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    for params in (
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40),
    ):
        plain, drafted = (
            [output.outputs[0] for output in engine.generate(PROMPTS, params)] for engine in (llm, llm.sibling(ngram))
        )
        assert [choice.token_ids for choice in drafted] == [choice.token_ids for choice in plain]
        assert sum(choice.stats.num_drafted for choice in drafted if choice.stats) > 0
        if not params.temperature:
            assert "there was a" in plain[0].text and "Rome" in plain[1].text and "a + b" in plain[2].text
