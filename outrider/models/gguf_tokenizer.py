"""The tokenizer half of a GGUF conversion: its vocabulary to tokenizer.json and tokenizer_config.json.

Only how a file is written; reading text with it is text/tokenizer.py's. Two kinds are known. Byte-level BPE: what a
GGUF calls its `pre` names how text is cut before merging, and that has to be exact: a nearly right cut gives other ids.
Source of the cuts: each family's published tokenizer and the names in llama.cpp's vocabulary reader; a file without a
name means `default` there. SentencePiece BPE: no cuts; neighbours merge into the token of the highest score, and
characters that are in no token fall back to bytes. Source: Kudo and Richardson, arXiv:1808.06226, and its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from outrider.errors import LoadError

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENGLISH_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MODERN = _ENGLISH_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
"""What a space is in a SentencePiece vocabulary."""


def _cuts(*patterns: str) -> PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    # Digits are cut off before words are, so spaces in front of a number stay together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> PreTokenizer:
    return _cuts(_MODERN.replace("DIGITS", r"\p{N}{1,3}"))


def _qwen2() -> PreTokenizer:
    return _cuts(_MODERN.replace("DIGITS", r"\p{N}"))


def _default() -> PreTokenizer:
    return _cuts(r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


_PRE_TOKENIZERS = {"smollm": _smollm, "gpt-2": _gpt2, "llama-bpe": _llama3, "qwen2": _qwen2, "default": _default}


def tokenizer_files(fields: Mapping[str, Any], *, source: str) -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json from a GGUF's fields, by file name.

    Raises LoadError naming `source` for a vocabulary of another kind, an unknown `pre`, or broken lists.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise LoadError(
            f"{source} has a tokenizer of kind {kind!r}, expected gpt2 (byte-level BPE) or llama (SentencePiece BPE)"
        )
    tokens = _strings(fields, "tokenizer.ggml.tokens", source)
    kinds = _kinds(fields, tokens, source)
    if kind == "llama":
        tokenizer = _sentencepiece(fields, tokens, kinds, source)
    else:
        tokenizer = _byte_level(tokens, _strings(fields, "tokenizer.ggml.merges", source), pre, source)
    tokenizer.add_tokens(_added_tokens(tokens, kinds))
    if wrapper := _wrapper(fields, tokens, pre):
        tokenizer.post_processor = wrapper
    return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": _config(fields, tokens)}


def _strings(fields: Mapping[str, Any], key: str, source: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise LoadError(f"{source} has no list of strings at {key}; fetch or convert it again")
    return value


def _kinds(fields: Mapping[str, Any], tokens: Sequence[str], source: str) -> list[int]:
    kinds = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise LoadError(f"{source} has {len(kinds)} token types for {len(tokens)} tokens; fetch it again")
    return list(kinds)


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], source: str) -> Tokenizer:
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise LoadError(f"{source} puts a space in front of every text (add_space_prefix), which is not implemented")
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise LoadError(f"{source} has no score for each of its {len(tokens)} tokens; fetch or convert it again")
    normal = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL}
    # Who merges first is a matter of the merged token's score alone; where it can be cut in several ways, any will do.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _token(fields, tokens, "unknown")
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str, source: str) -> Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        raise LoadError(f"{source} has the pre-tokenizer {pre!r}, expected one of {', '.join(_PRE_TOKENIZERS)}")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    broken = next((pair for pair in pairs if not all(pair) or " " in pair[1]), None)
    if broken is not None:
        raise LoadError(f"{source} has the merge {' '.join(broken)!r}, expected two tokens with a space between")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        # Llama 3's vocabulary has words that no merge reaches; a word that is one token stays whole.
        model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        # Broad on purpose: for a merge outside the vocabulary the library raises no narrower class.
        raise LoadError(f"{source} has merges that do not fit its vocabulary ({error}); fetch it again") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _token(fields: Mapping[str, Any], tokens: Sequence[str], kind: str) -> str | None:
    token_id = fields.get(f"tokenizer.ggml.{kind}_token_id")
    return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None


def _wrapper(fields: Mapping[str, Any], tokens: Sequence[str], pre: str) -> processors.TemplateProcessing | None:
    """What puts the begin and end tokens around a plain prompt, where the model was trained so."""
    bos, eos = _token(fields, tokens, "bos"), _token(fields, tokens, "eos")
    # Llama 3 files often leave the flag out, and mean yes.
    begins = bos if fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") else None
    ends = eos if fields.get("tokenizer.ggml.add_eos_token", False) else None
    if begins is None and ends is None:
        return None
    order = [part for part in (begins, "$A", ends) if part]
    ids = {token: tokens.index(token) for token in (begins, ends) if token}
    return processors.TemplateProcessing(single=order, special_tokens=list(ids.items()))


def _config(fields: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": _token(fields, tokens, kind) for kind, short in named.items()}
    config: dict[str, Any] = {key: token for key, token in special.items() if token is not None}
    config |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if length := next((value for key, value in fields.items() if key.endswith(".context_length")), None):
        config["model_max_length"] = length
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
