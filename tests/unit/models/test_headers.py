"""Headers of safetensors files: what they say is what the tensors are, and what they do not cover is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import LoadError
from outrider.models.headers import INDEX, header_bytes, read_header, read_headers

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4),
    "d": torch.tensor(7),
    "e": torch.tensor([True, False]),
}
KINDS = {"a": "F32", "b": "BF16", "c": "F32", "d": "I64", "e": "BOOL"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_a_header_says_what_the_tensors_are(folder: Path) -> None:
    found = read_headers(folder)
    data = (folder / "model.safetensors").read_bytes()
    assert {name: tensor.dtype for name, tensor in found.items()} == KINDS
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape) and found[name].num_elements == tensor.numel()
        stored = data[found[name].start : found[name].start + found[name].num_bytes]
        assert stored == tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else stored == b""


def test_a_header_of_ours_is_read_by_everybody(folder: Path) -> None:
    found = read_headers(folder)
    data = (folder / "model.safetensors").read_bytes()
    made = header_bytes((name, t.dtype, t.shape, t.num_bytes) for name, t in found.items())
    (folder / "again.safetensors").write_bytes(
        made + b"".join(data[t.start : t.start + t.num_bytes] for t in found.values())
    )
    again = load_file(folder / "again.safetensors")
    assert again.keys() == TENSORS.keys() and all(torch.equal(again[name], t) for name, t in TENSORS.items())
    assert len(made) % 8 == 0


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert {name: tensor.dtype for name, tensor in read_headers(tmp_path).items()} == KINDS
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"b\.safetensors is missing"):
        read_headers(tmp_path)
    for names, said in (
        ({"a": "../a.safetensors"}, "of its own folder"),
        ({"z": "a.safetensors"}, "lacks z"),
        ({}, "no weight_map"),
    ):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
        with pytest.raises(LoadError, match=said):
            read_headers(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1, -9])
def test_a_file_that_is_cut_short_is_one_line(kept: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"not a whole safetensors file|cut short") as caught:
        read_header(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}},
        {"a": 3},
    ],
    ids=str,
)
def test_a_foreign_header_is_one_line(table: object, tmp_path: Path) -> None:
    text = json.dumps(table).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(LoadError, match="whole safetensors file|cut short") as caught:
        read_headers(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.bin", "b.txt", "c", "d"):
        (tmp_path / name).touch()
    with pytest.raises(LoadError, match=r"it holds a\.bin, b\.txt, c and 1 more"):
        read_headers(tmp_path)
