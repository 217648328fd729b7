"""The command line as a user meets it: a command in a process of its own, run to its end or only started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tests.kit.source import ROOT

COMMAND = [sys.executable, "-c", "from outrider.cli.main import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TIMEOUT_S = 120


@dataclass(frozen=True)
class Ended:
    """What a command left: exit code and both streams."""

    code: int | str | None
    out: str
    err: str


Here = Callable[..., Ended]


def apart(*words: str, text: str = "") -> Ended:
    """Run a command with `text` on its stdin."""
    done = subprocess.run(
        [*COMMAND, *words], input=text, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def spawn(*words: str) -> subprocess.Popen[bytes]:
    """Start a command, for signals and pipes."""
    return subprocess.Popen(
        [*COMMAND, *words],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore Ctrl-C, and their children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
