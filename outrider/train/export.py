"""A drafter in another published format, or inside its target, as a folder that appears whole or not at all.

Any checkpoint that loads can be read. It is loaded once with its target before, so that nothing broken is passed on,
and the written folder once more: its settings must read as the source's do, whatever the format. What each format is
and cannot hold is in the methods' exporters, found through the registry. Not here: converting a target (models/store).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafting import registry
from outrider.drafting.base import TargetInfo
from outrider.drafting.checkpoint import Checkpoint, method_of, read_checkpoint, stated_length
from outrider.drafting.export import Exporter, ExportTarget, Written
from outrider.drafting.profile import PROFILE, read_profile
from outrider.drafting.stitch import plan_stitch, write_plan
from outrider.errors import CapacityError, ConfigError, LoadError
from outrider.models.arch import read_config, read_json
from outrider.models.cache import BlockPool
from outrider.models.download import Progress, silent
from outrider.models.families import load_model
from outrider.models.headers import read_headers
from outrider.models.loading import load_tensors
from outrider.models.memory import TargetMemory
from outrider.models.store import resolve
from outrider.models.target import Target

FORMATS = ("speculators", "eagle", "z-lab", "deepspec")
"""Every format that some method can be written in."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_POOL_BLOCKS, _BLOCK_SIZE = 1, 16
_SPARE_BYTES = 1 << 20
"""For headers and the index."""


def export(drafter: str, *, target: str, format_name: str, output: Path, dtype: str = "bfloat16") -> Path:
    """Write a drafter (folder or hub name) for its target in a format; gives the folder, which must not hold anything.

    Weights are rounded to `dtype`; d2t stays int64 and t2d bool. A speculation_profile.json beside the source goes
    along. Raises ConfigError naming the key that the format cannot hold, DrafterMismatch, LoadError, CapacityError.
    Cost: the target is loaded once, the drafter twice.
    """
    output = output.absolute()
    _check(format_name, output, dtype)
    checkpoint = read_checkpoint(drafter)
    method = method_of(checkpoint)
    make = registry.exporter(method)
    model = load_model(target, dtype=torch.bfloat16, device=torch.device("cpu"))
    _load(method, checkpoint.source, model)
    told = _export_target(target, checkpoint)
    exporter = make(checkpoint, told)
    if format_name not in exporter.formats:
        raise ConfigError(
            f"--format {format_name} is not one of {method}'s: expected {', '.join(exporter.formats)}", param="format"
        )
    written = exporter.formats[format_name](_num_tokens(checkpoint, exporter))
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        made = Path(scratch) / output.name
        _write(made, written, DTYPES[dtype], Path(checkpoint.source) / PROFILE)
        again = read_checkpoint(str(made))
        _compare(exporter.meaning, registry.exporter(method_of(again))(again, told).meaning, format_name)
        _load(method, str(made), model)
        _put(made, output)
    return output


def stitch(drafter: str, *, target: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of the target's checkpoint with the drafter's prediction module in it, as shards with an index.

    Gives the folder, which must not hold anything; types and bytes of all tensors stay. Raises ConfigError,
    DrafterMismatch, LoadError, and CapacityError before anything is written. Cost: the target is copied, not loaded.
    """
    output = output.absolute()
    _check_output(output)
    plan = plan_stitch(resolve(drafter), resolve(target))
    free = shutil.disk_usage(output.parent).free
    if plan.num_bytes + _SPARE_BYTES > free:
        raise CapacityError(
            f"--output {output} takes {plan.num_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free there:"
            " free some, or write to another disk",
            param="output",
        )
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        made = Path(scratch) / output.name
        made.mkdir()
        try:
            write_plan(plan, made, progress)
        except OSError as error:
            raise CapacityError(
                f"{output} cannot be written ({error.strerror or error}): free some space", param="output"
            ) from error
        read_headers(made)
        _put(made, output)
    return output


def _check(format_name: str, output: Path, dtype: str) -> None:
    for param, value, known in (("format", format_name, FORMATS), ("dtype", dtype, tuple(DTYPES))):
        if value not in known:
            raise ConfigError(f"--{param} is {value!r}, expected one of {', '.join(known)}", param=param)
    _check_output(output)


def _check_output(output: Path) -> None:
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}", param="output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already, expected a new or an empty folder", param="output")


def _load(method: str | None, folder: str, model: Target) -> None:
    """Load a checkpoint as the engine would; raises what the engine would raise."""
    pool = BlockPool(_POOL_BLOCKS, _BLOCK_SIZE)
    memory = TargetMemory(model, _POOL_BLOCKS * _BLOCK_SIZE)
    target = TargetInfo(model, pool, memory, model.config.max_position_embeddings)
    settings = {"method": method, "model": folder, "num_speculative_tokens": 1}
    registry.create(SpeculativeConfig.parse(settings), target)


def _export_target(name: str, checkpoint: Checkpoint) -> ExportTarget:
    """What files may need of the target; the name that the source states for it is kept."""
    folder = resolve(name)
    config, tensors = read_config(folder), load_tensors(folder)
    embedding = tensors["model.embed_tokens.weight"]
    classes = read_json(Path(folder) / "config.json").get("architectures")
    if not isinstance(classes, list) or not classes:
        classes = [f"{config.model_type.capitalize()}ForCausalLM"]
    table = checkpoint.config.get("speculators_config")
    stated = table.get("verifier") if isinstance(table, Mapping) else None
    known = stated.get("name_or_path") if isinstance(stated, Mapping) else None
    head = embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
    return ExportTarget(str(known or name), tuple(map(str, classes)), config, embedding, head)


def _num_tokens(checkpoint: Checkpoint, exporter: Exporter) -> int:
    """The N that the profile recommends, or the source's config, or the method."""
    if (profile := read_profile(Path(checkpoint.source))) is not None:
        return profile.num_speculative_tokens
    return stated_length(checkpoint.config, checkpoint.source) or exporter.default_tokens


def _write(folder: Path, written: Written, dtype: torch.dtype, profile: Path) -> None:
    folder.mkdir()
    tensors = {name: _cast(name, tensor, dtype) for name, tensor in written.tensors.items()}
    config = written.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise CapacityError(
            f"the tensors cannot be written ({' '.join(str(error).split())}): free some space"
        ) from error
    # The library makes its file readable by its owner only.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    if profile.is_file():
        shutil.copyfile(profile, folder / PROFILE)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In memory of its own, since the writer refuses tensors that share it."""
    if not tensor.is_floating_point():
        return tensor.clone()
    cast = tensor.to(dtype, copy=True).contiguous()
    if not all(torch.isfinite(edge) for edge in torch.aminmax(cast)):
        raise ConfigError(f"{name} overflows in {dtype}: take --dtype bfloat16", param="dtype")
    return cast


def _compare(source: object, found: object, format_name: str) -> None:
    """Raise LoadError naming the settings that did not come through."""
    if source == found:
        return
    ours, theirs = _flattened(source), _flattened(found)
    lost = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    raise LoadError(f"--format {format_name} does not keep {', '.join(lost) or 'the method'}: take another format")


def _flattened(value: object, prefix: str = "") -> dict[str, Any]:
    table = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(table, dict):
        return {prefix: table}
    parts = [_flattened(item, f"{prefix}.{key}" if prefix else key) for key, item in table.items()]
    return {key: item for part in parts for key, item in part.items()}


def _put(made: Path, output: Path) -> None:
    """Make the folder appear in one step; an empty one gives way."""
    if output.exists():
        output.rmdir()
    made.rename(output)
