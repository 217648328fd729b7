"""The states of a corpus: what a forward of each conversation alone gives, kept whole on disk or not at all."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import CapacityError, ConfigError, LoadError
from outrider.models.llama import LlamaModel
from outrider.train import capture
from outrider.train.capture import Capture, Shard
from outrider.train.corpus import Sample
from tests.kit import tiny
from tests.kit.overheard import taps_of

LENGTHS = (20, 3, 17, 16, 33, 2, 40)
SHARD = 3
TAPS = (0, 2)


def corpus(seed: int = 0) -> list[Sample]:
    samples = []
    for index, length in enumerate(LENGTHS):
        ids = np.array(tiny.random_prompt(100 * seed + index, length), dtype=np.int32)
        samples.append(Sample(ids, np.arange(length) >= length // 2))
    return samples


def joined(samples: list[Sample]) -> Sample:
    return Sample(np.concatenate([s.ids for s in samples]), np.concatenate([s.is_response for s in samples]))


def made(folder: Path | None, model: LlamaModel | None = None, taps: tuple[int, ...] = TAPS, **changes: Any) -> Capture:
    settings: dict[str, Any] = {"samples": corpus(), "shard_len": SHARD} | changes
    return Capture(model or tiny.tiny_model(0), taps=taps, folder=folder, **settings)


def all_of(found: Capture) -> list[Shard]:
    return [found.shard(index) for index in range(len(found))]


def same(one: Shard, other: Shard) -> bool:
    tensors = zip((one.ids, one.is_response, one.taps), (other.ids, other.is_response, other.taps), strict=True)
    return one.starts == other.starts and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("rows", [16, 40, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_each_conversation_alone(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many conversations share a forward."""
    monkeypatch.setattr(capture, "_ROWS", rows)
    model, samples = tiny.tiny_model(0, dtype), corpus()
    shards = all_of(made(None, model))
    assert [len(shard.starts) - 1 for shard in shards] == [3, 3, 1]
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    for index, sample in enumerate(samples):
        shard, place = shards[index // SHARD], index % SHARD
        span = slice(shard.starts[place], shard.starts[place + 1])
        assert shard.ids[span].tolist() == sample.ids.tolist()
        assert shard.is_response[span].tolist() == sample.is_response.tolist()
        alone = taps_of(model, sample.ids.tolist(), TAPS).unflatten(1, (len(TAPS), -1))
        assert shard.taps.dtype == dtype
        assert torch.allclose(shard.taps[span].float(), alone.float(), atol=tolerance, rtol=tolerance)


def test_states_take_gradients_of_what_reads_them() -> None:
    """A forward without autograd gives tensors that training can use."""
    weight = torch.ones(tiny.WIDTH, requires_grad=True)
    rows = torch.arange(4)
    (made(None).shard(0).taps[rows, 0] * weight).sum().backward()
    assert weight.grad is not None


def test_what_is_kept_is_read_back_and_the_target_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = all_of(made(None))
    kept = made(tmp_path)
    assert kept.missing() == [0, 1, 2]
    assert all(same(*pair) for pair in zip(all_of(kept), fresh, strict=True))
    assert kept.missing() == [] and kept.bytes_needed() == 0
    monkeypatch.setattr(capture, "_forward", lambda *_: pytest.fail("the target was run"))
    assert all(same(*pair) for pair in zip(all_of(kept), fresh, strict=True))
    again = made(tmp_path)
    assert again.missing() == []
    assert all(same(*pair) for pair in zip(all_of(again), fresh, strict=True))
    assert not [path for path in tmp_path.iterdir() if "part" in path.name]


def test_the_bytes_that_are_needed_are_those_that_get_written(tmp_path: Path) -> None:
    found = made(tmp_path)
    needed = found.bytes_needed()
    all_of(found)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert needed <= written <= needed + 1000 * len(found)


def test_a_capture_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    fresh = all_of(made(None))
    made(tmp_path).shard(1)
    whole = (tmp_path / "shard-00001.safetensors").read_bytes()
    (tmp_path / "shard-00000.part77").write_bytes(whole[: len(whole) // 2])
    found = made(tmp_path)
    assert found.missing() == [0, 2]
    assert all(same(*pair) for pair in zip(all_of(found), fresh, strict=True))


@pytest.mark.parametrize("left", [0, 4, 100, 2000])
def test_a_damaged_shard_is_named(left: int, tmp_path: Path) -> None:
    all_of(made(tmp_path))
    path = tmp_path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(LoadError, match=r"shard-00001\.safetensors.*delete it") as caught:
        made(tmp_path).shard(1)
    assert "\n" not in str(caught.value)


def test_a_shard_with_other_tensors_is_named(tmp_path: Path) -> None:
    all_of(made(tmp_path))
    path = tmp_path / "shard-00002.safetensors"
    tensors = load_file(path)
    del tensors["starts"]
    save_file(tensors, path)
    with pytest.raises(LoadError, match=r"shard-00002\.safetensors"):
        made(tmp_path).shard(2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": tiny.tiny_model(1)}, "target"),
        ({"model": tiny.tiny_model(0, torch.bfloat16)}, "dtype"),
        ({"samples": corpus(1)}, "corpus"),
        ({"samples": corpus()[1:]}, "corpus"),
        ({"shard_len": 4}, "conversations_per_shard"),
        ({"taps": (0, 1)}, "taps"),
        ({"taps": (0, 1, 2)}, "taps"),
    ],
)
def test_states_of_something_else_are_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=rf"holds states of another {named} .*another folder") as caught:
        made(tmp_path, **changes)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_conversations_that_begin_elsewhere_are_another_corpus(tmp_path: Path) -> None:
    """The same tokens in the same order, and yet not the same states."""
    all_of(made(tmp_path))
    with pytest.raises(ConfigError, match="holds states of another corpus .*another folder"):
        made(tmp_path, samples=[joined(corpus()[:2]), *corpus()[2:]]).shard(0)


def test_other_marks_are_no_other_states(tmp_path: Path) -> None:
    """What counts as a response is the corpus's to say, not the folder's."""
    all_of(made(tmp_path))
    marked = [dataclasses.replace(sample, is_response=~sample.is_response) for sample in corpus()]
    found = made(tmp_path, samples=marked)
    assert found.missing() == [] and same(found.shard(1), made(None, samples=marked).shard(1))


def test_of_more_taps_those_asked_for_are_picked(tmp_path: Path) -> None:
    all_of(made(tmp_path, taps=(2, 0, 1)))
    for taps in ((1, 2), (1,), (0, 1, 2)):
        fresh = all_of(made(None, taps=taps))
        assert all(same(*pair) for pair in zip(all_of(made(tmp_path, taps=taps)), fresh, strict=True))


def test_fewer_taps_than_are_kept_still_capture_them_all(tmp_path: Path) -> None:
    """A shard that is missing is written for everybody who uses the folder."""
    made(tmp_path, taps=(0, 1, 2))
    made(tmp_path, taps=(1,)).shard(0)
    assert same(made(tmp_path, taps=(0, 1, 2)).shard(0), made(None, taps=(0, 1, 2)).shard(0))


def test_a_broken_manifest_is_named(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "capture.json").write_text("{")
    with pytest.raises(LoadError, match=r"capture\.json"):
        made(tmp_path)


def test_a_corpus_that_the_disk_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    spare = capture._SPARE_BYTES
    for free, fits in ((spare + found.bytes_needed(), True), (spare + found.bytes_needed() - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            found.check_disk()
            continue
        with pytest.raises(CapacityError, match="GB must stay free") as caught:
            found.check_disk()
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
        made(None).check_disk()


def test_a_full_disk_leaves_what_was_captured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(tmp_path)
    first = found.shard(0)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(capture, "save_file", full)
        with pytest.raises(CapacityError, match=r"shard-00001\.safetensors.*No space left") as caught:
            found.shard(1)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.json", "shard-00000.safetensors"]
    assert found.missing() == [1, 2] and same(made(tmp_path).shard(0), first)
    assert same(found.shard(1), made(None).shard(1))
