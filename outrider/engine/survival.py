"""How likely drafts are to be accepted: learned as the engine runs, from what drafters say and what was verified.

A draft is accepted, given those before it, with probability sigmoid(w x + b + c_i + u). x is the log-odds of what the
drafter said of it: its confidence head's probability, else that of its likeliest token, else nothing (x = 0, and
acceptance so far is all there is). w, b and c_i (one a draft position) are learned for each class of requests, u for
each request. Products along a chain are survivals. A draft after a rejected one was not tested and teaches nothing.

Each verdict moves the four by an extended Kalman filter whose variances forget, and which keeps no covariances. What is
asked for is hopeful: one standard deviation of b + c_i above its mean, so that what little was seen of, a class or the
later places of its chains, is tried before it is given up. Numbers are few and asked for between forwards that empty
the processor's caches, where NumPy took several times as long as Python's own arithmetic (docs/benchmarks.md).
Source of the model and its start: vLLM 0.32, `acceptance_estimator.py`. Legend: N draft positions, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.types import Proposal

_MOST_CLASSES = 32
_LEAST_PROBABILITY = 1e-3
_START_OF_TOP_PROBS, _START_OF_HEADS = (0.5, -0.2), (1.0, 0.0)
_START_ODDS = 1.0  # of a draft that nobody has seen the like of: the drafter gives it 73%
_SLOPE_VARIANCE, _LEVEL_VARIANCE, _PLACE_VARIANCE, _REQUEST_VARIANCE = 0.125, 0.5, 0.17, 0.2  # before any verdict
_MEMORY, _REQUEST_MEMORY = 1 + 1 / 600, 1 + 1 / 40  # growth of variances at a verdict: old ones count a third after it
_FADING = 0.98  # of what is known of a request, at a step without drafts
_ODDS_STEP, _CLASS_ODDS_STEP = 0.1, 0.02


@dataclass(slots=True)
class _Class:
    """What is known of a class: means and variances of w, b and c_i. [N] each: `places`; `odds`, the log-odds that the
    drafter tends to give its drafts; `hopes`, the standard deviations of b + c_i.
    """

    slope: float
    level: float
    places: list[float]
    place_variances: list[float]
    odds: list[float]
    slope_variance: float = _SLOPE_VARIANCE
    level_variance: float = _LEVEL_VARIANCE
    num_rounds: int = 0
    hopes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hope()

    def hope(self) -> None:
        """After variances changed."""
        self.hopes = [math.sqrt(self.level_variance + variance) for variance in self.place_variances]


@dataclass(slots=True)
class _Request:
    """What is known of the request in a slot: mean and variance of u; `odds` [N] as its class has them."""

    level: float = 0.0
    variance: float = _REQUEST_VARIANCE
    odds: list[float] = field(default_factory=list)


class Survival:
    """The estimates for S slots and proposals of at most N drafts."""

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.class_of = [0] * num_slots
        self._names = {"": 0}
        self._has_head = False
        self._classes = [self._new_class()]
        self._requests = [_Request(odds=[_START_ODDS] * num_tokens) for _ in range(num_slots)]

    def _new_class(self) -> _Class:
        slope, level = _START_OF_HEADS if self._has_head else _START_OF_TOP_PROBS
        size = self.num_tokens
        return _Class(slope, level, [0.0] * size, [_PLACE_VARIANCE] * size, [_START_ODDS] * size)

    def begin(self, slot: int, workload: str) -> None:
        """A request of this class starts in a slot; beyond so many classes, all further ones count as the unnamed."""
        if workload not in self._names and len(self._names) < _MOST_CLASSES:
            self._names[workload] = len(self._names)
            self._classes.append(self._new_class())
        index = self._names.get(workload, 0)
        self.class_of[slot] = index
        self._requests[slot] = _Request(odds=list(self._classes[index].odds))

    def num_rounds(self, index: int) -> int:
        """Rounds of a class that were learned from."""
        return self._classes[index].num_rounds

    def odds(self, proposal: Proposal) -> list[list[float]]:
        """What the drafter says of its drafts, as log-odds, chain by chain; 0 where it says nothing."""
        said = proposal.confidence if proposal.confidence is not None else proposal.top_probs
        if proposal.confidence is not None and not self._has_head:
            self._has_head = True
            self._classes = [self._new_class() for _ in self._classes]
        if said is None:
            return [[0.0] * len(tokens) for tokens in proposal.tokens]
        return [[log_odds(value) for value in values] for values in said]

    def forecast(self, slot: int, length: int) -> list[float]:
        """Survivals of drafts 1 to `length` that are not made yet, by what the drafter said of this request lately."""
        return self.survivals(slot, self._requests[slot].odds[:length])

    def next_confidence(self, slot: int, place: int) -> float:
        """How likely draft `place` is accepted, given those before it, before it is made."""
        return self.confidence_at(slot, place, self._requests[slot].odds[place])

    def confidence_at(self, slot: int, place: int, odds: float) -> float:
        """The same of a draft that the drafter gives these log-odds."""
        known = self._classes[self.class_of[slot]]
        level = known.level + self._requests[slot].level + known.places[place] + known.hopes[place]
        return _sigmoid(known.slope * odds + level)

    def survivals(self, slot: int, odds: Sequence[float]) -> list[float]:
        """Survivals of the drafts of a chain that the drafter gives these log-odds."""
        known = self._classes[self.class_of[slot]]
        level, slope = known.level + self._requests[slot].level, known.slope
        survival, found = 1.0, []
        for value, place, hope in zip(odds, known.places, known.hopes, strict=False):
            survival *= _sigmoid(slope * value + level + place + hope)
            found.append(survival)
        return found

    def learn(self, slot: int, odds: Sequence[float], verified: int, accepted: int) -> None:
        """Take a round's verdicts on a request: log-odds of its drafts, how many were verified and accepted."""
        known, own = self._classes[self.class_of[slot]], self._requests[slot]
        tested = min(verified, accepted + 1)
        known.num_rounds += tested > 0
        for place in range(tested):
            _learn(known, own, place, odds[place], float(place < accepted))
        known.hope()
        for place, value in enumerate(odds):
            own.odds[place] += _ODDS_STEP * (value - own.odds[place])
            known.odds[place] += _CLASS_ODDS_STEP * (value - known.odds[place])

    def rest(self, slots: Iterable[int], num_steps: int) -> None:
        """These requests went without drafts for so many steps.

        What is known of each of them fades towards what is known of their classes, and slowly that of those.
        """
        kept, resting = _FADING**num_steps, set()
        for slot in slots:
            own, known = self._requests[slot], self._classes[self.class_of[slot]]
            own.level *= kept
            own.variance = min(_REQUEST_VARIANCE, own.variance / kept)
            own.odds = [usual + kept * (value - usual) for value, usual in zip(own.odds, known.odds, strict=True)]
            resting.add(self.class_of[slot])
        for index in resting:
            known = self._classes[index]
            known.level_variance = min(_LEVEL_VARIANCE, known.level_variance * _MEMORY**num_steps)
            known.hope()


