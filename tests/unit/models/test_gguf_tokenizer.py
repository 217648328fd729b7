"""How text is cut for each named pre-tokenizer; ids of a vocabulary without merges show the cuts of the words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from outrider.errors import LoadError
from outrider.models.gguf_tokenizer import tokenizer_files

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<|end|>", *LETTERS, "ab", "<tool>"],
    "tokenizer.ggml.token_type": [3, *[1] * 257, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.bos_token_id": 0,
}


def build(**changes: Any) -> Tokenizer:
    fields = FIELDS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_str(json.dumps(tokenizer_files(fields, source="x.gguf")["tokenizer.json"]))


def cuts(pre: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in build(pre=pre).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", "   ", "1", "2", "3", "4", " km", "!?", "\n", "\n", "x"]),
        ("gpt-2", ["It", "'s", "  ", " 1234", " km", "!?", "\n", "\n", "x"]),
        ("llama-bpe", ["It", "'s", "  ", " ", "123", "4", " km", "!?\n\n", "x"]),
        ("qwen2", ["It", "'s", "  ", " ", "1", "2", "3", "4", " km", "!?\n\n", "x"]),
        ("default", ["It", "'", "s", "  ", " ", "123", "4", " km", "!?", "\n", "\n", "x"]),
    ],
)
def test_each_name_cuts_in_its_own_way(pre: str, expected: list[str]) -> None:
    assert cuts(pre, "It's   1234 km!?\n\nx") == expected


def test_a_file_without_a_name_is_the_default() -> None:
    assert build().to_str() == build(pre="default").to_str()


def test_special_and_user_tokens_are_whole_and_only_control_ones_are_special() -> None:
    tokenizer = build(pre="smollm")
    ids = tokenizer.encode("ab<tool>ab<|end|>").ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == ["ab", "<tool>", "ab", "<|end|>"]
    assert tokenizer.decode(ids) == "ab<tool>ab"


def test_begin_and_end_tokens_frame_a_prompt_only_where_the_file_says_so() -> None:
    assert build(pre="smollm").encode("ab").tokens == ["ab"]
    assert build(pre="smollm", add_bos_token=True).encode("ab").tokens == ["<|end|>", "ab"]
    assert build(pre="smollm", add_eos_token=True).encode("ab").tokens == ["ab", "<|end|>"]
    assert build(pre="llama-bpe").encode("ab").tokens == ["<|end|>", "ab"]
    assert build(pre="llama-bpe", add_bos_token=False).encode("ab").tokens == ["ab"]


def test_llama_3_keeps_a_word_whole_that_no_merge_reaches() -> None:
    words = {"tokens": ["<|end|>", *LETTERS, "ab", "xyz"], "token_type": [3, *[1] * 258]}
    assert build(pre="llama-bpe", add_bos_token=False, **words).encode("xyz").tokens == ["xyz"]
    assert build(pre="gpt-2", **words).encode("xyz").tokens == ["x", "y", "z"]


def test_qwen_composes_characters_first() -> None:
    assert build(pre="qwen2").encode("e\u0301").ids == build(pre="qwen2").encode("\u00e9").ids
    assert build(pre="gpt-2").encode("e\u0301").ids != build(pre="gpt-2").encode("\u00e9").ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "kind 'bert'"),
        ({"pre": "viking"}, "pre-tokenizer 'viking'"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"merges": [1]}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, "merge 'ab '"),
        ({"merges": ["a b c"]}, "merge 'a b c'"),
        ({"merges": ["a c"]}, "do not fit"),
        ({"token_type": [1]}, "1 token types for 259 tokens"),
    ],
)
def test_broken_vocabularies_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        build(**changes)
