"""The paged cache's bookkeeping: which blocks are whose, which hold a shared prefix, which can be taken.

One pool serves the target and every drafter: their tensors differ, their block tables are the same. A block is shared
only when it is full and committed, so nothing is ever copied on write, and rolling back is a change of length. Tensors
live in attention.LayerCache; who gets blocks when is the scheduler's business.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from outrider.errors import ConfigError


class BlockPool:
    """Hands out blocks, counts their users, and keeps freed ones findable by content until they are needed again.

    `generation[block]` rises each time a block is handed out for new content: whoever keeps rows of its own under the
    same tables can tell whether they are still of that content. `on_free` hears of each block that loses its last user.
    All calls are O(blocks asked for).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the cache has {num_blocks} blocks, expected at least 1: raise kv_cache_tokens")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.generation = np.zeros(num_blocks, dtype=np.int64)
        self.on_free: list[Callable[[int], None]] = []
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Free blocks, the longest unused first; those with a hash can still be matched.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for new content, or None (and take nothing) when there are not that many."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.generation[block] += 1
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; the ones that nobody else uses become free, tail first, so prefixes live longest."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} released more often than taken"
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                for tell in self.on_free:
                    tell(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of these block hashes; each gains a user."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            self._free.pop(block, None)
            self._users[block] += 1
            found.append(block)
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full, committed block by its content. The first block of a content stays the known one."""
        if self._hash_of[block] is None and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            del self._block_of[key]
            self._hash_of[block] = None


def block_hashes(
    tokens: npt.NDArray[np.int64], block_size: int, known: Sequence[bytes] = (), *, count: int
) -> list[bytes]:
    """Hashes of the first `count` full blocks, each chained to its prefix; `known` ones are kept as they are.

    128 bits of blake2b: two different prefixes never meet in practice, whoever chose the text.
    """
    hashes = list(known)
    for index in range(len(hashes), count):
        parent = hashes[-1] if hashes else b""
        part = tokens[index * block_size : (index + 1) * block_size]
        hashes.append(hashlib.blake2b(parent + part.tobytes(), digest_size=16).digest())
    return hashes
