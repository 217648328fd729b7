"""`outrider`: finds the verb, and turns every expected fault into one line on stderr and an exit code.

Exit codes: 0 done, 1 the answer is no (a check that failed), 2 the user's fault in one line, 130 Ctrl-C. People read
stderr, programs read stdout.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer

from outrider.cli import bench, chat, check, data, export, generate, models, report, sweep, train, tune
from outrider.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Speculative decoding, measured: the same text as plain decoding, faster where it pays.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for leaf in (generate, chat, bench, sweep, report, tune, check, data, train, export, models):
    leaf.register(app)


# Newer typers carry a click of their own, older ones use the click package: this is UsageError of whichever it is.
_UsageError: Any = typer.BadParameter.__base__


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit."""
    try:
        sys.exit(app(arguments, prog_name="outrider", standalone_mode=False))
    except OutriderError as error:
        _fail(str(error))
    except _UsageError as error:
        _refuse(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _fail(f"the disk is full{f' at {error.filename}' if error.filename else ''}: free some space and try again")


def _refuse(error: Any) -> None:
    """The parser's complaint in one line; a bare `outrider` or `outrider models` gets the help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(2)
    path = error.ctx.command_path if error.ctx is not None else "outrider"
    _fail(f"{error.format_message().rstrip('.')}; see {path} --help")


def _fail(message: str) -> None:
    print(f"outrider: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
