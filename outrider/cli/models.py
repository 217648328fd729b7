"""`outrider models`: fetch and list the models that this machine has, and the drafters that are installed for them.

Thin: models/store.py and drafting/zoo.py do the work.
"""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.progress import ProgressBars

if TYPE_CHECKING:
    from outrider.drafting.zoo import ZooDrafter

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
    """List the built-in models, those in the cache folder, and the installed drafters."""
    from outrider.drafting.zoo import drafters as installed
    from outrider.models.store import list_models as stored

    records, drafters = stored(), installed()
    if json:
        models = [{**asdict(record), "path": str(record.path)} for record in records]
        print(json_module.dumps([*models, *map(_as_json, drafters)]))
        return
    table = Table("name", "state", "MB", "path", box=None)
    for record in records:
        size = "" if record.size_bytes is None else f"{record.size_bytes / 1e6:.0f}"
        table.add_row(record.name, record.state, size, str(record.path or ""))
    console = Console()
    console.print(table)
    if drafters:
        console.print(_table_of(drafters))


def _as_json(drafter: ZooDrafter) -> dict[str, Any]:
    """A drafter as an entry of the list of models: their keys, and its own."""
    profile = drafter.profile
    return {
        "name": drafter.name,
        "state": "ready",
        "size_bytes": drafter.size_bytes,
        "path": str(drafter.path),
        "method": profile.method,
        "num_speculative_tokens": profile.num_speculative_tokens,
        "target": {"name": profile.target, "fingerprint": profile.fingerprint},
    }


def _table_of(drafters: list[ZooDrafter]) -> Table:
    table = Table("drafter", "method", "target", "N", "MB", "path", box=None)
    for drafter in drafters:
        profile, size = drafter.profile, f"{drafter.size_bytes / 1e6:.1f}"
        length = str(profile.num_speculative_tokens)
        table.add_row(drafter.name, profile.method, profile.target, length, size, str(drafter.path))
    return table
