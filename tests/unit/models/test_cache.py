"""The block pool's promises one by one, and block hashes; random calls are in tests/property/test_pool.py."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.models.cache import BlockPool, block_hashes


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        BlockPool(0, 16)


def test_blocks_are_handed_out_once_and_all_or_none() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate(3)
    assert first is not None
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    second = pool.allocate(1)
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None


def test_new_handing_out_is_a_new_generation_and_a_match_is_not() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a")
    before = int(pool.generation[block])
    pool.release([block])
    assert pool.match([b"a"]) == [block]
    assert pool.generation[block] == before
    pool.release([block])
    pool.allocate(2)
    assert pool.generation[block] == before + 1


def test_a_released_block_is_found_until_it_is_needed() -> None:
    pool = BlockPool(2, 16)
    one, two = pool.allocate(2) or []
    pool.publish(one, b"a")
    pool.release([one, two])
    assert pool.num_free == 2
    assert pool.allocate(1) == [two], "what nobody can find again goes first"
    assert pool.match([b"a"]) == [one]
    pool.release([one])
    assert pool.allocate(1) == [one]
    assert pool.match([b"a"]) == []


def test_the_longest_unused_prefix_goes_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4, 16)
    old = pool.allocate(2) or []
    new = pool.allocate(2) or []
    for block, key in zip(old + new, (b"a", b"b", b"c", b"d"), strict=True):
        pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert len(pool.match([b"a", b"b"])) == 1
    assert len(pool.match([b"c", b"d"])) == 2


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(3) or []
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    assert pool.match([b"a", b"x", b"c"]) == blocks[:1]
    assert pool.match([b"x", b"a"]) == []
    assert pool.match([]) == []


def test_a_shared_block_is_free_only_after_its_last_user() -> None:
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1) or []
    pool.publish(blocks[0], b"a")
    assert pool.match([b"a"]) == blocks
    pool.release(blocks)
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == 1


def test_releasing_too_often_is_a_programming_error() -> None:
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_the_first_block_of_a_content_stays_the_known_one() -> None:
    pool = BlockPool(2, 16)
    one, two = pool.allocate(2) or []
    pool.publish(one, b"a")
    pool.publish(two, b"a")
    pool.publish(one, b"b")
    assert pool.match([b"a"]) == [one]
    assert pool.match([b"b"]) == []


def test_hashes_name_a_block_by_all_that_stands_before_it() -> None:
    text = tokens(*range(40))
    hashes = block_hashes(text, 16, count=2)
    assert len(hashes) == len(set(hashes)) == 2
    assert block_hashes(text[:33], 16, count=2) == hashes
    other = text.copy()
    other[3] += 1
    assert [a == b for a, b in zip(block_hashes(other, 16, count=2), hashes, strict=True)] == [False, False]
    other = text.copy()
    other[20] += 1
    assert [a == b for a, b in zip(block_hashes(other, 16, count=2), hashes, strict=True)] == [True, False]
    # Equal blocks after different beginnings are different blocks.
    twice = np.concatenate([text[:16], text[:16]])
    first, second = block_hashes(twice, 16, count=2)
    assert first != second


def test_known_hashes_are_kept_and_continued() -> None:
    text = tokens(*range(64))
    whole = block_hashes(text, 16, count=4)
    assert block_hashes(text, 16, whole[:2], count=4) == whole
    assert block_hashes(text, 16, whole, count=4) == whole
    assert block_hashes(text, 16, count=0) == []
