"""Outrider: speculative decoding that keeps the target's own text. `from outrider import LLM, SamplingParams`.

The names below are the library's public ones; each is imported when first used, so that importing the package, and
`outrider --help`, costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.config import EngineConfig, SpeculativeConfig
    from outrider.errors import OutriderError
    from outrider.llm import LLM, CompletionOutput, RequestOutput
    from outrider.types import Delta, SamplingParams

__version__ = "0.1.0"
_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "llm",
    "RequestOutput": "llm",
    "Delta": "types",
    "SamplingParams": "types",
    "EngineConfig": "config",
    "SpeculativeConfig": "config",
    "OutriderError": "errors",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "OutriderError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(importlib.import_module(f"outrider.{_HOMES[name]}"), name)
