"""What a step costs on this machine: seconds of drafting by requests and proposal length, of verifying by rows.

Two tables, measured when the engine starts (calibration.py) or read from the cache folder, and moved by every real step
since. A machine gets slower and faster as a whole, from one second to the next, and texts get longer: most of a
surprise is put down to that and moves everything, a little of it to the places that the step lies between, so that the
differences between places, by which it is decided, stand still while the machine does not. The first real steps count
most, because what was measured may have been measured at a busy moment. Verifying is everything but drafting: the
target's forward, draws, bookkeeping. Between places of the table costs are straight lines; as rows grow they never fall
(isotonic regression, so one odd measurement does not hide those after it), and steps of the curve stay where they were
measured. Decides nothing.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

_LEAST_S = 1e-7
_LARGEST_SURPRISE = math.log(1.4)  # a step that was interrupted says little about the next one
_LARGEST_FIRST_SURPRISE = math.log(8)
_EVERYWHERE, _DRAFTS_EVERYWHERE, _NEARBY = 0.2, 0.02, 0.02  # of a surprise, once many were seen
_SETTLED = 2  # real steps at a place, from which its cost is believed


class _Places:
    """Where a table was measured, ascending, and how many real steps came near each of these places since."""

    def __init__(self, places: Sequence[int]) -> None:
        self.at = [int(place) for place in places]
        self.seen = [0.0] * len(self.at)

    def before(self, value: float) -> int:
        """The last place at or before a value, else the first."""
        return max(0, bisect.bisect_right(self.at, value) - 1)

    def near(self, value: float) -> tuple[int, float]:
        """A place, and how far a value lies from it on the way to the next; 0 before the first and beyond the last."""
        index = self.before(value)
        if index + 1 == len(self.at) or value <= self.at[index]:
            return index, 0.0
        return index, (value - self.at[index]) / (self.at[index + 1] - self.at[index])

    def seen_near(self, value: float) -> float:
        """Real steps near a value."""
        index, share = self.near(value)
        return self.seen[index] + (share * (self.seen[index + 1] - self.seen[index]) if share else 0.0)

    def surprise(self, value: float, seconds: float, expected: float) -> float:
        """Logarithm of what a step took over what was expected; bounded, and tighter where many were seen."""
        largest = _LARGEST_SURPRISE if self.seen_near(value) >= _SETTLED else _LARGEST_FIRST_SURPRISE
        return min(max(math.log(max(seconds, _LEAST_S) / max(expected, _LEAST_S)), -largest), largest)

    def moves(self, value: float, surprise: float) -> list[float]:
        """The factor for each place's cost after such a surprise at `value`, which counts as seen from now on."""
        nearby = max(_NEARBY, 1 / (1 + self.seen_near(value)))
        factors = [1.0] * len(self.at)
        index, share = self.near(value)
        for place, part in ((index, 1 - share), (index + 1, share)):
            if part:
                self.seen[place] += part
                factors[place] = math.exp(surprise * nearby * part)
        return factors


