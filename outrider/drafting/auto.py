"""Method "auto": what a policy says, the given one or the one that tune kept; without any, the drafter that its
makers saw accepted most.

The front of the registry for whoever takes a user's settings: any other method is the registry's as it is. What auto
chooses is guarded unless the settings say otherwise, and other settings beside it are kept. Nothing is measured here:
acceptance is no speed, so a choice by it alone says that `outrider tune` knows better.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from outrider.config import AUTO, SpeculativeConfig
from outrider.drafting import registry, zoo
from outrider.drafting.policy import kept_path, read_policy
from outrider.drafting.profile import read_acceptance
from outrider.errors import ConfigError
from outrider.models.fingerprint import fingerprint
from outrider.models.target import Target

_log = logging.getLogger(__name__)
_SAID = ("model", "num_speculative_tokens_per_batch_size")  # what a policy says and nobody beside it


def check(config: SpeculativeConfig) -> None:
    """As `registry.check`, and for "auto" whatever is wrong with its policy but for its target."""
    if not registry.is_auto(config):
        registry.check(config)
        return
    for setting in _SAID:
        if getattr(config, setting):
            raise ConfigError(f'{setting} is set, but method "{AUTO}" chooses it: leave it out', param=setting)
    if config.policy is not None:
        read_policy(Path(config.policy))


def resolve(config: SpeculativeConfig, target: Target) -> SpeculativeConfig | None:
    """As `registry.resolve`; None where plain decoding is the choice. Raises ConfigError also where none is known."""
    if registry.is_auto(config):
        check(config)
        rule = _rule(config, fingerprint(target))
        if rule is None:
            _log.warning("auto: the policy is plain decoding here, so nothing is drafted")
            return None
        config = _with_own(config, rule)
    return registry.resolve(config, target)


def _rule(config: SpeculativeConfig, weights: str) -> SpeculativeConfig | None:
    path = kept_path(weights) if config.policy is None else Path(config.policy)
    if config.policy is None and not path.is_file():
        return SpeculativeConfig(method=_most_accepted(weights))
    policy = read_policy(path)
    policy.check_target(weights, path)
    if config.workload and config.workload not in policy.classes:
        known = ", ".join(policy.classes) or "none"
        _log.warning("auto: %s has no class %s (it has %s), so its default is taken", path, config.workload, known)
    return policy.rule(config.workload)


def _with_own(config: SpeculativeConfig, rule: SpeculativeConfig) -> SpeculativeConfig:
    """The rule with what was set beside "auto", guarded unless told otherwise."""
    own = {name: value for name, value in config.stated().items() if name not in ("method", "policy", "workload")}
    if rule.guard is None:
        own = {"guard": True} | own
    return replace(rule, **own)


def _most_accepted(weights: str) -> str:
    """The method of the installed drafter with the highest recorded mean acceptance length on what all recorded."""
    found = {
        drafter.profile.method: recorded
        for drafter in zoo.drafters()
        if drafter.profile.fingerprint == weights and (recorded := read_acceptance(drafter.path))
    }
    if not found:
        raise ConfigError(
            f'method is "{AUTO}", but there is no policy for this target and no installed drafter that recorded its '
            "acceptance: run `outrider tune` with this model, or name a method",
            param="method",
        )
    common = set.intersection(*(set(recorded) for recorded in found.values()))
    means = {
        method: sum(recorded[name] for name in common or recorded) / len(common or recorded)
        for method, recorded in found.items()
    }
    best = max(means, key=lambda method: means[method])
    _log.warning(
        "auto: no policy for this target, so %s is taken, which its makers saw accepted most (%.2f tokens a round); "
        "`outrider tune` measures what is fastest here",
        best,
        means[best],
    )
    return best
