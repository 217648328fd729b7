"""Turns a GGUF file into a Hugging Face folder, once: bf16 safetensors, config, generation config and tokenizer.

Architectures llama, qwen2, qwen3 and gemma3. Quantised values are restored in float32 and then rounded to bfloat16.
This is not a loader: the engine only ever reads the folder. The tokenizer half is in models/gguf_tokenizer.py. Source:
the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md, through the `gguf` package; what a Gemma 3
file leaves unsaid, from llama.cpp's reader.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor

from outrider.errors import LoadError
from outrider.models.arch import ModelConfig
from outrider.models.download import Progress, disk_error, silent
from outrider.models.gemma_config import GemmaConfig
from outrider.models.gguf_tokenizer import tokenizer_files
from outrider.models.loading import parse_any, tensor_shapes

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# What a damaged file makes the reader stumble over; it checks little itself.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error)
_REFUSED_KEYS = ("expert_count", "attention.logit_softcapping", "attn_logit_softcapping", "logit_scale")
# Llama 3 files carry the stretched frequencies and not the rule; these are the rules that were ever published.
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LARGEST_GEMMA3 = 62
"""Layers of the one size whose attention is scaled by an equal share of the width instead of the head size."""


def convert_gguf(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the model of a GGUF file to a new folder in the Hugging Face format: all of it, or nothing.

    The work is done in a sibling folder that is renamed at the end; where another process was faster, its folder
    stays. Raises LoadError for a file that is not a GGUF, is cut short, or holds an architecture, quantisation or
    tokenizer that is not known, and CapacityError for a full disk. Cost: memory of the largest tensor in float32.
    """
    path, folder = Path(path), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LoadError(f"{folder} exists already, expected a new or empty folder to convert {path.name} to")
    progress(f"reading {path.name}", 0, 0)
    reader = open_gguf(path)
    with _damage_named(path):
        fields = {name: field.contents() for name, field in reader.fields.items()}
    config, generation = _configs(reader, fields, path)
    files = {"config.json": config, "generation_config.json": generation} | tokenizer_files(fields, source=str(path))
    tensors = _renamed(reader, parse_any(config, generation, source=str(path)), path)
    with new_folder(folder) as partial:
        for name, content in files.items():
            _write_json(partial / name, content)
        _write_tensors(partial / "model.safetensors", tensors, config, progress)


def open_gguf(path: Path) -> GGUFReader:
    """A reader over a whole GGUF file; LoadError where it is none."""
    if not path.is_file():
        raise LoadError(f"{path} is missing, expected a GGUF file")
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    with _damage_named(path):
        return GGUFReader(path)


