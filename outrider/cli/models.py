"""`outrider models`: fetch and list the models that this machine has. Thin: models/store.py does the work."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.progress import ProgressBars

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
