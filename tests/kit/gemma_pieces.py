"""SentencePiece's BPE straight from its definition, and a GGUF's vocabulary of that kind: slow, and none of our code.

Text is first cut at the tokens that users defined and at control tokens, the longest where several begin; in between,
the two neighbours whose union has the highest score merge, the leftmost first, until none has a score; a character
without a token becomes its bytes. Source: Kudo and Richardson, arXiv:1808.06226; Sennrich et al., arXiv:1508.07909.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SPACE = "\u2581"


def small_fields(words: str = "ab abc ba bab cab bca abab bb", **changes: Any) -> dict[str, Any]:
    """A GGUF's fields: a few words over a, b and c, which do and do not begin with a space, and runs of spaces."""
    normal = list("abc") + [SPACE]
    for word in words.split():
        normal += [word[: end + 1] for end in range(1, len(word))] + [SPACE + word[:end] for end in range(1, len(word))]
    normal = list(dict.fromkeys(normal))
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "\n", "<b>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [CONTROL] * 4 + [USER_DEFINED] * 4 + [BYTE] * 256 + [NORMAL] * len(normal)
    # Scores that do not follow the length or the place of a token.
    scores = [0.0] * len(tokens) + [-float((7 * index) % len(normal)) for index in range(len(normal))]
    fields = {
        "model": "llama",
        "tokens": tokens + normal,
        "scores": scores,
        "token_type": kinds,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}


class Pieces:
    """The vocabulary of a GGUF's fields."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        tokens, scores, kinds = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
        self._ids = {token: index for index, token in enumerate(tokens)}
        entries = list(zip(tokens, scores, kinds, strict=True))
        self._score = {token: score for token, score, kind in entries if kind == NORMAL}
        self._whole: dict[str, list[str]] = {}
        for token, _, kind in sorted(entries, key=lambda entry: -len(entry[0])):
            if kind in (CONTROL, USER_DEFINED):
                self._whole.setdefault(token[0], []).append(token)
        self._bos = fields["tokenizer.ggml.bos_token_id"]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the begin token. Cost: cubic in the length of a part."""
        return [self._bos, *(token_id for part in self._parts(text) for token_id in part)]

    def _parts(self, text: str) -> Iterator[list[int]]:
        plain = place = 0
        while place < len(text):
            whole = next((token for token in self._whole.get(text[place], ()) if text.startswith(token, place)), None)
            if whole is None:
                place += 1
                continue
            yield self._merged(text[plain:place])
            yield [self._ids[whole]]
            plain = place = place + len(whole)
        yield self._merged(text[plain:])

    def _merged(self, text: str) -> list[int]:
        symbols = list(text.replace(" ", SPACE))
        while True:
            unions = [(self._score.get(a + b), place) for place, (a, b) in enumerate(zip(symbols, symbols[1:]))]  # noqa: B905 - neighbours
            best = max(((score, -place) for score, place in unions if score is not None), default=None)
            if best is None:
                return [token_id for symbol in symbols for token_id in self._of(symbol)]
            place = -best[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]

    def _of(self, symbol: str) -> list[int]:
        if symbol in self._score:
            return [self._ids[symbol]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