def gguf_config(reader: GGUFReader, path: Path) -> dict[str, Any]:
    """The config.json that the file's model would have. Raises LoadError as converting it does."""
    with _damage_named(path):
        fields = {name: field.contents() for name, field in reader.fields.items()}
    return _configs(reader, fields, path)[0]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its name at the end, or disappears on any error.

    Raises CapacityError where the disk is full and LoadError where the place cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            yield partial
            _take_name(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def _take_name(partial: Path, folder: Path) -> None:
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError as error:
        # Another process was faster: its folder is as whole as ours.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not (folder / "config.json").is_file():
            raise


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise LoadError(f"{path} is damaged or cut short ({reason}); fetch it again") from error


def _configs(reader: GGUFReader, fields: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LoadError(f"{path} is of architecture {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    names = {tensor.name for tensor in reader.tensors}
    own = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    if refused := [key for key in _REFUSED_KEYS if own.get(key)]:
        raise LoadError(f"{path} sets {architecture}.{refused[0]} to {own[refused[0]]}, which is not implemented")
    if architecture != "gemma3" and own.get("attention.sliding_window"):
        raise LoadError(f"{path} sets {architecture}.attention.sliding_window, which is not implemented")
    heads, width = _required(own, "attention.head_count", path), _required(own, "embedding_length", path)
    rows = next((int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"), 0)
    special = {f"{kind}_token_id": fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    ends = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    generation = special | {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None}
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": rows or own.get("vocab_size"),
        "hidden_size": width,
        "intermediate_size": _required(own, "feed_forward_length", path),
        "num_hidden_layers": _required(own, "block_count", path),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _short(_required(own, "attention.layer_norm_rms_epsilon", path)),
        "rope_theta": _short(own.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(reader, own, path),
        "max_position_embeddings": _required(own, "context_length", path),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "torch_dtype": "bfloat16",
    }
    return config | (_gemma_keys(own, config, path) if architecture == "gemma3" else {}) | special, generation


def _gemma_keys(own: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a Gemma 3 has beside or instead of the other families' keys; its files leave some of it unsaid."""
    share = config["hidden_size"] // config["num_attention_heads"]
    cap = own.get("final_logit_softcapping")
    return {
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": share if config["num_hidden_layers"] == _LARGEST_GEMMA3 else config["head_dim"],
        "rope_theta": _short(own.get("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": _short(own.get("rope.freq_base_swa", 10_000.0)),
        "sliding_window": _required(own, "attention.sliding_window", path),
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None if cap is None else _short(cap),
    }


def _required(own: Mapping[str, Any], key: str, path: Path) -> Any:
    value = own.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LoadError(f"{path} has {value!r} for {key}, expected a number above 0; fetch or convert it again")
    return value


def _short(value: float) -> float:
    """The decimal number that a float32 field was written from: 1e-05 and not 9.999999747e-06."""
    return float(f"{value:.7g}")


def _rope_scaling(reader: GGUFReader, own: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    stored = next((tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if stored is not None:
        return _llama3_scaling(np.asarray(stored.data, dtype=np.float64), own, path)
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": own.get("rope.scaling.factor")}
    if kind != "none":
        raise LoadError(f"{path} scales rotary positions by {kind!r}, expected none, linear or llama3")
    return None


def _llama3_scaling(stored: np.ndarray, own: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Find the published llama3 rule whose frequency divisors are the stored ones."""
    pairs = len(stored)
    wavelength = 2 * np.pi * float(own.get("rope.freq_base", 10000.0)) ** (np.arange(pairs) / pairs)
    for factor in _LLAMA3_FACTORS:
        share = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(stored, 1 / ((1 - share) / factor + share), rtol=1e-3):
            rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return {"rope_type": "llama3", "factor": factor} | rule
    raise LoadError(f"{path} has rope_freqs.weight of no published llama3 rule (factors 8, 16, 32)")


def _renamed(reader: GGUFReader, config: ModelConfig | GemmaConfig, path: Path) -> dict[str, ReaderTensor]:
    """The file's tensors under their Hugging Face names, in the order of the config, each of the expected shape."""
    names = _GEMMA_LAYER_NAMES if isinstance(config, GemmaConfig) else _LAYER_NAMES
    found = {_hf_name(tensor.name, names): tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
    shapes = tensor_shapes(config)
    if unknown := sorted(tensor.name for name, tensor in found.items() if name not in shapes):
        raise LoadError(f"{path} holds {unknown[0]}, which a {config.model_type} does not have")
    if missing := [name for name in shapes if name not in found]:
        raise LoadError(f"{path} lacks {len(missing)} tensors ({missing[0]} first); fetch it again")
    for name, shape in shapes.items():
        got = tuple(int(size) for size in reversed(found[name].shape))
        if got != shape:
            raise LoadError(f"{path}: {found[name].name} is {list(got)}, expected {list(shape)}")
    return {name: found[name] for name in shapes}


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    return _OUTER_NAMES.get(name, name)


def _write_tensors(
    path: Path, tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any], progress: Progress
) -> None:
    """Stream a safetensors file: its header first, then one tensor after another, so that memory stays small."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for done, (name, tensor) in enumerate(tensors.items()):
            progress("converting to bf16", done, len(tensors))
            out.write(_bfloat16_bytes(name, tensor, config))
        out.flush()
        os.fsync(out.fileno())
    progress("converting to bf16", len(tensors), len(tensors))


def _bfloat16_bytes(name: str, tensor: ReaderTensor, config: Mapping[str, Any]) -> bytes:
    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
        raise LoadError(f"{tensor.name} is stored as {kind}, which cannot be dequantised; use another file") from error
    if config["model_type"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        values = _unpermuted(values, heads)
    if config["model_type"] == "gemma3_text" and "norm" in name:
        # GGUFs hold what the norm multiplies by, folders what it differs from 1.
        values = values - 1
    return torch.from_numpy(np.require(values, requirements=["C", "W"])).bfloat16().view(torch.int16).numpy().tobytes()


def _unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama GGUFs, which pairs neighbours for rotation; ours pairs a row with one half below."""
    paired = values.reshape(heads, -1, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
