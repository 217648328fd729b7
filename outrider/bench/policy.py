"""From a sweep's results to a policy: for each workload, and for all together as the default, a method and N by load.

What is measured of a class at one load is pooled over temperatures and context lengths; an N is taken only if the low
end of its speedup's interval is above 1, else 0. The class's method is the one with the largest product of such
speedups over the loads. A load between two measured ones takes the N of the greater, where drafts pay less as a rule;
one beyond all of them, that of the greatest. Not here: the record and its file (drafting/policy.py), and the proof
that the choice is right (proof.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.grid import Choice, Grid, Setting
from outrider.bench.pairs import Pair, in_pairs, speedup
from outrider.bench.results import Results
from outrider.config import SpeculativeConfig
from outrider.drafting.policy import Policy
from outrider.errors import LoadError

_CONDITIONS = ("date", "outrider", "torch", "cpu", "num_cpus", "device", "kernels", "dtype")
Pairs = Mapping[tuple[Setting, Choice], Sequence[Pair]]


def policy_of(results: Results) -> Policy:
    """The policy that the results suggest. Raises LoadError where they compare nothing yet."""
    header = results.header
    pairs = in_pairs(results.rows)
    if not pairs:
        raise LoadError("no choice was measured beside plain decoding yet, so there is no policy")
    by_class = defaultdict(list)
    for setting in Grid(**header.grid).settings:
        by_class[class_of(setting.workload)].append(setting)
    chooser = _Chooser(results, pairs)
    return Policy(
        target=header.target,
        fingerprint=header.identity,
        default=chooser.rule([setting for own in by_class.values() for setting in own]),
        classes={name: chooser.rule(own) for name, own in by_class.items()},
        conditions={name: header.conditions[name] for name in _CONDITIONS if name in header.conditions},
    )


def class_of(workload: str) -> str:
    """The class that a workload stands for: a set's name, or a file's without folder and ending."""
    return Path(workload).stem if workload.endswith(".jsonl") else workload


def lines(policy: Policy) -> list[str]:
    """The rules, a line each; what N is at is the number of running requests."""
    rules = {**policy.classes, "all others": policy.default}
    return [f"{name}: {_said(rule)}" for name, rule in rules.items()]


def pooled(pairs: Pairs, settings: Collection[Setting], choice: Choice) -> list[Pair]:
    """A choice's pairs of all these settings; groups of other workloads or loads are other groups."""
    groups: dict[tuple[str, int, int], int] = {}
    return [
        replace(pair, group=groups.setdefault((setting.workload, setting.concurrency, pair.group), len(groups)))
        for setting in settings
        for pair in pairs.get((setting, choice), ())
    ]


@dataclass(frozen=True)
class _Found:
    """The best N of a method at a load, 0 if none is surely faster, and the logarithm of its speedup."""

    num_tokens: int
    gain: float


class _Chooser:
    def __init__(self, results: Results, pairs: Pairs) -> None:
        self._header, self._pairs = results.header, pairs
        self._stopped = {(item.setting, item.choice) for item in results.stopped}
        self._measured = {setting for setting, _ in pairs}

    def rule(self, settings: Sequence[Setting]) -> SpeculativeConfig | None:
        """What to draft in these settings, by their load; None for nothing."""
        loads = sorted({setting.concurrency for setting in settings})
        by_load = [self._best([setting for setting in settings if setting.concurrency == load]) for load in loads]
        methods = sorted({method for best in by_load for method in best})
        gains = {method: sum(best[method].gain for best in by_load if method in best) for method in methods}
        if not any(gains.values()):
            return None
        method = max(methods, key=lambda method: gains[method])
        lengths = [best[method].num_tokens if method in best else 0 for best in by_load]
        return self._config(method, list(zip(loads, lengths, strict=True)))

    def _best(self, settings: Sequence[Setting]) -> dict[str, _Found]:
        """The best N of each method in settings of one load, of those measured in all of them and given up in none."""
        here = [setting for setting in settings if setting in self._measured]
        best: dict[str, _Found] = {}
        for choice in sorted({choice for setting, choice in self._pairs if setting in here}):
            places = {(setting, choice) for setting in here}
            if places & self._stopped or not places <= self._pairs.keys():
                continue
            found, name = speedup(pooled(self._pairs, here, choice)), choice.method
            if found.low is not None and found.low > 1:
                gain = math.log(found.ratio)
                if name not in best or gain > best[name].gain:
                    best[name] = _Found(choice.num_speculative_tokens, gain)
        return best

    def _config(self, name: str, by_load: Sequence[tuple[int, int]]) -> SpeculativeConfig:
        """A method's settings in the sweep with its N by load; a range goes up to its measured load."""
        schedule: list[list[int]] = []
        for load, num_tokens in by_load:
            if schedule and schedule[-1][2] == num_tokens:
                schedule[-1][1] = load
            else:
                schedule.append([schedule[-1][1] + 1 if schedule else 1, load, num_tokens])
        settings = {**self._header.grid["methods"][name]}
        settings.setdefault("method", self._header.methods.get(name, {}).get("method"))
        return SpeculativeConfig.parse(
            {
                **settings,
                "num_speculative_tokens": max(num_tokens for _, num_tokens in by_load),
                "num_speculative_tokens_per_batch_size": schedule,
            }
        )


def _said(rule: SpeculativeConfig | None) -> str:
    if rule is None:
        return "plain decoding"
    ranges = rule.num_speculative_tokens_per_batch_size or ((1, 1, rule.num_speculative_tokens),)
    said = [f"N={length} at {first}" + (f" to {last}" if last > first else "") for first, last, length in ranges[:-1]]
    first, _, length = ranges[-1]
    return f"{rule.method}, " + ", ".join([*said, f"N={length} at {first} and more"])
