"""The one list of drafting methods: a name, and where its drafter is. A new method is a file and a line here.

Everybody else (engine, CLI, contract tests) finds drafters through this list and never by name.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from outrider.config import SpeculativeConfig
from outrider.drafting.base import Drafter, TargetInfo
from outrider.errors import ConfigError

_DRAFTERS = {
    "ngram": "outrider.drafters.ngram:NgramDrafter",
    "draft_model": "outrider.drafters.draft_model:DraftModelDrafter",
}


def names() -> tuple[str, ...]:
    """Every drafting method that can be configured."""
    return tuple(_DRAFTERS)


def check(config: SpeculativeConfig) -> None:
    """Raise ConfigError naming the nearest method if the configured one does not exist."""
    if config.method not in _DRAFTERS:
        nearest = difflib.get_close_matches(config.method, names(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"method is {config.method!r}, expected one of {', '.join(names())}{hint}", param="method")


def create(config: SpeculativeConfig, target: TargetInfo) -> Drafter:
    """Build the configured drafter for this target. Raises ConfigError, LoadError, DrafterMismatch."""
    check(config)
    module, _, name = _DRAFTERS[config.method].partition(":")
    make: Callable[[SpeculativeConfig, TargetInfo], Drafter] = getattr(importlib.import_module(module), name)
    return make(config, target)
