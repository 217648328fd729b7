"""`outrider models`: fetch, list and look into models and drafters.

Thin: models/store.py, drafting/zoo.py and drafting/inspect.py do the work.
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

app = typer.Typer(help="Fetch, list and look into models and drafters.", no_args_is_help=True)
_WIDTH = 80
_LABELS = {"num_bytes": "size", "num_speculative_tokens": "N", "mtp_module": "MTP module inside"}


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


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A folder, a GGUF file, a model's name, or an installed drafter's name.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint is, what it needs, and what runs it; reads headers only, and never code that it brings."""
    from outrider.drafting.inspect import inspect as look

    with ProgressBars() as bars:
        found = look(path, bars.show)
    if json:
        print(json_module.dumps(found))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in found.items():
        if key != "speculative_configs" and (text := _shown(key, value)):
            table.add_row(_LABELS.get(key, key.removeprefix("num_").replace("_", " ")), text)
    Console(width=min(_WIDTH, Console().width), markup=False, highlight=False).print(table)
    for config in found["speculative_configs"]:
        print(f"--speculative-config '{json_module.dumps(config)}'")


def _shown(key: str, value: Any) -> str:
    """A finding in the table's words; empty where there is nothing to say."""
    if key == "remote_code":
        return "auto_map in config.json: never run" if value else ""
    if key == "quantisation":
        return f"{value}: cannot be read" if value else "none"
    if key == "unknown_keys":
        return "\n".join(map(_shown_key, value))
    if key.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    if key == "num_parameters":
        return f"{value / 1e6:.1f} M"
    if isinstance(value, dict):
        parts = (f"{name.removeprefix('num_').replace('_', ' ')} {part}" for name, part in value.items() if part)
        return ", ".join(parts)
    if isinstance(value, list):
        return ("\n" if key == "layout" else ", ").join(map(str, value))
    return "" if value is None or value == 0 and key != "mask_token_id" else str(value)


def _shown_key(entry: dict[str, Any]) -> str:
    effect = f"may change {entry['may_change']}" if entry["may_change"] else "off, changes nothing"
    return f"{entry['key']} = {json_module.dumps(entry['value'])[:40]}: {effect}"


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
