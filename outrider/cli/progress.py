"""Progress bars on stderr for long steps; nothing is drawn until a step reports."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressBars:
    """Bars on stderr for long steps: `show(what, done, total)` as often as one likes, a note beside it where one is."""

    def __enter__(self) -> ProgressBars:
        columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.percentage:>3.0f}%"))
        note = TextColumn("{task.fields[note]}")
        self._progress = Progress(*columns, note, TimeRemainingColumn(), console=Console(file=sys.stderr))
        self._tasks: dict[str, TaskID] = {}
        return self

    def show(self, what: str, done: int, total: int, note: str = "") -> None:
        """Draw one step's progress."""
        if what not in self._tasks:
            self._progress.start()  # only now: starting and stopping alone would print an empty line
            self._tasks[what] = self._progress.add_task(what, total=total, note=note)
        self._progress.update(self._tasks[what], completed=done, total=total, note=note)

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._progress.stop()
