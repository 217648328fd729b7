"""The text that drafters learn from: conversations as token ids, with the target's own tokens marked.

One JSON object a line: {"prompt_ids": [...], "response_ids": [...]}, or a conversation as text, which a `Chat` turns
into the ids that the target would see. Lines that cannot be used are counted by reason and reported, never silently
dropped. Not here: what shapes conversations come in (conversations.py), making such a corpus (generate.py), and the
target's states for it (capture.py).
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.errors import LoadError
from outrider.models.arch import read_json
from outrider.text.tokenizer import Tokenizer
from outrider.train.conversations import Chat, Refused, checked, ids_of, messages_of, parse

_LONGEST = 1 << 20
"""Tokens of a conversation where the target does not say how many it takes."""


@dataclass(frozen=True)
class Sample:
    """One conversation as the target reads it: ids [S] int32, and which of them the target is to have produced."""

    ids: npt.NDArray[np.int32]
    is_response: npt.NDArray[np.bool_]
    kind: str = ""

    @property
    def prompt_key(self) -> str:
        """The same for conversations that begin with the same prompt."""
        first = int(np.argmax(self.is_response))
        return hashlib.sha256(self.ids[:first].tobytes()).hexdigest()


@dataclass
class Corpus:
    """What was read: usable conversations, and how many lines were not, by reason."""

    samples: list[Sample] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that count for training."""
        return int(sum(sample.is_response.sum() for sample in self.samples))


def read_corpus(path: Path, *, vocab_size: int, max_len: int, chat: Chat | None = None) -> Corpus:
    """Read a JSONL file, gzipped or not. Raises LoadError if it cannot be read or nothing in it is usable.

    Conversations of text need a `chat`; without one they are refused like every other line that cannot be used.
    """
    corpus = Corpus()
    for line in lines_of(path):
        try:
            corpus.samples.append(_sample(line, vocab_size, max_len, chat))
        except Refused as reason:
            corpus.refused[str(reason)] += 1
    if not corpus.samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in corpus.refused.most_common(5)) or "it is empty"
        raise LoadError(f"{path}: no usable conversation ({reasons})")
    return corpus


def limits_of(folder: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """(vocabulary size, longest sequence) of a target's folder, also of a family that the engine does not run."""
    raw = read_json(folder / "config.json")
    nested = raw.get("text_config")
    found = {**nested, **raw} if isinstance(nested, dict) else raw
    vocab_size, max_len = found.get("vocab_size"), found.get("max_position_embeddings")
    return (
        vocab_size if isinstance(vocab_size, int) else tokenizer.vocab_size,
        max_len if isinstance(max_len, int) else _LONGEST,
    )


def split_by_prompt(samples: Sequence[Sample], *, seed: int, held_out: float) -> tuple[list[Sample], list[Sample]]:
    """(training, held out): shuffled, and no prompt on both sides. `held_out` is the share of prompts."""
    keys = [int(hashlib.sha256(f"{seed} {sample.prompt_key}".encode()).hexdigest()[:8], 16) for sample in samples]
    order = np.random.default_rng(seed).permutation(len(samples))
    kept = [samples[i] for i in order if keys[i] >= held_out * 2**32]
    return kept, [samples[i] for i in order if keys[i] < held_out * 2**32]


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, gzipped or not. Raises LoadError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error


def _sample(line: bytes, vocab_size: int, max_len: int, chat: Chat | None) -> Sample:
    """The line's conversation. Raises Refused."""
    entry = parse(line)
    if {"prompt_ids", "response_ids"} <= entry.keys():
        prompt, response = (ids_of(entry[key], vocab_size) for key in ("prompt_ids", "response_ids"))
        if not len(prompt) or not len(response):
            raise Refused("without a prompt or a response")
        ids = np.concatenate([prompt, response])
        is_response = np.arange(len(ids)) >= len(prompt)
    else:
        messages = messages_of(entry)
        if chat is None:
            raise Refused("of text, and no tokenizer to read it was given")
        ids, is_response = chat.read(messages)
        checked(ids, vocab_size)
    if len(ids) > max_len:
        raise Refused(f"longer than {max_len} tokens")
    return Sample(ids, is_response, str(entry.get("kind") or ""))
