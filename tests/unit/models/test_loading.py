"""Safetensors folders: what is read, and how each broken one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import LoadError
from outrider.models.arch import ModelConfig, expected_shapes
from outrider.models.loading import check_tensors, load_tensors

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=20,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(CONFIG).items()}


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_one_file_and_shards_give_the_same_tensors(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    write_shards(tmp_path / "many", tensors)
    one, many = load_tensors(tmp_path / "one"), load_tensors(tmp_path / "many")
    assert one.keys() == many.keys() == tensors.keys()
    assert all(torch.equal(one[name], value) and torch.equal(many[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, tensors: dict[str, Tensor], keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors is not a whole safetensors file.*again$"):
        load_tensors(tmp_path)


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04 this is a zip of pickles" * 9)
    with pytest.raises(LoadError, match="not a whole safetensors file"):
        load_tensors(tmp_path)


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        load_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(LoadError, match=r"it holds pytorch_model\.bin, convert"):
        load_tensors(tmp_path)


def test_faults_of_a_shard_index_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weight_map = write_shards(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "model-1.safetensors"}}))
    with pytest.raises(LoadError, match="ghost"):
        load_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../model-1.safetensors"}}))
    with pytest.raises(LoadError, match="own folder"):
        load_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(LoadError, match="no weight_map"):
        load_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-2\.safetensors is missing"):
        load_tensors(tmp_path)


def test_whole_tensors_pass_and_left_over_ones_are_reported(tensors: dict[str, Tensor]) -> None:
    assert check_tensors(tensors, CONFIG, source="here") == []
    tensors |= {"model.mtp.weight": torch.ones(1), "lm_head.weight": torch.ones(20, 8)}
    assert check_tensors(tensors, CONFIG, source="here") == ["model.mtp.weight"]


def test_missing_and_misshapen_tensors_are_named(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = tensors.pop(name)
    with pytest.raises(LoadError, match=rf"here lacks 1 tensors .*{name}"):
        check_tensors(tensors, CONFIG, source="here")
    with pytest.raises(LoadError, match=rf"{name} is \[8, 4\], expected \[4, 8\]"):
        check_tensors(tensors | {name: whole.T}, CONFIG, source="here")
    with pytest.raises(LoadError, match=rf"{name} is torch.int8"):
        check_tensors(tensors | {name: whole.to(torch.int8)}, CONFIG, source="here")


@pytest.mark.parametrize("packed", ["qweight", "weight_packed", "absmax"])
def test_packed_weights_in_place_of_whole_ones_are_named(tensors: dict[str, Tensor], packed: str) -> None:
    name = "model.layers.1.self_attn.k_proj."
    del tensors[name + "weight"]
    tensors[name + packed] = torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(
        LoadError, match=rf"here: the weights are quantised \(not stated, {name}{packed} is torch.int32"
    ):
        check_tensors(tensors, CONFIG, source="here")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_value_that_is_not_finite_is_refused(tensors: dict[str, Tensor], value: float, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    assert check_tensors(tensors, CONFIG, source="here") == []
    tensors[name][3, 5] = value
    with pytest.raises(LoadError, match=rf"{name} holds NaN or infinity"):
        check_tensors(tensors, CONFIG, source="here")
