"""A training run's folder: settings, log, resumable state, best checkpoint so far. Every file is whole or absent.

run.json       what the run is; resuming with anything else is refused, naming it
log.jsonl      one line a step or measurement
state.pt       parameters and optimiser, to go on from
curve.png      loss, and acceptance as it was measured (curve.py)
best/          the checkpoint with the highest measured acceptance, as it is published
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafting.profile import PROFILE
from outrider.errors import CapacityError, ConfigError, LoadError
from outrider.train.processes import rank, wait

_RUN, _LOG, _STATE, _BEST, _OLD = "run.json", "log.jsonl", "state.pt", "best", "best.old"


class RunFolder:
    """The files of one run. Raises ConfigError for another run's folder, CapacityError where nothing can be written."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path, self.best = path, path / _BEST
        # The first process writes, the others then hold theirs against it.
        if rank() == 0:
            self._open(description)
        wait()
        if rank() != 0:
            self._open(description)

    def _open(self, description: Mapping[str, Any]) -> None:
        path, file = self.path, self.path / _RUN
        try:
            path.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                _same(json.loads(file.read_text()), json.loads(json.dumps(description)), path)
            else:
                _replace(file, json.dumps(description, indent=1).encode() + b"\n")
            if not self.best.exists() and (path / _OLD).is_dir():
                os.replace(path / _OLD, self.best)  # stopped between the two moves of a promotion
        except OSError as error:
            raise CapacityError(f"{file}: {error}") from error
        except ValueError as error:
            raise LoadError(f"{file} cannot be read ({error}): give another folder") from error

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        with self._writing(), (self.path / _LOG).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step: it is done again."""
        kept = [json.dumps(entry) + "\n" for entry in self.entries() if entry["step"] <= step]
        with self._writing():
            _replace(self.path / _LOG, "".join(kept).encode())

    def entries(self) -> list[dict[str, Any]]:
        """The log so far; a line that was cut short is left out."""
        try:
            lines = (self.path / _LOG).read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Keep what a resumed run needs; the one before stays until this one is whole."""
        part = self.path / (_STATE + ".part")
        try:
            with self._writing():
                torch.save(dict(state), part)
                os.replace(part, self.path / _STATE)
        finally:
            part.unlink(missing_ok=True)

    def state(self) -> dict[str, Any] | None:
        """What was kept last, None in a new run. Raises LoadError."""
        path = self.path / _STATE
        if not path.is_file():
            return None
        try:
            loaded: dict[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
            raise LoadError(
                f"{path} cannot be read ({(str(error).splitlines() or ['empty'])[0]}): delete it to start over"
            ) from error
        return loaded

    def write_candidate(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
        """A checkpoint to be measured, bf16, in a folder of its own."""
        folder = self.path / "candidate"
        with self._writing():
            folder.mkdir(exist_ok=True)
            _replace(folder / "config.json", json.dumps(config, indent=1).encode() + b"\n")
            narrow = {
                name: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous() for name, t in tensors.items()
            }
            save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def promote(self, profile: Mapping[str, Any]) -> None:
        """The candidate becomes the best checkpoint, with its profile; the old one goes only then."""
        old = self.path / _OLD
        with self._writing():
            shutil.rmtree(old, ignore_errors=True)
            _replace(self.path / "candidate" / PROFILE, _readable(profile).encode() + b"\n")
            if self.best.is_dir():
                os.replace(self.best, old)
            os.replace(self.path / "candidate", self.best)
            shutil.rmtree(old, ignore_errors=True)

    def _writing(self) -> _Writing:
        return _Writing(self.path)


class _Writing:
    """Turns a failed write into one line that says what is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError | SafetensorError | RuntimeError):
            raise CapacityError(
                f"{self._path}: cannot be written ({str(error).splitlines()[0]}); the last good checkpoint and state"
                " are kept, the same command goes on from them"
            ) from error


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    for key in [*ours, *theirs]:
        if theirs.get(key) != ours.get(key):
            given, now = theirs.get(key), ours.get(key)
            raise ConfigError(
                f"{path} holds a run of another {key} ({given!r} there, {now!r} now): give the same or another folder",
                param=key,
            )


def _readable(profile: Mapping[str, Any]) -> str:
    """JSON for people: indented, but each list of numbers on one line."""
    text = json.dumps(profile, indent=1)
    return re.sub(r"\[[\d\s,.]+\]", lambda found: " ".join(found[0].split()), text)


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
