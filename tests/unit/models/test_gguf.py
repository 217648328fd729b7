"""GGUF to a Hugging Face folder: the same numbers, all or nothing, and each broken file named."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.errors import CapacityError, LoadError
from outrider.models.arch import RopeScaling, read_config
from outrider.models.gguf import convert_gguf, new_folder
from outrider.models.loading import check_tensors, load_tensors

Writer = Callable[..., tuple[Path, dict[str, np.ndarray]]]


def converted(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    convert_gguf(path, folder)
    tensors = load_tensors(folder)
    assert check_tensors(tensors, read_config(folder), source=str(folder)) == []
    return tensors


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy()).bfloat16()


def to_neighbours(values: np.ndarray, heads: int) -> np.ndarray:
    """The llama exporter's row order: row r and row r + half of a head become neighbours."""
    rows = np.arange(values.shape[0]).reshape(heads, 2, -1)
    return values[rows.transpose(0, 2, 1).reshape(-1)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_values_arrive_rounded_to_bf16_and_nothing_else(write_gguf: Writer, tmp_path: Path, architecture: str) -> None:
    path, originals = write_gguf(architecture)
    tensors = converted(path, tmp_path / "out")
    assert read_config(tmp_path / "out").model_type == architecture
    assert len(tensors) == len(originals)
    assert torch.equal(tensors["model.embed_tokens.weight"], bf16(originals["token_embd.weight"]))
    assert torch.equal(tensors["model.layers.1.mlp.down_proj.weight"], bf16(originals["blk.1.ffn_down.weight"]))
    for ours, theirs, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
        got, stored = tensors[f"model.layers.0.self_attn.{ours}_proj.weight"], originals[f"blk.0.{theirs}.weight"]
        if architecture == "llama":
            got = torch.from_numpy(to_neighbours(got.float().numpy(), heads)).bfloat16()
        assert torch.equal(got, bf16(stored))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16"])
def test_quantised_tensors_are_restored_before_rounding(write_gguf: Writer, tmp_path: Path, kind: str) -> None:
    path, originals = write_gguf(quantised=gguf.GGMLQuantizationType[kind])
    tensors = converted(path, tmp_path / "out")
    assert torch.equal(tensors["model.layers.1.mlp.gate_proj.weight"], bf16(originals["blk.1.ffn_gate.weight"]))


def test_config_says_what_the_file_says(write_gguf: Writer, tmp_path: Path) -> None:
    path, _ = write_gguf(fields={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 7})
    convert_gguf(path, tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 10000.0, 128)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((0, 5), 7, True)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|end|>" and settings["chat_template"].startswith("{% for m")


def test_rope_scaling_is_kept(write_gguf: Writer, tmp_path: Path) -> None:
    path, _ = write_gguf(fields={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    convert_gguf(path, tmp_path / "linear")
    assert read_config(tmp_path / "linear").rope_scaling == RopeScaling(kind="linear", factor=4.0)
    # The divisors of Llama 3.1 for this head: the two long wavelengths are stretched, the short ones are not.
    inverse = 10000.0 ** (-np.arange(8) / 8)
    turns = 8192 * inverse / (2 * np.pi)
    stretched = np.where(turns < 1, 8, np.where(turns > 4, 1, 1 / ((4 - turns) / 3 / 8 + (turns - 1) / 3)))
    path, _ = write_gguf(change=lambda tensors: tensors.update({"rope_freqs.weight": stretched.astype(np.float32)}))
    convert_gguf(path, tmp_path / "llama3")
    assert read_config(tmp_path / "llama3").rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    path, _ = write_gguf(change=lambda tensors: tensors.update({"rope_freqs.weight": np.full(8, 3, np.float32)}))
    with pytest.raises(LoadError, match=r"rope_freqs\.weight"):
        convert_gguf(path, tmp_path / "odd")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba', expected one of llama, qwen2, qwen3"),
        ({"fields": {"llama.expert_count": 8}}, r"llama\.expert_count to 8"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"vocabulary": "bert"}, "kind 'bert', expected gpt2"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken', expected one of smollm, gpt-2"),
        ({"change": lambda tensors: tensors.pop("blk.1.ffn_up.weight")}, "lacks 1 tensors"),
        ({"change": lambda tensors: tensors.update(odd=np.ones(32, np.float32))}, "holds odd"),
        (
            {"change": lambda tensors: tensors.update({"output_norm.weight": np.ones(32, np.float32)})},
            r"output_norm\.weight is \[32\], expected \[64\]",
        ),
    ],
)
def test_files_of_another_kind_are_refused(
    write_gguf: Writer, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path, _ = write_gguf(**changes)
    refused(path, tmp_path, named)


def refused(path: Path, tmp_path: Path, named: str) -> None:
    with pytest.raises(LoadError, match=named) as caught:
        convert_gguf(path, tmp_path / "place" / "out")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert not (tmp_path / "place").exists() or list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("keep", [4, 20, 200, 3000, 0.5, 0.99])
def test_a_truncated_file_is_refused(write_gguf: Writer, tmp_path: Path, keep: float) -> None:
    path, _ = write_gguf()
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    refused(path, tmp_path, "damaged or cut short")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and so on"])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf", tmp_path, "not a GGUF file")
    refused(tmp_path / "absent.gguf", tmp_path, "is missing")


def test_a_quantisation_that_cannot_be_restored_is_named(write_gguf: Writer, tmp_path: Path) -> None:
    path, _ = write_gguf(change=lambda tensors: tensors.update({"output_norm.weight": np.ones(64, np.int8)}))
    with pytest.raises(LoadError, match=r"output_norm\.weight is stored as I8"):
        convert_gguf(path, tmp_path / "place" / "out")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_folder_in_use_is_left_alone(write_gguf: Writer, tmp_path: Path) -> None:
    path, _ = write_gguf()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(LoadError, match="exists already"):
        convert_gguf(path, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_full_disk_is_one_line_and_leaves_nothing(write_gguf: Writer, tmp_path: Path) -> None:
    # A real limit on the size of a file, in a process of its own: the write of the weights fails half-way.
    path, _ = write_gguf()
    program = (
        "import sys; from pathlib import Path; from outrider.models.gguf import convert_gguf\n"
        "from outrider.errors import CapacityError\n"
        "try: convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except CapacityError as error: print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(tmp_path / "place" / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.startswith("refused: no space left to write"), done.stderr
    assert done.stdout.count("\n") == 1
    assert list((tmp_path / "place").iterdir()) == []


def test_any_fault_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail(error: BaseException) -> None:
        with new_folder(tmp_path / "place" / "out") as partial:
            (partial / "half").write_text("half")
            raise error

    for error, expected in (
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (PermissionError(errno.EACCES, "Permission denied"), LoadError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with pytest.raises(expected):
            fail(error)
        assert list((tmp_path / "place").iterdir()) == []


def test_the_slower_of_two_conversions_keeps_the_first(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as slow:
        (slow / "config.json").write_text("slow")
        with new_folder(tmp_path / "out") as fast:
            (fast / "config.json").write_text("fast")
    assert (tmp_path / "out" / "config.json").read_text() == "fast"
    assert [place.name for place in tmp_path.iterdir()] == ["out"]


def test_progress_is_told_from_nothing_to_all(write_gguf: Writer, tmp_path: Path) -> None:
    path, originals = write_gguf()
    told: list[tuple[str, int, int]] = []
    convert_gguf(path, tmp_path / "out", lambda *report: told.append(report))
    counts = [done for what, done, _ in told if what.startswith("converting")]
    assert counts == list(range(len(originals) + 1))
