"""`outrider`: finds the verb, and turns every expected fault into one line on stderr and an exit code.

Exit codes: 0 done, 1 the answer is no (a check that failed), 2 the user's fault in one line, 130 Ctrl-C. People read
stderr, programs read stdout.
"""

from __future__ import annotations

import errno
import sys

import typer

from outrider.cli import bench, chat, check, generate, models
from outrider.errors import OutriderError

app = typer.Typer(
    name="outrider",
    help="Speculative decoding, measured: the same text as plain decoding, faster where it pays.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for leaf in (generate, chat, bench, check, models):
    leaf.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit."""
    try:
        app(arguments)
    except OutriderError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; there is nobody to tell
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _fail(f"the disk is full{f' at {error.filename}' if error.filename else ''}: free some space and try again")


def _fail(message: str) -> None:
    print(f"outrider: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
