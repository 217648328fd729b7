"""Progress bars on stderr for long steps; nothing is drawn until a step reports."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressBars:
    """Bars on stderr for long steps: `show(what, done, total)` as often as one likes."""

    def __enter__(self) -> ProgressBars:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
        self._tasks: dict[str, TaskID] = {}
        return self

    def show(self, what: str, done: int, total: int) -> None:
        """Draw one step's progress."""
        if what not in self._tasks:
            self._progress.start()  # only now: starting and stopping alone would print an empty line
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._progress.stop()
