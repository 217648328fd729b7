"""Renders a checkpoint's chat template, as strangers wrote it, in jinja2's sandbox.

The settings, the functions and the tags are those that templates are written for (transformers' documentation,
"Chat templates"): trimmed blocks, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`,
and `generation` blocks, which mark training text and change nothing here. Which template, and its values, is
text/tokenizer.py's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import RequestError

# What a template can raise on values that it was not written for, such as a message without content.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """One compiled template. Raises RequestError where its text does not parse."""

    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise RequestError(f"the chat template does not parse: {_one_line(error)}", param="messages") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """The text of a conversation; RequestError quoting what the template says where it refuses."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages is empty or not a list, expected at least one message", param="messages")
        if any(not isinstance(message, Mapping) or "role" not in message for message in messages):
            raise RequestError("messages has an entry without a role, expected role and content", param="messages")
        try:
            return self._template.render(messages=[dict(message) for message in messages], **values)
        except _FAILURES as error:
            raise RequestError(
                f"the chat template refuses these messages: {_one_line(error)}", param="messages"
            ) from error


class _GenerationTag(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
