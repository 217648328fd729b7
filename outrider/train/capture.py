"""What the target's forward gives a drafter to learn from: hidden states of chosen layers for every token of a corpus.

States are captured shard by shard, a shard being a few dozen conversations of the shuffled corpus. Where a folder is
given each shard is kept as one safetensors file, written whole and then renamed, so a run that was cut short (or ran
out of disk) goes on where it stopped, and a training can start on what is there. Without a folder every pass runs the
target again. Not here: what a drafter makes of the states. Legend: T tokens of a shard, K taps, D target width.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import CapacityError, ConfigError, LoadError
from outrider.models.attention import Batch
from outrider.models.fingerprint import fingerprint
from outrider.models.target import Target
from outrider.train.corpus import Sample

_ROWS = 2048
"""Rows of one target forward."""
_BLOCK = 16
_MANIFEST = "capture.json"
_SPARE_BYTES = 1 << 30
"""Disk that a capture leaves free for checkpoints and everybody else."""


@dataclass(frozen=True)
class Shard:
    """Some conversations with their states. ids [T] int64, is_response [T] bool, taps [T, K, D] in ascending order.

    `starts` has one entry more than there are conversations: c's tokens are starts[c]:starts[c+1].
    """

    ids: Tensor
    is_response: Tensor
    taps: Tensor
    starts: tuple[int, ...]


class Capture:
    """The states of a corpus, shard by shard, from disk where they are kept and from the target where they are not.

    `taps` count layers that have run (0 the embedding, the last one the state before the final norm). A folder made
    for another target, corpus or set of taps is refused with ConfigError naming what differs, except that more taps
    than asked for are fine: the ones asked for are picked.
    """

    def __init__(
        self,
        model: Target,
        samples: Sequence[Sample],
        taps: Sequence[int],
        folder: Path | None = None,
        *,
        shard_len: int = 64,
    ) -> None:
        self._model, self._samples, self._folder, self._shard_len = model, samples, folder, shard_len
        self.taps = tuple(sorted(set(taps)))
        self._kept = self.taps
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(sample.ids.tobytes())
        self.corpus_digest = digest.hexdigest()
        if folder is not None:
            self._kept = _agree(folder, self._description())
        self._picked = [self._kept.index(layer) for layer in self.taps]

    def __len__(self) -> int:
        """How many shards there are."""
        return -(-len(self._samples) // self._shard_len)

    def shard(self, index: int) -> Shard:
        """One shard. Cost: a read, or a target forward over its tokens (and a write, where a folder is given)."""
        path = self._path(index)
        samples = self._samples[index * self._shard_len : (index + 1) * self._shard_len]
        starts = torch.tensor(np.cumsum([0, *(len(sample.ids) for sample in samples)]))
        ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]))
        if path is not None and path.is_file():
            taps = _read(path, starts)
        else:
            taps = torch.cat(list(_forward(self._model, samples, self._kept)))
            if path is not None:
                _write(path, {"ids": ids, "starts": starts, "taps": taps})
        if len(self._picked) < len(self._kept):
            taps = taps[:, self._picked]
        is_response = torch.from_numpy(np.concatenate([sample.is_response for sample in samples]))
        return Shard(ids.long(), is_response, taps, tuple(starts.tolist()))

    def missing(self) -> list[int]:
        """Shards that are not on disk."""
        return [index for index in range(len(self)) if (path := self._path(index)) is None or not path.is_file()]

    def bytes_needed(self) -> int:
        """Disk that the missing shards will take."""
        size = len(self._kept) * self._model.config.hidden_size * self._model.embedding.element_size() + 4
        first = [index * self._shard_len for index in self.missing()]
        return size * sum(len(sample.ids) for i in first for sample in self._samples[i : i + self._shard_len])

    def check_disk(self) -> None:
        """Raise CapacityError if the missing shards do not fit on the folder's disk."""
        if self._folder is None:
            return
        free, needed = shutil.disk_usage(self._folder).free, self.bytes_needed()
        if needed + _SPARE_BYTES > free:
            raise CapacityError(
                f"{self._folder}: the states of this corpus take {needed / 1e9:.1f} GB and 1 GB must stay free, the"
                f" disk has {free / 1e9:.1f} GB: give another folder, fewer conversations, or capture online"
            )

    def _path(self, index: int) -> Path | None:
        return None if self._folder is None else self._folder / f"shard-{index:05d}.safetensors"

    def _description(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus_digest,
            "target": fingerprint(self._model),
            "dtype": str(self._model.embedding.dtype).removeprefix("torch."),
            "conversations_per_shard": self._shard_len,
            "taps": list(self.taps),
        }


def _agree(folder: Path, ours: Mapping[str, Any]) -> tuple[int, ...]:
    """Write what the folder is for, or hold it against what it was for; the taps that are kept in it."""
    path = folder / _MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            part = path.with_suffix(f".part{os.getpid()}")
            part.write_text(json.dumps(ours, indent=1) + "\n")
            os.replace(part, path)
            return tuple(ours["taps"])
        theirs = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: {error}") from error
    for key, value in ours.items():
        given = theirs.get(key)
        same = set(value) <= set(given or []) if key == "taps" else given == value
        if not same:
            raise ConfigError(
                f"{folder} holds states of another {key} ({_short(given)}, this run has {_short(value)}): give another"
                " folder",
                param="capture",
            )
    return tuple(theirs["taps"])


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12] + "…"


def _read(path: Path, starts: Tensor) -> Tensor:
    """The states of a shard of conversations that begin there."""
    try:
        tensors = load_file(path)
        taps, theirs = tensors["taps"], tensors["starts"]
    except (SafetensorError, OSError, KeyError) as error:
        raise LoadError(f"{path}: cannot be read ({error}): delete it, it will be captured again") from error
    if not torch.equal(theirs, starts):
        raise ConfigError(
            f"{path.parent} holds states of another corpus (conversations begin elsewhere): give another folder",
            param="capture",
        )
    return taps


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Processes that train together, and runs that share a folder, may write the same shard at once.
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        save_file(dict(tensors), part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise CapacityError(f"{path}: cannot be written ({error}); what was captured before is kept") from error
    finally:
        part.unlink(missing_ok=True)


def _forward(model: Target, samples: Sequence[Sample], taps: Sequence[int]) -> Iterator[Tensor]:
    """The states [rows, K, D] of these conversations, one forward's rows at a time, in order."""
    for group in _groups([len(sample.ids) for sample in samples]):
        lengths = [len(samples[i].ids) for i in group]
        ends = np.cumsum([-(-length // _BLOCK) for length in lengths])
        blocks = [list(range(end - -(-length // _BLOCK), end)) for end, length in zip(ends, lengths, strict=True)]
        ids = np.concatenate([samples[i].ids for i in group]).astype(np.int64)
        nothing: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        batch = Batch.pack(ids, [(0, length) for length in lengths], blocks, nothing, _BLOCK, model.device)
        states = model(batch, model.new_cache(int(ends[-1]) * _BLOCK), taps).taps
        yield torch.stack(states, dim=1).cpu()


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive conversations whose rows fit in one forward; a longer one goes alone."""
    group: list[int] = []
    rows = 0
    for index, length in enumerate(lengths):
        if group and rows + length > _ROWS:
            yield group
            group, rows = [], 0
        group.append(index)
        rows += length
    if group:
        yield group
