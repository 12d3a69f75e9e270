"""The pool: each block in one hand, the null block in none."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.block_pool import BlockPool


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_every_block_but_the_null_block_is_handed_out_once():
    """Block 0 fills unused table cells; a request that owned it would be overwritten by padding."""
    pool = BlockPool(11)
    ids = np.concatenate([pool.allocate(3), pool.allocate(7)])
    assert sorted(ids.tolist()) == list(range(1, 11))
    assert pool.num_free == 0
    assert not pool.can_allocate(1)
    assert pool.can_allocate(0)


def test_asking_changes_nothing_and_taking_too_much_is_a_fault():
    pool = BlockPool(5)
    assert pool.can_allocate(4)
    assert not pool.can_allocate(5)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="asked for 5 blocks, 4 are free"):
        pool.allocate(5)
    assert pool.free_ids().tolist() == [1, 2, 3, 4]


def test_nameless_blocks_are_reused_before_those_never_used():
    """What came back last is reused first: nobody can want its content, and its memory is warm."""
    pool = BlockPool(6)
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    pool.free(i32(3, 1))
    assert pool.free_ids().tolist() == [3, 1, 5]
    assert pool.allocate(2).tolist() == [3, 1]
    pool.free(i32(4))
    assert pool.free_ids().tolist() == [4, 5]


def test_a_block_named_twice_comes_back_once():
    """B07: the free counter outgrew the list, and the pool handed one block out twice."""
    pool = BlockPool(16)
    block = pool.allocate(1)
    pool.ref_counts[block] += 1
    pool.free(np.concatenate([block, block]))
    assert pool.num_free == 15
    assert sorted(pool.allocate(15).tolist()) == list(range(1, 16))


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(16)
    block = pool.allocate(1)
    pool.ref_counts[block] += 1
    pool.free(block)
    assert pool.num_free == 14
    pool.free(block)
    assert pool.num_free == 15


@pytest.mark.parametrize("mentions", [1, 2])
def test_freeing_more_than_is_held_is_a_fault_that_changes_nothing(mentions):
    """B07: a count below zero means a block in two hands."""
    pool = BlockPool(4)
    held = pool.allocate(1)
    counts = pool.ref_counts.copy()
    wrong = i32(2) if mentions == 1 else np.concatenate([held, held])
    with pytest.raises(AssertionError, match="freed more often than held"):
        pool.free(wrong)
    assert (pool.ref_counts == counts).all()
    assert pool.num_free == 2


def test_the_null_block_cannot_be_freed():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="null block"):
        pool.free(i32(0))


def test_random_use_neither_loses_nor_doubles_a_block():
    rng = np.random.default_rng(7)
    pool, held = BlockPool(38), []
    for _ in range(3000):
        count = int(rng.integers(0, 9))
        if pool.can_allocate(count) and rng.random() < 0.5:
            held.append(pool.allocate(count))
        elif held:
            pool.free(held.pop(int(rng.integers(len(held)))))
        out = np.concatenate([*held, pool.free_ids()])
        assert sorted(out.tolist()) == list(range(1, 38))
        assert (pool.ref_counts > 0).sum() == sum(len(ids) for ids in held)


def test_a_pool_without_room_for_one_block_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)
