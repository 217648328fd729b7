"""Ids to text, one committed token after another, watching for stop strings; one object a sequence.

Text appears as soon as it is certain and never before: bytes of an unfinished character wait, and so does text that
may still become a stop string. The work a token costs does not grow with the text: byte-level vocabularies go through
an incremental UTF-8 decoder, all others through a short window that is decoded again. Which tokens are pushed, and
what a stop means for the sequence, is the engine's to say (types.TextSink).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from outrider.text.tokenizer import Tokenizer
from outrider.types import SamplingParams

_REPLACEMENT = "\ufffd"
_MAX_WAITING = 16


class Detokenizer:
    """The text of one sequence. `push` each committed id, `take` what can be shown, `finish` once at the end.

    Taken and finished text joined is `text`; without a stop that is the decoding of all ids. A stop string ends the
    text before it, or after it with `include_stop_str_in_output`. It counts where its last character comes with a
    token that was pushed with `check_stop`; of several, the one that is complete first, then the longest. Cost: a few
    microseconds a token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder: _Decoder = (
            _ByteDecoder(tokenizer, skipped) if tokenizer.is_byte_level else _WindowDecoder(tokenizer, skipped)
        )
        self._stops = _StopWatch(tuple(params.stop)) if params.stop else None
        self._keep_stop = params.include_stop_str_in_output
        self._pieces: list[str] = []
        self._waiting = ""
        self._shown = 0
        self._ended = False

    def push(self, token_id: int, *, check_stop: bool) -> str | None:
        """Take the next committed id; give the stop string that it completes, if asked to check. None follows it."""
        assert not self._ended, "a token was pushed after the end of its sequence"
        new = self._decoder.step(token_id)
        if self._stops is None:
            if new:
                self._pieces.append(new)
            return None
        stop, used = self._stops.feed(new, check_stop)
        text = self._waiting + new[:used]
        if stop is not None:
            self._ended = True
            kept = text if self._keep_stop else text[: len(text) - len(stop)]
            self._pieces.append(kept)
            self._waiting = ""
            return stop
        certain = len(text) - self._stops.num_pending
        self._pieces.append(text[:certain])
        self._waiting = text[certain:]
        return None

    def take(self) -> str:
        """Text that can be shown now and was not taken before."""
        new = "".join(self._pieces[self._shown :])
        self._shown = len(self._pieces)
        return new

    def finish(self) -> str:
        """The rest, when no more ids come: what was held back, and an unfinished character as U+FFFD."""
        if not self._ended:
            self._ended = True
            self._pieces.append(self._waiting + self._decoder.flush())
            self._waiting = ""
        return self.take()

    @property
    def text(self) -> str:
        """All certain text so far, with what waits to see whether a stop string comes. Cost: grows with the text."""
        return "".join(self._pieces) + self._waiting


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """Exact for byte-level vocabularies: bytes of tokens, then UTF-8, which is what decoding them all at once does."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes, self._skipped = tokenizer.token_bytes, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowDecoder:
    """For any other vocabulary: decode the last few ids with and without the new ones, and give the difference.

    Where a run of byte tokens turns out not to be UTF-8 at all, what was shown of it stays shown.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        # Ids that were shown already and only give context, then ids that wait for the end of a character.
        self._context: list[int] = []
        self._waiting: list[int] = []

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._waiting.append(token_id)
        new = self._difference()
        if new.endswith(_REPLACEMENT) and len(self._waiting) < _MAX_WAITING:
            return ""
        if new:
            self._context, self._waiting = self._waiting, []
        return new

    def flush(self) -> str:
        new = self._difference() if self._waiting else ""
        self._waiting = []
        return new

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._context, False)
        return self._tokenizer.decode(self._context + self._waiting, False)[len(before) :]


class _StopWatch:
    """Follows all stop strings through the text at once, a character at a time, without looking back.

    `num_pending` is the length of the longest end of the text that a stop string begins with. Source: Knuth, Morris
    and Pratt 1977, one automaton a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first, so that of two that end together the one that began earlier is named.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self.num_pending = 0

    def feed(self, text: str, check: bool) -> tuple[str | None, int]:
        """Take new text; give the stop string that it completes and how much of the text that took."""
        for used, character in enumerate(text, start=1):
            stop = self._advance(character)
            if stop is not None and check:
                return stop, used
        self.num_pending = max(self._matched)
        return None, len(text)

    def _advance(self, character: str) -> str | None:
        complete = None
        for index, stop in enumerate(self._stops):
            length, borders = self._matched[index], self._borders[index]
            while length and stop[length] != character:
                length = borders[length]
            length += stop[length] == character
            if length == len(stop):
                complete = complete or stop
                length = borders[length]
            self._matched[index] = length
        return complete


def _borders(stop: str) -> list[int]:
    """For each length, how long a proper beginning of the string also ends its first `length` characters."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
