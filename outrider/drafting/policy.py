"""Which drafting to do where: a rule for each class of requests, as a file that sweep and tune write and verbs load.

A policy belongs to one target, by its fingerprint. The rule of a class, or of all others by default, is a method with
its settings and N by the number of running requests, in vLLM's own keys; N = 0 says not to draft at that load, no rule
at all not to draft in that class. One method a class, because an engine loads one drafter and the load changes while it
runs. N is a ceiling: the guard, and the budget below it, may draft less. Not here: where policies come from
(bench/policy.py), and what is taken where there is none (auto.py).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from outrider.config import SpeculativeConfig, cache_folder
from outrider.drafting import registry
from outrider.errors import ConfigError, LoadError, OutriderError
from outrider.models.arch import read_json

FORMAT = 1
_SCHEDULE = "num_speculative_tokens_per_batch_size"
_LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")  # where vLLM is given one of them, the other is the same
_TRIPLE = re.compile(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules by class of requests; a rule is None where plain decoding is best.

    target: its name, for people; fingerprint: which weights these are; conditions: under which it was measured, for
    people. Raises ConfigError naming the class for a rule that cannot be followed.
    """

    target: str
    fingerprint: str
    default: SpeculativeConfig | None
    classes: Mapping[str, SpeculativeConfig | None] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = {"default": self.default} | {f"classes.{name}": rule for name, rule in self.classes.items()}
        for place, rule in rules.items():
            if rule is not None:
                _at(place, _check_rule, rule)

    def rule(self, workload: str = "") -> SpeculativeConfig | None:
        """The drafting settings for a class of requests: its own, else the default."""
        return self.classes.get(workload, self.default)

    def num_tokens_for(self, num_requests: int, workload: str = "") -> int:
        """N for a class while that many requests run; 0 is plain decoding."""
        rule = self.rule(workload)
        return 0 if rule is None else rule.num_tokens_for(num_requests)

    def as_speculative_config(self, workload: str = "") -> dict[str, Any] | None:
        """A class's rule as vLLM's JSON, N by load as `num_speculative_tokens_per_batch_size`; None for no drafts."""
        rule = self.rule(workload)
        return None if rule is None else {key: value for key, value in _stated(rule).items() if key != "guard"}

    def as_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads again."""
        return {
            "format": FORMAT,
            "target": {"name": self.target, "fingerprint": self.fingerprint},
            "conditions": dict(self.conditions),
            "default": None if self.default is None else _stated(self.default),
            "classes": {name: None if rule is None else _stated(rule) for name, rule in self.classes.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Policy:
        """The same policy again. Raises ConfigError naming the place of what is wrong."""
        _check_keys("it", values, ("format", "target", "conditions", "default", "classes"))
        if values.get("format") != FORMAT:
            raise ConfigError(f"format is {values.get('format')!r}, expected {FORMAT}", param="policy")
        if "default" not in values:
            raise ConfigError("default is missing: a rule for all other requests, or null", param="policy")
        target = _mapping("target", values.get("target"))
        _check_keys("target", target, ("name", "fingerprint"))
        rules = _mapping("classes", values.get("classes", {}))
        return cls(
            target=_text("target.name", target.get("name")),
            fingerprint=_text("target.fingerprint", target.get("fingerprint")),
            default=_rule("default", values["default"]),
            classes={_text("a class of classes", name): _rule(f"classes.{name}", rule) for name, rule in rules.items()},
            conditions=_mapping("conditions", values.get("conditions", {})),
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.new")
        text = _TRIPLE.sub(r"[\1, \2, \3]", json.dumps(self.as_json(), indent=1))
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)

    def check_target(self, fingerprint: str, source: Path) -> None:
        """Raise ConfigError where this is another target's policy; `source` is its file."""
        if self.fingerprint != fingerprint:
            raise ConfigError(
                f"{source} is a policy for {self.target} (fingerprint {self.fingerprint[:12]}), this target's is "
                f"{fingerprint[:12]}: make one with `outrider tune`",
                param="policy",
            )


def read_policy(path: Path) -> Policy:
    """The policy in a file. Raises LoadError where there is no JSON object, ConfigError naming what is wrong in it."""
    if not path.is_file():
        raise LoadError(f"{path}: there is no such file, expected a policy as `outrider tune` writes it")
    return _at(str(path), Policy.from_json, read_json(path))


def kept_path(fingerprint: str) -> Path:
    """Where `outrider tune` keeps the policy of the target with that fingerprint, for method "auto"."""
    return cache_folder() / "policies" / f"{fingerprint}.json"


def _check_rule(rule: SpeculativeConfig) -> None:
    registry.check(rule)
    if not rule.is_complete:
        raise ConfigError("method or num_speculative_tokens is missing, a rule says both", param="policy")
    before = 0
    for first, last, num_tokens in rule.num_speculative_tokens_per_batch_size:
        if first != before + 1:
            raise ConfigError(f"{_SCHEDULE} has a gap between {before} and {first} requests", param="policy")
        if num_tokens > rule.num_speculative_tokens:
            raise ConfigError(
                f"{_SCHEDULE} has N {num_tokens}, above num_speculative_tokens {rule.num_speculative_tokens}",
                param="policy",
            )
        before = last


def _rule(place: str, value: object) -> SpeculativeConfig | None:
    return None if value is None else _at(place, SpeculativeConfig.parse, _mapping(place, value))


def _stated(rule: SpeculativeConfig) -> dict[str, Any]:
    """A rule's settings that are not the defaults."""
    stated = rule.stated()
    if stated.keys() & set(_LOOKUPS):
        stated |= {name: getattr(rule, name) for name in _LOOKUPS}
    plain: dict[str, Any] = json.loads(json.dumps(stated))
    return plain


def _at(place: str, do: Callable[[Any], Value], value: object) -> Value:
    """`do(value)`, with the place before whatever it complains of."""
    try:
        return do(value)
    except OutriderError as error:
        raise ConfigError(f"{place}: {error}", param="policy") from error


def _check_keys(place: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"expected {', '.join(known)}"
            raise ConfigError(f"{place} has an unknown key {key!r}; {hint}", param="policy")


def _mapping(place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} is {value!r}, expected an object", param="policy")
    return value


def _text(place: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place} is {value!r}, expected a text", param="policy")
    return value
