"""The pool: each block in one hand, the null block in none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


@pytest.mark.parametrize("named", [True, False])
def test_what_a_repeated_mention_does_not_disturb(named):
    """B07: the order of first mention holds, and blocks that others still hold stay out."""
    pool = BlockPool(8)
    pool.allocate(7)
    pool.names[1:] = named
    pool.ref_counts[[2, 5, 6]] = 2
    pool.free(i32(5, 3, 2, 5, 6, 1))
    assert pool.free_ids().tolist() == [5, 3, 1]
    assert pool.num_free == 3
    assert pool.ref_counts.tolist() == [0, 0, 1, 0, 1, 0, 1, 1]


def test_named_blocks_are_reused_last_and_least_recent_first():
    pool = BlockPool(8)
    pool.allocate(6)
    reused: list[int] = []
    pool.on_reuse = lambda ids: reused.extend(ids.tolist())
    pool.names[[1, 3, 5]] = 9, 8, 7
    pool.free(i32(3, 2, 1))
    pool.free(i32(5, 4))
    assert pool.free_ids().tolist() == [4, 2, 7, 3, 1, 5]
    assert pool.allocate(5).tolist() == [4, 2, 7, 3, 1]
    assert reused == [3, 1]
    assert pool.names.tolist() == [0, 0, 0, 0, 0, 7, 0, 0]


def test_a_touched_block_leaves_the_line_and_joins_it_again_at_the_end():
    pool = BlockPool(5)
    pool.allocate(4)
    pool.names[1:] = 1
    pool.free(i32(1, 2, 3))
    assert pool.num_idle(i32(0, 2, 2, 4)) == 1
    pool.touch(i32(2, 4))
    assert (pool.num_free, pool.num_idle(i32(2, 4))) == (2, 0)
    assert pool.free_ids().tolist() == [1, 3]
    assert pool.ref_counts.tolist() == [0, 0, 1, 0, 2]
    pool.free(i32(4, 2))
    assert pool.free_ids().tolist() == [1, 3, 2]
    assert pool.allocate(3).tolist() == [1, 3, 2]


def test_a_block_without_a_name_cannot_be_shared_once_it_is_free():
    pool = BlockPool(5)
    with pytest.raises(AssertionError, match="no content to share"):
        pool.touch(i32(1))
    assert pool.num_free == 4


def test_a_pool_whose_blocks_nobody_names():
    """PC-08: block 4, usable 4: 10 tokens take 3 blocks, then 16 take all 4 and nothing more fits."""
    pool = BlockPool(5)
    pool.free(pool.allocate(3)[::-1])
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]
    assert not pool.can_allocate(1)


def test_names_are_dropped_only_while_nobody_holds_a_block():
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.names[held] = 1
    with pytest.raises(AssertionError, match="2 blocks are still referenced"):
        pool.drop_names()
    pool.free(held)
    pool.drop_names()
    assert not pool.names.any()
    assert pool.free_ids().tolist() == [1, 2, 3, 4]


class NaivePool:
    """The same by lists, slow and plain."""

    def __init__(self, usable: int) -> None:
        self.nameless = list(range(1, usable + 1))  # next first
        self.named: list[int] = []  # next first
        self.refs = [0] * (usable + 1)
        self.names: set[int] = set()
        self.reused: list[int] = []

    def allocate(self, count: int) -> list[int]:
        taken = (self.nameless + self.named)[:count]
        self.reused += taken[len(self.nameless) :]
        for block in taken:
            (self.named if block in self.names else self.nameless).remove(block)
            self.names.discard(block)
            self.refs[block] = 1
        return taken

    def free(self, ids: list[int]) -> None:
        for block in ids:
            self.refs[block] -= 1
        idle = [block for block in dict.fromkeys(ids) if not self.refs[block]]
        self.nameless = [b for b in idle if b not in self.names] + self.nameless
        self.named += [b for b in idle if b in self.names]

    def touch(self, ids: list[int]) -> None:
        for block in ids:
            if not self.refs[block]:
                self.named.remove(block)
            self.refs[block] += 1


@settings(deadline=None)
@given(usable=st.integers(1, 24), data=st.data())
def test_the_pool_is_what_two_lists_would_be(usable, data):
    """Order of reuse, counts and names after every operation; no block twice, none lost."""
    pool, naive = BlockPool(usable + 1), NaivePool(usable)
    reused: list[int] = []
    pool.on_reuse = lambda ids: reused.extend(ids.tolist())
    held: list[int] = []  # one entry a reference
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "free", "name", "touch"]))
        if action == "allocate":
            count = data.draw(st.integers(0, usable))
            assert pool.can_allocate(count) == (count <= usable - len(set(held)))
            if pool.can_allocate(count):
                ids = pool.allocate(count).tolist()
                assert ids == naive.allocate(count)
                assert not set(ids) & {0, *held}
                held += ids
        elif action == "free":
            ids = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
            pool.free(i32(*ids))
            naive.free(ids)
            for block in ids:
                held.remove(block)
        elif action == "name" and held:
            ids = sorted(data.draw(st.sets(st.sampled_from(held))))
            pool.names[ids] = 1
            naive.names.update(ids)
        elif action == "touch" and naive.names:
            ids = sorted(data.draw(st.sets(st.sampled_from(sorted(naive.names)))))
            assert pool.num_idle(i32(0, *ids, *ids)) == len(set(ids) - set(held))
            pool.touch(i32(*ids))
            naive.touch(ids)
            held += ids
        free = pool.free_ids().tolist()
        assert free == naive.nameless + naive.named
        assert pool.num_free == len(free) == usable - len(set(held))
        assert pool.ref_counts.tolist() == naive.refs
        assert set(np.flatnonzero(pool.names).tolist()) == naive.names
        assert reused == naive.reused


def test_a_pool_without_room_for_one_block_is_refused():
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)
