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
    "eagle3": "outrider.drafters.eagle3:Eagle3Drafter",
    "dflash": "outrider.drafters.dflash:DFlashDrafter",
    "dspark": "outrider.drafters.dspark:DSparkDrafter",
}
# Settings that are one method's own, which no other may be given.
_OWN_SETTINGS = {"dspark_draft_topk": "dspark"}


def names() -> tuple[str, ...]:
    """Every drafting method that can be configured."""
    return tuple(_DRAFTERS)


def check(config: SpeculativeConfig) -> None:
    """Raise ConfigError if the method does not exist (naming the nearest), or is given a setting of another one."""
    if config.method not in _DRAFTERS:
        nearest = difflib.get_close_matches(config.method, names(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"method is {config.method!r}, expected one of {', '.join(names())}{hint}", param="method")
    for setting, owner in _OWN_SETTINGS.items():
        if getattr(config, setting) is not None and config.method != owner:
            raise ConfigError(f"{setting} is set, but only method {owner} has it, not {config.method}", param=setting)


def create(config: SpeculativeConfig, target: TargetInfo) -> Drafter:
    """Build the configured drafter for this target. Raises ConfigError, LoadError, DrafterMismatch."""
    check(config)
    module, _, name = _DRAFTERS[config.method].partition(":")
    make: Callable[[SpeculativeConfig, TargetInfo], Drafter] = getattr(importlib.import_module(module), name)
    return make(config, target)
