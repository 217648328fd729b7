"""Data parallel training under torchrun: joining the other processes, and adding up. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from outrider.errors import BackendError


@contextmanager
def joined() -> Iterator[None]:
    """Within it this process belongs to the group that torchrun started, if it did."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This one's number among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def add_up(tensors: Sequence[Tensor]) -> None:
    """Sum over processes, in place."""
    if world() > 1:
        with _together():
            for tensor in tensors:
                dist.all_reduce(tensor)


def wait() -> None:
    """Go on when every process is here."""
    if world() > 1:
        with _together():
            dist.barrier()


@contextmanager
def _together() -> Iterator[None]:
    """Whoever waits for a process that has ended learns it at once, and says so in one line."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BackendError(
            f"process {rank()} of {world()} lost another one ({reason}), whose own message says why; the same command"
            " goes on from what was kept"
        ) from error
