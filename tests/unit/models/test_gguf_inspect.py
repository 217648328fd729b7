"""What inspecting says of a GGUF file: what its model would be once converted, and one line for a damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from outrider.drafting.inspect import inspect
from outrider.errors import LoadError
from outrider.models.arch import read_config
from outrider.models.gguf import convert_gguf


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_says_what_its_conversion_says(
    architecture: str, write_gguf: Callable[..., Any], tmp_path: Path
) -> None:
    path, tensors = write_gguf(architecture)
    found = inspect(str(path))
    convert_gguf(path, tmp_path / "converted")
    config, converted = read_config(tmp_path / "converted"), inspect(str(tmp_path / "converted"))
    assert (found["kind"], found["runs_on"], found["path"]) == ("target", "own code", str(path))
    assert found["num_layers"] == config.num_layers and found["num_parameters"] == converted["num_parameters"]
    same = ("family", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position_embeddings")
    assert [found[key] for key in same] == [converted[key] for key in same]
    assert found["dtypes"] == ["F32"] and found["num_bytes"] == sum(values.nbytes for values in tensors.values())


def test_quantised_types_are_listed_and_can_be_read(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(quantised=gguf.GGMLQuantizationType.Q8_0)
    found = inspect(str(path))
    assert found["dtypes"] == ["F32", "Q8_0"] and found["quantisation"] is None and found["runs_on"] == "own code"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.6, 0.99])
def test_a_gguf_that_is_cut_off_is_one_line(share: float, write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf()
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(LoadError) as caught:
        inspect(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_gguf_of_another_kind_is_one_line(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(fields={"general.architecture": "no_such_model"})
    with pytest.raises(LoadError, match="is of architecture"):
        inspect(str(path))
