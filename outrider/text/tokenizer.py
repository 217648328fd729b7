"""Text to ids: plain prompts and chats, as a checkpoint's tokenizer.json and chat template say.

A thin layer over the `tokenizers` library that starts in milliseconds and gives the ids that transformers gives; it
does not import transformers. The chat template's own machine is in text/chat_template.py; ids to text, one after
another, is text/detokenizer.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from outrider.errors import LoadError, RequestError
from outrider.text.chat_template import ChatTemplate

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One checkpoint's tokenizer; `load` makes it. Safe to share between threads; nothing changes after loading.

    `vocab_size` is one more than the highest id, `special_ids` are left out of text when a request skips specials,
    `eos_ids` end a sequence (generation_config.json first, then config.json, then the tokenizer's own), `bos_id` may
    be None, `chat_template` is the template's text or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_ids: tuple[int, ...]) -> None:
        self.backend = backend
        self.chat_template: str | None = settings.get("chat_template")
        self.named_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(settings.get(name)))}
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos_ids = eos_ids or self._ids_of("eos_token")
        self.bos_id = next(iter(self._ids_of("bos_token")), None)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and what lies beside it; LoadError naming the file that is missing or broken."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LoadError(f"{path} is missing, expected a tokenizer in the tokenizers library's format")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            # Broad on purpose: the library raises no narrower class.
            reason = " ".join(str(error).split())
            raise LoadError(f"{path} is not a tokenizer ({reason}); fetch or convert it again") from error
        # A file may carry the cuts of its training; a prompt is never to be cut or filled silently.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _settings(folder), _eos_ids(folder))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template, expected chat_template in tokenizer_config.json or"
                " chat_template.jinja; send a plain prompt, or use an instruct model",
                param="messages",
            )
        return ChatTemplate(self.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the begin token where the model was trained with one."""
        return self._encode(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation; the template writes the special tokens, none is added. Raises RequestError."""
        return self._encode(self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt), False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The conversation as the model was trained to read it; `extra` reaches the template by name (tools, ...).

        Raises RequestError quoting the template's complaint, or saying that the model has none.
        """
        values = {"tools": None, "documents": None} | self.named_tokens | extra
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **values)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; an id that the tokenizer does not have adds nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a byte-level token stands for; none for an id that the tokenizer does not have."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _bytes_of(self.backend.id_to_token(token_id) or "")
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the prompt is not valid Unicode text (a lone surrogate?)", param="prompt") from error
        return ids

    def _ids_of(self, name: str) -> tuple[int, ...]:
        token_id = self.backend.token_to_id(self.named_tokens[name]) if name in self.named_tokens else None
        return () if token_id is None else (token_id,)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level vocabularies: printable Latin-1 stands for itself, the rest is moved to U+0100.

    Source: Radford et al. 2019 (GPT-2), section 2.2, and its released encoder.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        # Added tokens are plain text, and only some of them happen to be spelled in the byte alphabet.
        return token.encode()


def _settings(folder: Path) -> dict[str, Any]:
    settings = _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        try:
            template = alone.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{alone} cannot be read: {error}; fetch it again") from error
    return settings | {"chat_template": template if isinstance(template, str) else None}


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if found := tuple(token_id for token_id in ids if isinstance(token_id, int)):
            return found
    return ()


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _token_text(value: object) -> str | None:
    """A special token's text, which files spell as text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
