"""The exception tree: everything Outrider raises on purpose. Imports nothing.

A message says what went wrong, where, what was got, what was expected, and what to do next, in one line. Raise at the
border where the fault enters; inside, `assert` states what the border has already made true.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose; `param` names the setting or field at fault, if one is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(OutriderError):
    """A setting is unknown, impossible, or at odds with another."""


class LoadError(OutriderError):
    """A model, tokenizer or file could not be found or read."""


class DrafterMismatch(OutriderError):  # noqa: N818 - the field says mismatch
    """A drafter does not belong to this target (vocabulary, width, layers, tensors)."""


class RequestError(OutriderError):
    """One request asks for something that cannot be done; others are not affected."""


class CapacityError(OutriderError):
    """The request or the setting needs more memory, context or disk than there is."""


class BackendError(OutriderError):
    """An engine outside this process failed or answered nonsense."""


class ShapeError(OutriderError):
    """A programming error at a seam: a tensor or record does not have the shape that was promised."""
