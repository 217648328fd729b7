"""What a sweep is to measure: drafting choices crossed with settings, and the order in which that is done.

A setting is what a server meets (workload, load, temperature, length of context); a choice is what may be chosen in it
(a method and its N, or plain decoding). A block is one group of prompts in one setting, answered under every choice
right after each other, plain decoding among them: choices are compared within blocks. Settings that cannot be measured
are refused here. Not here: running anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from outrider.bench.run import in_groups
from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.errors import ConfigError
from outrider.types import SamplingParams


@dataclass(frozen=True, order=True)
class Setting:
    """Under which conditions prompts are answered. `context_len` 0 leaves the prompts as they are."""

    workload: str
    concurrency: int
    temperature: float
    context_len: int


@dataclass(frozen=True, order=True)
class Choice:
    """A method, by its name in the sweep, and its N."""

    method: str
    num_speculative_tokens: int


_PLAIN_NAME = "plain"
PLAIN = Choice(_PLAIN_NAME, 0)


@dataclass(frozen=True)
class Block:
    """One group of a setting's prompts, once."""

    setting: Setting
    repeat: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Everything that decides what a sweep measures; a results file belongs to one of these.

    methods: drafting settings by name. lengths: the N to measure, by the same names. stop_below: a choice whose
    speedup is surely below this in some setting is not measured there any further; 0 measures everything.
    Raises ConfigError naming the setting.
    """

    methods: Mapping[str, Mapping[str, Any]]
    lengths: Mapping[str, Sequence[int]]
    workloads: Sequence[str]
    concurrency: Sequence[int]
    temperatures: Sequence[float]
    context_lens: Sequence[int]
    num_prompts: int
    max_tokens: int
    repeats: int
    seed: int
    stop_below: float

    def __post_init__(self) -> None:
        for name in ("methods", "workloads", "concurrency", "temperatures", "context_lens"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: a sweep needs at least one", param=name)
        for name in ("num_prompts", "max_tokens", "repeats"):
            _check_least(name, getattr(self, name), 1)
        for name, least in (("concurrency", 1), ("context_lens", 0)):
            for value in getattr(self, name):
                _check_least(name, value, least)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        if not 0 <= self.stop_below <= 1:
            raise ConfigError(f"stop_below is {self.stop_below}, expected from 0 to 1", param="stop_below")
        for choice in self.choices:
            self.config(choice)

    @property
    def settings(self) -> list[Setting]:
        """Every combination."""
        return [
            Setting(*parts) for parts in product(self.workloads, self.concurrency, self.temperatures, self.context_lens)
        ]

    @property
    def choices(self) -> list[Choice]:
        """Every method at every N of it; plain decoding is not among them."""
        return [Choice(method, length) for method in self.methods for length in self.lengths[method]]

    def config(self, choice: Choice) -> SpeculativeConfig:
        """A choice's drafting settings. Raises ConfigError."""
        name, length = choice.method, choice.num_speculative_tokens
        _check_least("num_speculative_tokens", length, 1)
        config = SpeculativeConfig.parse({**self.methods[name], "num_speculative_tokens": length})
        registry.check(config)
        return config

    def groups(self, setting: Setting) -> list[range]:
        """A setting's prompts in groups that are answered together."""
        return in_groups(self.num_prompts, setting.concurrency)

    def blocks(self) -> Iterator[Block]:
        """Every block: all of them once before any of them twice, and in an order that the seed decides."""
        for repeat in range(self.repeats):
            once = [
                Block(setting, repeat, group) for setting in self.settings for group in range(len(self.groups(setting)))
            ]
            random.Random(f"{self.seed} {repeat}").shuffle(once)
            yield from once

    def order(self, block: Block) -> list[Choice]:
        """Plain decoding and every choice, in this block's own order."""
        choices = [PLAIN, *self.choices]
        random.Random(f"{self.seed} {block}").shuffle(choices)
        return choices

    def as_json(self) -> dict[str, Any]:
        """Plain data, as a results file states it."""
        return asdict(self)


def name_methods(configs: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """`methods` and `lengths` of a Grid for some drafting settings; those that say their N have that one only.

    A method that is there once is called by its name, else with the settings in which its copies differ.
    Raises ConfigError for settings that are given twice or name no method.
    """
    methods: dict[str, dict[str, Any]] = {}
    own_lengths: dict[str, list[int]] = {}
    for given in configs:
        settings = {key.replace("-", "_"): value for key, value in given.items()}
        stated = settings.pop("num_speculative_tokens", None)
        if stated is not None:
            _check_least("num_speculative_tokens", stated, 1)
        name = _name(settings, configs)
        if name == _PLAIN_NAME or (name in methods and stated is None):
            raise ConfigError(f"methods has {name} twice, or it is always measured", param="methods")
        methods[name] = settings
        own_lengths[name] = [*own_lengths.get(name, []), stated] if stated is not None else list(lengths)
    return {"methods": methods, "lengths": {name: sorted(set(values)) for name, values in own_lengths.items()}}


def _name(settings: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> str:
    """The method, and what tells its copies apart; a drafter without a method is called by its folder."""
    method = str(settings.get("method") or settings.get("model") or "")
    if not method:
        raise ConfigError("methods has settings with neither method nor model", param="methods")
    others = [other for other in configs if other.get("method") == settings.get("method")]
    differing = sorted(
        key
        for key in set().union(*others) - {"method", "num_speculative_tokens"}
        if len({repr(other.get(key)) for other in others}) > 1
    )
    return " ".join([method, *(f"{key}={settings[key]}" for key in differing if key in settings)])


def _check_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} has {value!r}, expected whole numbers of at least {least}", param=name)
