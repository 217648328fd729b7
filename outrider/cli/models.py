"""`outrider models`: fetch and list the models that this machine has. Thin: models/store.py does the work."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(help="Fetch and list models.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the verb with its own verbs."""
    parent.add_typer(app, name="models")


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A built-in name (smollm2), a GGUF file, or a hub name.")]) -> None:
    """Fetch a model, check it, and make it ready in the cache folder; nothing to do the second time."""
    from outrider.models.store import resolve

    with ProgressBars() as bars:
        folder = resolve(name, bars.show)
    print(folder)


@app.command("list")
def list_models(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the built-in models and those in the cache folder."""
    from outrider.models.store import list_models as stored

    records = stored()
    if json:
        print(json_module.dumps([{**asdict(record), "path": str(record.path)} for record in records]))
        return
    table = Table("name", "state", "MB", "path", box=None)
    for record in records:
        size = "" if record.size_bytes is None else f"{record.size_bytes / 1e6:.0f}"
        table.add_row(record.name, record.state, size, str(record.path or ""))
    Console().print(table)


class ProgressBars:
    """Bars on stderr for long steps: `show(what, done, total)` as often as one likes."""

    def __enter__(self) -> ProgressBars:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
        self._tasks: dict[str, int] = {}
        self._progress.start()
        return self

    def show(self, what: str, done: int, total: int) -> None:
        """Draw one step's progress."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
