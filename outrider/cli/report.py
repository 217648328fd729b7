"""`outrider report`: a file of measurements as one page that needs no network, as JSON, and in a few lines."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import verb
from outrider.cli.sweep import PolicyOption
from outrider.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What `report` takes."""

    file: Annotated[Path, typer.Argument(help="Results of a sweep (.jsonl, .parquet), or a published table (.csv).")]
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None
    json: Annotated[Path | None, typer.Option(help="Write everything that the page shows to this file.")] = None
    policy: PolicyOption = None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "report", ReportOptions)(run)


def run(options: ReportOptions) -> None:
    """Show what measurements say: what to take where, how sure that is, and every number as a picture."""
    from outrider.bench.page import check_plotly, page
    from outrider.bench.policy import policy_of
    from outrider.bench.summary import lines, summarize, sweep_of

    for name, path in (("html", options.html), ("json", options.json), ("policy", options.policy)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder", param=name)
    if options.html is not None:
        check_plotly()
    found = summarize(options.file)
    for line in lines(found):
        print(line)
    if options.policy is not None:
        policy_of(sweep_of(options.file)).save(options.policy)
    if options.json is not None:
        options.json.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.html is not None:
        options.html.write_text(page(found), encoding="utf-8")