class StepCosts:
    """Running estimates. `verify_rows` [P] and `draft_requests` [Q] ascend; `verify_s` [P]; `draft_s` [Q, N]: of one
    draft, two, and so on for each request; `fill_s`: of one row that a drafter has to catch up on. `_scale`: of all.
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
        self._verify = [max(float(value), _LEAST_S) for value in verify_s]
        self._draft = [[max(value, _LEAST_S) for value in rising(row)] for row in draft_s]
        self.fill_s = float(fill_s)
        for places, table in ((self._rows, self._verify), (self._requests, self._draft)):
            ascends = all(low < high for low, high in zip([0, *places.at], places.at, strict=False))
            if not (ascends and table and len(places.at) == len(table)):
                raise ValueError("a table of costs has places that do not ascend, or not one for each row")
        if len(set(map(len, self._draft))) != 1 or not self._draft[0]:
            raise ValueError("a table of costs has rows of several lengths, or none")
        if not math.isfinite(sum(self._verify) + sum(map(sum, self._draft)) + self.fill_s):
            raise ValueError("a table of costs has numbers that are not finite")
        self._by_requests: dict[int, list[float]] = {}
        self._curve = rising(self._verify)
        self._scale = 1.0

    @property
    def num_tokens(self) -> int:
        """The longest proposal that the tables know."""
        return len(self._draft[0])

    def verify(self, num_rows: int) -> float:
        """Seconds of a step of so many rows, but for drafting; beyond the largest measured, the last slope goes on."""
        return self._scale * self._on_line(self._curve, num_rows)

    def verify_from(self, num_rows: int, most: int) -> list[float]:
        """The same for so many rows, one more, … `most` more."""
        at, curve, index = self._rows.at, self._curve, self._rows.before(num_rows)
        slope, scale, found = self._slope(curve, index), self._scale, []
        for row in range(num_rows, num_rows + most + 1):
            if index + 1 < len(at) and row >= at[index + 1]:
                index += 1
                slope = self._slope(curve, index)
            found.append(scale * (curve[index] + max(0, row - at[index]) * slope))
        return found

    def draft(self, num_requests: int) -> list[float]:
        """Seconds to draft 0, 1, … N tokens for so many requests, [N + 1]; not to be written."""
        found = self._by_requests.get(num_requests)
        if found is None:
            found = [0.0, *(self._scale * seconds for seconds in self._draft_line(num_requests))]
            self._by_requests[num_requests] = found
        return found

    def knows_plain(self, num_requests: int) -> bool:
        """Whether real steps of about so many rows were seen, so that what plain decoding takes is no guess."""
        return self._rows.seen_near(num_requests) >= _SETTLED

    def observe_verify(self, num_rows: int, seconds: float, num_steps: int = 1) -> None:
        """Steps of so many rows, all of decoding requests, took that long each but for drafting."""
        surprise = self._rows.surprise(num_rows, seconds, self._scale * self._on_line(self._verify, num_rows))
        everywhere = max(1 - (1 - _EVERYWHERE) ** num_steps, 1 / (1 + sum(self._rows.seen)))
        self._scale *= math.exp(surprise * everywhere)
        factors = self._rows.moves(num_rows, surprise * (1 - everywhere))
        self._verify = [value * factor for value, factor in zip(self._verify, factors, strict=True)]
        self._curve = rising(self._verify, [1 + min(seen, 1 / _NEARBY) for seen in self._rows.seen])
        self._by_requests.clear()

    def observe_draft(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Drafting chains of at most `num_tokens` for so many requests, none of them far behind, took that long."""
        surprise = self._requests.surprise(num_requests, seconds, self.draft(num_requests)[num_tokens])
        everywhere = max(_DRAFTS_EVERYWHERE, 1 / (1 + sum(self._requests.seen)))
        factors = self._requests.moves(num_requests, surprise * (1 - everywhere))
        common = math.exp(surprise * everywhere)
        self._draft = [
            [value * factor * common for value in row] for row, factor in zip(self._draft, factors, strict=True)
        ]
        self._by_requests.clear()

    def observe_fill(self, num_rows: int, seconds: float) -> None:
        """Catching up on so many rows took that long beside drafting."""
        self.fill_s += 0.2 * (max(0.0, seconds) / num_rows - self.fill_s)

    def save(self, path: Path) -> None:
        """Write the tables; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = {
            "verify_rows": self._rows.at,
            "verify_s": [self._scale * value for value in self._verify],
            "draft_requests": self._requests.at,
            "draft_s": [[self._scale * value for value in row] for row in self._draft],
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

    def _on_line(self, values: Sequence[float], num_rows: int) -> float:
        """A value of a table by rows, on the straight lines between its places."""
        index = self._rows.before(num_rows)
        return values[index] + max(0, num_rows - self._rows.at[index]) * self._slope(values, index)

    def _slope(self, values: Sequence[float], index: int) -> float:
        """Of the line that begins at a place; that of the last goes on, and does not fall."""
        at = self._rows.at
        if len(at) == 1:
            return values[0] / at[0]
        if index + 1 == len(at):
            return max(0.0, values[-1] - values[-2]) / (at[-1] - at[-2])
        return (values[index + 1] - values[index]) / (at[index + 1] - at[index])

    def _draft_line(self, num_requests: int) -> list[float]:
        """Seconds to draft 1, … N tokens: on the line between two places, or on the last line beyond them."""
        at = self._requests.at
        if len(at) == 1:
            return self._draft[0]
        index = min(self._requests.before(num_requests), len(at) - 2)
        share = max(0.0, (num_requests - at[index]) / (at[index + 1] - at[index]))
        ends = zip(self._draft[index], self._draft[index + 1], strict=True)
        return [max(_LEAST_S, low + share * (high - low)) for low, high in ends]


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The nearest sequence that never falls: what falls is pooled with what it follows, and takes the weighted mean."""
    blocks: list[tuple[float, float, int]] = []
    for mean, weight in zip(values, weights if weights is not None else [1.0] * len(values), strict=True):
        count = 1
        while blocks and blocks[-1][0] > mean:
            other, more, places = blocks.pop()
            mean, weight, count = (mean * weight + other * more) / (weight + more), weight + more, count + places
        blocks.append((mean, weight, count))
    return [mean for mean, _, count in blocks for _ in range(count)]
