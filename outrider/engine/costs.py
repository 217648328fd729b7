"""What a step costs on this machine: seconds of drafting by requests and proposal length, of verifying by rows.

Two tables, measured when the engine starts (calibration.py) or read from the cache folder, and moved by every real step
since: a machine that gets slower, or texts that get longer, move all of it a little, and the places that were seen a
lot. Verifying is everything but drafting: the target's forward, draws, bookkeeping. Between places of the table costs
are straight lines; as rows grow they never fall (isotonic regression, so one odd measurement does not hide those after
it), and steps of the curve stay where they were measured. Decides nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_LEAST_S = 1e-7
_LARGEST_SURPRISE = math.log(1.5)  # a step that was interrupted says little about the next one
_EVERYWHERE, _NEARBY = 0.02, 0.1


class StepCosts:
    """Running estimates. `verify_rows` [P] and `draft_requests` [Q] ascend; `verify_s` [P]; `draft_s` [Q, N]: of one
    draft, two, and so on for each request; `fill_s`: of one row that a drafter has to catch up on.
    """

    def __init__(
        self,
        verify_rows: Sequence[int],
        verify_s: Sequence[float],
        draft_requests: Sequence[int],
        draft_s: Sequence[Sequence[float]],
        fill_s: float = 0.0,
    ) -> None:
        self._rows = np.array(verify_rows, dtype=np.float64)
        self._requests = np.array(draft_requests, dtype=np.float64)
        self._verify = np.maximum(np.array(verify_s, dtype=np.float64), _LEAST_S)
        self._draft = np.maximum(np.array([rising(row) for row in draft_s]), _LEAST_S)
        self.fill_s = fill_s
        self._monotone = rising(self._verify)

    @property
    def num_tokens(self) -> int:
        """The longest proposal that the tables know."""
        return int(self._draft.shape[1])

    def verify(self, rows: npt.ArrayLike) -> Floats:
        """Seconds of a step of so many rows, but for drafting; beyond the largest measured, the last slope goes on."""
        wanted = np.asarray(rows, dtype=np.float64)
        found = np.interp(wanted, self._rows, self._monotone)
        beyond = wanted - self._rows[-1]
        if np.any(beyond > 0):
            found = found + np.maximum(beyond, 0) * self._last_slope(self._rows, self._monotone)
        return found

    def draft(self, num_requests: int) -> Floats:
        """Seconds to draft 0, 1, … N tokens for so many requests, [N + 1]."""
        index, share = self._place(self._requests, num_requests)
        costs = self._draft[index]
        if len(self._requests) > 1:
            costs = costs + share * (self._draft[index + 1] - costs)
        return np.concatenate([[0.0], np.maximum(costs, _LEAST_S)])

    def observe_verify(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, all of decoding requests, took that long but for drafting."""
        surprise = _surprise(seconds, float(self.verify(num_rows)))
        self._verify *= np.exp(surprise * (_EVERYWHERE + _NEARBY * _nearness(self._rows, num_rows)))
        self._monotone = rising(self._verify)

    def observe_draft(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Drafting chains of at most `num_tokens` for so many requests, none of them far behind, took that long."""
        surprise = _surprise(seconds, self.draft(num_requests)[num_tokens])
        self._draft *= np.exp(surprise * (_EVERYWHERE + _NEARBY * _nearness(self._requests, num_requests)))[:, None]

    def observe_fill(self, num_rows: int, seconds: float) -> None:
        """Catching up on so many rows took that long beside drafting."""
        self.fill_s += 0.2 * (max(0.0, seconds) / num_rows - self.fill_s)

    def save(self, path: Path) -> None:
        """Write the tables; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = {
            "verify_rows": self._rows.astype(int).tolist(),
            "verify_s": self._verify.tolist(),
            "draft_requests": self._requests.astype(int).tolist(),
            "draft_s": self._draft.tolist(),
            "fill_s": self.fill_s,
        }
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(tables, file)
        Path(file.name).replace(path)

    @classmethod
    def load(cls, path: Path) -> StepCosts | None:
        """The tables of a file that `save` wrote; None where there is none, or it is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def _last_slope(places: Floats, values: Floats) -> float:
        if len(places) < 2:
            return float(values[-1] / places[-1])
        return float((values[-1] - values[-2]) / (places[-1] - places[-2]))

    @staticmethod
    def _place(places: Floats, value: float) -> tuple[int, float]:
        """The measured place before a value, and how far it is on the way to the next; above 1 beyond the last."""
        if len(places) == 1:
            return 0, 0.0
        index = int(np.clip(np.searchsorted(places, value, side="right") - 1, 0, len(places) - 2))
        return index, max(0.0, float((value - places[index]) / (places[index + 1] - places[index])))


def rising(values: npt.ArrayLike) -> Floats:
    """The nearest sequence that never falls: what falls is pooled with what it follows, and takes the mean."""
    blocks: list[tuple[float, int]] = []
    for value in np.asarray(values, dtype=np.float64).tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def _surprise(seconds: float, expected: float) -> float:
    """How much longer it took than expected, as a bounded logarithm."""
    error = math.log(max(seconds, _LEAST_S) / max(expected, _LEAST_S))
    return min(max(error, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)


def _nearness(places: Floats, value: float) -> Floats:
    """1 at a measured place, and shared by the two that a value lies between."""
    near = np.zeros(len(places))
    index = int(np.searchsorted(places, value))
    if index == len(places):
        near[-1] = 1.0
    elif index == 0 or places[index] == value:
        near[index] = 1.0
    else:
        share = (value - places[index - 1]) / (places[index] - places[index - 1])
        near[index - 1], near[index] = 1 - share, share
    return near
