"""SentencePiece vocabularies of GGUF files: ids are those of the definition, and text comes back whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider.errors import LoadError
from outrider.models.gguf_tokenizer import tokenizer_files
from tests.kit.gemma_pieces import Pieces, small_fields


def build(**changes: Any) -> Tokenizer:
    files = tokenizer_files(small_fields(**changes), source="x.gguf")
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


TOKENIZER, PIECES = build(), Pieces(small_fields())
TEXTS = st.lists(st.sampled_from([*"abcabc", " ", "  ", "\n", "<b>", "é", "🙂", "<0x41>", "\x00"]), max_size=24).map(
    "".join
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(TEXTS, st.text(max_size=12)))
def test_ids_are_those_of_the_definition_and_decode_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids == PIECES.encode(text)
    assert TOKENIZER.decode(ids[1:], skip_special_tokens=False) == text.replace("\u2581", " ")


def test_the_begin_token_comes_where_the_file_says_so_and_control_tokens_are_special() -> None:
    assert TOKENIZER.encode("ab").tokens[0] == "<bos>"
    assert build(add_bos_token=False).encode("ab").tokens[0] != "<bos>"
    assert TOKENIZER.decode(TOKENIZER.encode("<eos>a<b>").ids) == "a<b>"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scores": [0.0]}, "no score for each"),
        ({"scores": None}, "no score for each"),
        ({"add_space_prefix": True}, "add_space_prefix"),
        ({"token_type": [1]}, "1 token types for"),
        ({"model": "bert"}, "kind 'bert', expected gpt2 .* or llama"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        build(**changes)
