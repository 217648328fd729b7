"""What a step costs on this machine: seconds of drafting by requests and proposal length, of verifying by rows.

Two tables, measured when the engine starts (calibration.py) or read from the cache folder, and moved by every real step
since: the places that it lies between a lot, the others a little, for a machine that gets slower or texts that get
longer. The first real steps count most, because what was measured may have been measured at a busy moment. Verifying is
everything but drafting: the target's forward, draws, bookkeeping. Between places of the table costs are straight lines;
as rows grow they never fall (isotonic regression, so one odd measurement does not hide those after it), and steps of
the curve stay where they were measured. Decides nothing.
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

_LEAST_S, _FAR = 1e-7, 1e7
_LARGEST_SURPRISE = math.log(1.5)  # a step that was interrupted says little about the next one
_LARGEST_FIRST_SURPRISE = math.log(8)
_EVERYWHERE, _NEARBY = 0.02, 0.1  # of a surprise, once many were seen
_SETTLED = 2  # real steps at a place, from which its cost is believed


class _Places:
    """Where a table was measured, ascending, and how many real steps came near each of these places since."""

    def __init__(self, places: Sequence[int]) -> None:
        self.at: Floats = np.array(places, dtype=np.float64)
        self.at_and_far = np.append(self.at, _FAR)
        self.seen = np.zeros(len(self.at))

    def near(self, value: float) -> Floats:
        """1 at a measured place, and shared by the two that a value lies between."""
        near = np.zeros(len(self.at))
        index = min(int(np.searchsorted(self.at, value)), len(near) - 1)
        near[index] = 1.0
        if index and self.at[index - 1] < value < self.at[index]:
            near[index] = (value - self.at[index - 1]) / (self.at[index] - self.at[index - 1])
            near[index - 1] = 1 - near[index]
        return near

    def moves(self, value: float, seconds: float, expected: float) -> Floats:
        """The factor for each place's cost after a step at `value` took `seconds` where the table had `expected`."""
        near = self.near(value)
        seen, total = float(near @ self.seen), float(self.seen.sum())
        largest = _LARGEST_SURPRISE if seen >= _SETTLED else _LARGEST_FIRST_SURPRISE
        surprise = math.log(max(seconds, _LEAST_S) / max(expected, _LEAST_S))
        everywhere, nearby = max(_EVERYWHERE, 1 / (1 + total)), max(_NEARBY, 1 / (1 + seen))
        self.seen += near
        bounded = min(max(surprise, -largest), largest)
        factors: Floats = np.exp(bounded * (everywhere + (1 - everywhere) * nearby * near))
        return factors


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
        self._rows, self._requests = _Places(verify_rows), _Places(draft_requests)
        self._verify = np.maximum(np.array(verify_s, dtype=np.float64), _LEAST_S)
        self._draft = np.maximum(np.array([rising(row) for row in draft_s]), _LEAST_S)
        self.fill_s = fill_s
        for places, table in ((self._rows, self._verify), (self._requests, self._draft)):
            if not (len(places.at) == len(table) and table.size and (np.diff(places.at, prepend=0) > 0).all()):
                raise ValueError("a table of costs has places that do not ascend, or not one for each row")
        if not math.isfinite(self._verify.sum() + self._draft.sum() + fill_s):
            raise ValueError("a table of costs has numbers that are not finite")
        self._by_requests: dict[int, Floats] = {}
        self._curve = self._on_to_far(rising(self._verify))

    @property
    def num_tokens(self) -> int:
        """The longest proposal that the tables know."""
        return int(self._draft.shape[1])

    def verify(self, rows: npt.ArrayLike) -> Floats:
        """Seconds of a step of so many rows, but for drafting; beyond the largest measured, the last slope goes on."""
        found: Floats = np.interp(np.asarray(rows, dtype=np.float64), self._rows.at_and_far, self._curve)
        return found

    def draft(self, num_requests: int) -> Floats:
        """Seconds to draft 0, 1, … N tokens for so many requests, [N + 1]; not to be written."""
        found = self._by_requests.get(num_requests)
        if found is None:
            index, share = self._place(num_requests)
            costs = self._draft[index]
            if len(self._draft) > 1:
                costs = costs + share * (self._draft[index + 1] - costs)
            found = self._by_requests[num_requests] = np.concatenate([[0.0], np.maximum(costs, _LEAST_S)])
        return found

    def knows_plain(self, num_requests: int) -> bool:
        """Whether real steps of about so many rows were seen, so that what plain decoding takes is no guess."""
        return float(self._rows.near(num_requests) @ self._rows.seen) >= _SETTLED

    def observe_verify(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows, all of decoding requests, took that long but for drafting."""
        expected = float(np.interp(num_rows, self._rows.at_and_far, self._on_to_far(self._verify)))
        self._verify *= self._rows.moves(num_rows, seconds, expected)
        self._curve = self._on_to_far(rising(self._verify, 1 + np.minimum(self._rows.seen, 1 / _NEARBY)))

    def observe_draft(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Drafting chains of at most `num_tokens` for so many requests, none of them far behind, took that long."""
        expected = float(self.draft(num_requests)[num_tokens])
        self._draft *= self._requests.moves(num_requests, seconds, expected)[:, None]
        self._by_requests.clear()

    def observe_fill(self, num_rows: int, seconds: float) -> None:
        """Catching up on so many rows took that long beside drafting."""
        self.fill_s += 0.2 * (max(0.0, seconds) / num_rows - self.fill_s)

    def save(self, path: Path) -> None:
        """Write the tables; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = {
            "verify_rows": self._rows.at.astype(int).tolist(),
            "verify_s": self._verify.tolist(),
            "draft_requests": self._requests.at.astype(int).tolist(),
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

    def _on_to_far(self, values: Floats) -> Floats:
        """A table by rows, `values` [P], and the value at a place far away, to which the last line goes on, [P + 1]."""
        places = self._rows.at
        run, rise = (places[-1], values[-1]) if len(places) < 2 else (places[-1] - places[-2], values[-1] - values[-2])
        return np.concatenate((values, [values[-1] + (_FAR - places[-1]) * max(0.0, rise) / run]))

    def _place(self, num_requests: int) -> tuple[int, float]:
        """The measured place before a number, and how far it is on the way to the next; above 1 beyond the last."""
        places = self._requests.at
        if len(places) == 1:
            return 0, 0.0
        index = min(max(int(np.searchsorted(places, num_requests, side="right")) - 1, 0), len(places) - 2)
        return index, max(0.0, float((num_requests - places[index]) / (places[index + 1] - places[index])))


def rising(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> Floats:
    """The nearest sequence that never falls: what falls is pooled with what it follows, and takes the weighted mean."""
    found = np.asarray(values, dtype=np.float64)
    weighs = np.ones(len(found)) if weights is None else np.asarray(weights, dtype=np.float64)
    blocks: list[tuple[float, float, int]] = []
    for mean, weight in zip(found.tolist(), weighs.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] > mean:
            other, more, places = blocks.pop()
            mean, weight, count = (mean * weight + other * more) / (weight + more), weight + more, count + places
        blocks.append((mean, weight, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])