def _learn(known: _Class, own: _Request, place: int, odds: float, verdict: float) -> None:
    """One verdict, 1 or 0, on a draft: each part of the sum moves by its share of the variance."""
    slope_variance = min(_SLOPE_VARIANCE, known.slope_variance * _MEMORY)
    level_variance = min(_LEVEL_VARIANCE, known.level_variance * _MEMORY)
    place_variance = min(_PLACE_VARIANCE, known.place_variances[place] * _MEMORY)
    own_variance = min(_REQUEST_VARIANCE, own.variance * _REQUEST_MEMORY)
    expected = _sigmoid(known.slope * odds + known.level + known.places[place] + own.level)
    curvature, square = expected * (1 - expected), odds * odds
    scale = 1 / (1 + curvature * (slope_variance * square + level_variance + place_variance + own_variance))
    move, shrink = scale * (verdict - expected), scale * curvature
    known.slope = max(0.0, known.slope + move * slope_variance * odds)
    known.level += move * level_variance
    known.places[place] += move * place_variance
    own.level += move * own_variance
    known.slope_variance = slope_variance * (1 - shrink * slope_variance * square)
    known.level_variance = level_variance * (1 - shrink * level_variance)
    known.place_variances[place] = place_variance * (1 - shrink * place_variance)
    own.variance = own_variance * (1 - shrink * own_variance)


def log_odds(probability: float) -> float:
    """Log-odds, bounded."""
    within = min(max(probability, _LEAST_PROBABILITY), 1 - _LEAST_PROBABILITY)
    return math.log(within / (1 - within))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
