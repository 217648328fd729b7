"""`outrider export`: a drafter in the format of Speculators, EAGLE, z-lab or DeepSpec; train/export.py does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import MODEL_HELP, verb


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What `export` takes."""

    drafter: Annotated[str, typer.Argument(help="A drafter's folder or hub name, in any published format.")]
    format: Annotated[str, typer.Option(help="speculators, eagle, z-lab or deepspec; what it cannot hold is refused.")]
    target: Annotated[str, typer.Option(help=MODEL_HELP)]
    output: Annotated[Path, typer.Option(help="Folder to write; it must not hold anything.")]
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "export", ExportOptions)(run)


def run(options: ExportOptions) -> None:
    """Write a drafter's checkpoint in another published format; prints the folder."""
    from outrider.cli.progress import ProgressBars
    from outrider.models.store import resolve
    from outrider.train.export import export

    with ProgressBars() as bars:
        resolve(options.target, bars.show)
    written = export(
        options.drafter,
        target=options.target,
        format_name=options.format,
        output=options.output,
        dtype=options.dtype,
    )
    print(written)
