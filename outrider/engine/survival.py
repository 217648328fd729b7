"""How likely drafts are to be accepted: learned as the engine runs, from what drafters say and what was verified.

A draft is accepted, given those before it, with probability sigmoid(w x + b + c_i + u). x is the log-odds of what the
drafter said of it: its confidence head's probability, else that of its likeliest token, else nothing (x = 0, and
acceptance so far is all there is). w, b and c_i (one a draft position) are learned for each class of requests, u for
each request. Products along a chain are survivals. A draft after a rejected one was not tested and teaches nothing.

Learning takes one Newton step for each round's verdicts, over a curvature that forgets. What is asked for is hopeful:
one standard error of b above the estimate, so that what little was seen of is tried before it is given up.
Sources: vLLM 0.32 `acceptance_estimator.py` (the model and its start); the step is the extended Kalman filter's.
Legend: R requests that drafted, N draft positions, S slots.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from outrider.types import Proposal

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_CLASSES = 32
_LEAST_PROBABILITY = 1e-3
_START_OF_TOP_PROBS, _START_OF_HEADS = (0.5, -0.2), (1.0, 0.0)
_START_ODDS = 1.0  # of a draft that nobody has seen the like of: the drafter gives it 73%
_PRIOR_SLOPE, _PRIOR_LEVEL, _PRIOR_PLACE, _PRIOR_REQUEST = 8.0, 2.0, 6.0, 5.0
_MEMORY, _REQUEST_MEMORY = 600.0, 40.0  # verdicts after which old ones count a third
_ODDS_STEP = 0.1


class Survival:
    """The estimates for S slots and proposals of at most N drafts. `num_rounds` [classes]: rounds learned from."""

    def __init__(self, num_slots: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.class_of: Ints = np.zeros(num_slots, dtype=np.int64)
        self._names: dict[str, int] = {"": 0}
        self._level = np.zeros(num_slots)
        self._level_weight = np.zeros(num_slots)
        self._odds = np.full((num_slots, num_tokens), _START_ODDS)
        self._class_odds = np.full((_MOST_CLASSES, num_tokens), _START_ODDS)
        self._has_head = False
        self._start(_START_OF_TOP_PROBS)

    def _start(self, start: tuple[float, float]) -> None:
        size = self.num_tokens + 2
        self.num_rounds: Ints = np.zeros(_MOST_CLASSES, dtype=np.int64)
        self._weights = np.zeros((_MOST_CLASSES, size))
        self._weights[:, :2] = start
        self._curvature = np.zeros((_MOST_CLASSES, size, size))
        self._prior = np.diag([_PRIOR_SLOPE, _PRIOR_LEVEL, *[_PRIOR_PLACE] * self.num_tokens])
        self._hope = np.full(_MOST_CLASSES, _PRIOR_LEVEL**-0.5)

    def begin(self, slot: int, workload: str) -> None:
        """A request of this class starts in a slot; beyond so many classes, all further ones count as the unnamed."""
        if workload not in self._names and len(self._names) < _MOST_CLASSES:
            self._names[workload] = len(self._names)
        index = self._names.get(workload, 0)
        self.class_of[slot] = index
        self._level[slot] = self._level_weight[slot] = 0.0
        self._odds[slot] = self._class_odds[index]

    def odds(self, proposal: Proposal) -> Floats:
        """What the drafter says of its drafts, as log-odds [R, N]; 0 where it says nothing or there is no draft."""
        said = proposal.confidence if proposal.confidence is not None else proposal.top_probs
        if proposal.confidence is not None and not self._has_head:
            self._has_head = True
            self._start(_START_OF_HEADS)
        found = np.zeros((len(proposal.tokens), self.num_tokens))
        if said is not None:
            lengths = np.fromiter(map(len, said), dtype=np.int64, count=len(said))
            found[np.arange(self.num_tokens) < lengths[:, None]] = log_odds(np.array(list(chain.from_iterable(said))))
        return found

    def forecast(self, slots: Ints) -> Floats:
        """Survivals [R, N] of drafts that are not made yet, going by what the drafter said of these requests lately."""
        return _survivals(self._confidence(slots, self._odds[slots]))

    def next_confidence(self, slots: Ints, place: int) -> Floats:
        """How likely draft `place` is accepted, given those before it, [R], before it is made."""
        return self.confidence_at(slots, place, self._odds[slots, place])

    def confidence_at(self, slots: Ints, place: int, odds: Floats) -> Floats:
        """The same of drafts [R] at one place that the drafter gives these log-odds."""
        classes = self.class_of[slots]
        weights, level = self._weights[classes], self._level[slots] + self._hope[classes]
        return _sigmoid(weights[:, 0] * odds + weights[:, 1] + weights[:, 2 + place] + level)

    def survivals(self, slots: Ints, odds: Floats, lengths: Ints) -> Floats:
        """Survivals [R, N] of drafts that are made; 0 beyond a chain's length."""
        made = np.arange(self.num_tokens) < lengths[:, None]
        return _survivals(self._confidence(slots, odds)) * made

    def learn(self, slots: Ints, odds: Floats, drafted: Ints, verified: Ints, accepted: Ints) -> None:
        """Take the verdicts of a round: how many drafts of each request were made, verified and accepted, [R]."""
        places = np.arange(self.num_tokens)
        tested = places < np.minimum(verified, accepted + 1)[:, None]
        expected = self._confidence(slots, odds, hopeful=False)
        errors = tested * ((places < accepted[:, None]) - expected)
        curvature = tested * expected * (1 - expected)
        self._learn_requests(slots, errors.sum(axis=1), curvature.sum(axis=1), tested.sum(axis=1))
        rows, at = np.nonzero(tested)
        classes, seen = self.class_of[slots], np.zeros((len(rows), self.num_tokens + 2))
        seen[:, 0], seen[:, 1], seen[np.arange(len(rows)), 2 + at] = odds[rows, at], 1.0, 1.0
        for index in set(classes.tolist()):
            mine = classes[rows] == index
            self.num_rounds[index] += np.count_nonzero(at[mine] == 0)
            self._learn_class(index, seen[mine], errors[rows, at][mine], curvature[rows, at][mine])
        self._remember(slots, odds, drafted)

    def rest(self, slots: Ints) -> None:
        """These requests went without drafts: what is known of each of them fades, and slowly that of their classes."""
        self._level[slots] *= 0.98
        self._level_weight[slots] *= 0.98
        for index in set(self.class_of[slots].tolist()):
            self._curvature[index] *= 1 - 1 / _MEMORY
            self._hope[index] = (self._curvature[index, 1, 1] + _PRIOR_LEVEL) ** -0.5

    def _confidence(self, slots: Ints, odds: Floats, *, hopeful: bool = True) -> Floats:
        """Of each draft given those before it, [R, N]."""
        classes = self.class_of[slots]
        weights = self._weights[classes]
        level = weights[:, 1] + self._level[slots] + hopeful * self._hope[classes]
        return _sigmoid(weights[:, :1] * odds + level[:, None] + weights[:, 2:])

    def _learn_requests(self, slots: Ints, errors: Floats, curvature: Floats, counts: Ints) -> None:
        kept = self._level_weight[slots] * np.exp(-counts / _REQUEST_MEMORY) + curvature
        self._level_weight[slots] = kept
        self._level[slots] += errors / (kept + _PRIOR_REQUEST)

    def _learn_class(self, index: int, seen: Floats, errors: Floats, curvature: Floats) -> None:
        """From tested drafts: what each row of `seen` has of x, b and the c_i, [tested, N + 2]."""
        kept = self._curvature[index]
        kept *= np.exp(-len(seen) / _MEMORY)
        kept += (seen.T * curvature) @ seen
        self._weights[index] += np.linalg.solve(kept + self._prior, seen.T @ errors)
        self._weights[index, 0] = max(0.0, self._weights[index, 0])
        self._hope[index] = (kept[1, 1] + _PRIOR_LEVEL) ** -0.5

    def _remember(self, slots: Ints, odds: Floats, drafted: Ints) -> None:
        """Move what the drafter tends to say of these requests and their classes; places not drafted stay."""
        made = np.arange(self.num_tokens) < drafted[:, None]
        self._odds[slots] += _ODDS_STEP * made * (odds - self._odds[slots])
        classes = self.class_of[slots]
        for index in set(classes.tolist()):
            mine, said = made[classes == index], odds[classes == index]
            counts = mine.sum(axis=0)
            means = (said * mine).sum(axis=0) / np.maximum(counts, 1)
            self._class_odds[index] += _ODDS_STEP * (counts > 0) * (means - self._class_odds[index])


def log_odds(probabilities: Floats) -> Floats:
    """Log-odds, bounded."""
    within = np.clip(probabilities, _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
    odds: Floats = np.log(within / (1 - within))
    return odds


def _survivals(confidence: Floats) -> Floats:
    found: Floats = np.cumprod(confidence, axis=1).astype(np.float64)
    return found


def _sigmoid(values: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-values))
    return found
