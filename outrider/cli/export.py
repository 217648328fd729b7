"""`outrider export`: a drafter in another format, or inside a copy of its target; train/export.py does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import MODEL_HELP, verb
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What `export` takes."""

    drafter: Annotated[str, typer.Argument(help="A drafter's folder or hub name, in any published format.")]
    target: Annotated[str, typer.Option(help=MODEL_HELP)]
    output: Annotated[Path, typer.Option(help="Folder to write; it must not hold anything.")]
    format: Annotated[
        str | None, typer.Option(help="speculators, eagle, z-lab or deepspec; what it cannot hold is refused.")
    ] = None
    stitch: Annotated[
        bool, typer.Option("--stitch", help="Put an mtp module into a copy of its target's checkpoint instead.")
    ] = False
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bfloat16 (if none is given), float16 or float32.")
    ] = None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "export", ExportOptions)(run)


def run(options: ExportOptions) -> None:
    """Write a drafter's checkpoint in another published format, or inside its target's; prints the folder."""
    from outrider.cli.progress import ProgressBars
    from outrider.models.store import resolve
    from outrider.train.export import export, stitch

    _check(options)
    with ProgressBars() as bars:
        resolve(options.target, bars.show)
        if options.stitch:
            print(stitch(options.drafter, target=options.target, output=options.output, progress=bars.show))
            return
    written = export(
        options.drafter,
        target=options.target,
        format_name=options.format or "",
        output=options.output,
        dtype=options.dtype or "bfloat16",
    )
    print(written)


def _check(options: ExportOptions) -> None:
    if not options.stitch and options.format is None:
        raise ConfigError("--format is missing: say which, or --stitch for a module inside its target", param="format")
    for param, value in (("format", options.format), ("dtype", options.dtype)):
        if options.stitch and value is not None:
            raise ConfigError(f"--{param} does not go with --stitch, which copies tensors as they are", param=param)
