"""Who gets a name, who loses it, and that nothing is left of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.tests.scheduler.cached_rows import (
    ANY_GROUP,
    COMMON,
    CachedRows,
    Row,
    spec,
    tokens_of,
    with_tail,
)


def test_the_first_publisher_wins():
    """PC-14: two identical prompts in flight at once compute twice; one is shared from then on."""
    rows = CachedRows(spec(16), spec(16, window=16), usable=20)
    one, two = rows.admit(COMMON), rows.admit(COMMON)
    rows.publish(one)
    rows.publish(two)
    assert rows.cache.names_of(np.array(two.tables[0] + two.tables[1])) == [None] * 6
    assert rows.admit(with_tail(100, 1)).tables[0][:3] == one.tables[0]
    assert rows.cache.num_cached == 6


def test_of_two_in_one_step_the_first_is_named():
    rows = CachedRows(spec(16), spec(16), usable=20)
    one, two, other = rows.admit(COMMON[:16]), rows.admit(COMMON[:16]), rows.admit(with_tail(9, 1))
    ids = np.array([[row.tables[g][0] for row in (one, two, other)] for g in (0, 1)], np.int32)
    rows.cache.publish([one.hashes[0], two.hashes[0], other.hashes[1]], ids)
    assert rows.cache.names_of(ids[0]) == [(0, one.hashes[0]), None, (0, other.hashes[1])]
    assert rows.cache.names_of(ids[1]) == [(1, one.hashes[0]), None, (1, other.hashes[1])]


def test_publishing_again_what_was_hit_changes_nothing():
    rows = CachedRows(spec(16), usable=20)
    rows.publish(rows.admit(COMMON))
    row = rows.admit(with_tail(100, 16))
    for _ in range(2):
        row.num_published = 0
        rows.publish(row)
        assert rows.cache.names_of(np.array(row.tables[0])) == [(0, name) for name in row.hashes]


def test_a_hash_is_forgotten_with_the_block_of_its_last_group():
    """One hash names a block in each group; an index that kept it, or dropped it early, leaks or misses."""
    rows = CachedRows(spec(16), spec(16, window=16), usable=2)
    prompt = tokens_of((1, 17))
    hashes = rows.hashes(prompt)
    rows.keep(prompt, {0}, {0})
    assert rows.hit(prompt) == 16
    first = rows.pool.allocate(1)
    assert rows.hit(prompt) == 0
    assert (rows.cache.num_cached, rows.cache.num_hashes) == (1, 1)
    rows.cache.publish(hashes, np.array([first, [0]], np.int32))  # computed again, in that group
    rows.pool.free(first)
    assert rows.hit(prompt) == 16
    rows.pool.allocate(2)
    assert (rows.cache.num_cached, rows.cache.num_hashes, rows.cache.num_evicted) == (0, 0, 3)


def test_nothing_is_left_of_what_was_evicted():
    """L03: 2,000 different prompts, each computed twice at once, through 12 blocks leave 12 names at most."""
    rows = CachedRows(spec(4), spec(4, window=8), usable=12)
    for first in range(2000):
        both = [rows.admit(tokens_of((first, 4 + first % 8))) for _ in range(2)]
        for row in both:
            rows.end(rows.publish(row))
        assert rows.cache.num_hashes <= rows.cache.num_cached <= 12
        assert rows.cache.num_keys <= 24
    assert rows.cache.num_evicted > 2000
    assert rows.cache.reset()
    assert (rows.cache.num_hashes, rows.cache.num_cached) == (0, 0)


def test_more_hashes_at_once_than_the_pool_has_blocks():
    """Rows that share a prefix may publish it all together: 40 columns for the same two blocks."""
    rows = CachedRows(spec(4), usable=3)
    row = rows.admit(tokens_of((1, 8)))
    ids = np.array([row.tables[0] * 20], np.int32)
    rows.cache.publish(row.hashes * 20, ids)
    assert rows.cache.names_of(ids[0, :2]) == [(0, name) for name in row.hashes]
    rows.end(row)
    rows.serve(tokens_of((50, 12)))
    assert rows.cache.num_cached == 3


@pytest.mark.parametrize(("held", "message"), [(True, "two names"), (False, "free block")])
def test_a_block_gets_one_name_and_only_while_it_is_held(held, message):
    """Either would let one request read what another one wrote."""
    rows = CachedRows(spec(4), usable=3)
    row = rows.admit(tokens_of((1, 4)))
    if held:
        rows.publish(row)
    else:
        rows.end(row)
    with pytest.raises(AssertionError, match=message):
        rows.cache.publish(rows.hashes(tokens_of((9, 4))), np.array(row.tables, np.int32))


@settings(deadline=None)
@given(
    groups=st.lists(ANY_GROUP, min_size=1, max_size=3),
    usable=st.integers(8, 40),
    data=st.data(),
)
def test_names_are_those_that_a_dict_would_hold(groups, usable, data):
    """Any order of admitting, publishing and ending: the first block of a name has it until it is reused."""
    rows = CachedRows(*groups, usable=usable)
    known: dict[tuple[int, bytes], int] = {}
    live: list[Row] = []
    for _ in range(data.draw(st.integers(1, 15))):
        action = data.draw(st.sampled_from(["admit", "admit", "publish", "end"]))
        if action == "admit":
            # of two first tokens and three lengths, so that prefixes meet
            first, count = data.draw(st.tuples(st.integers(1, 2), st.sampled_from([7, 12, 24])))
            held = rows.pool.ref_counts > 0
            row = rows.admit(tokens_of((first, count)))
            if row is not None:
                live.append(row)
                taken = set(np.flatnonzero((rows.pool.ref_counts > 0) & ~held).tolist())
                fresh = taken - _hit_of(row, rows)
                known = {name: block for name, block in known.items() if block not in fresh}
        elif live and action == "publish":
            row = data.draw(st.sampled_from(live))
            done = row.num_published
            rows.publish(row)
            for end in range(done + 1, len(row.hashes) + 1):
                for place, group in enumerate(rows.groups):
                    if end * rows.cache.base % group.block_size == 0:
                        block = row.tables[place][end * rows.cache.base // group.block_size - 1]
                        if block:
                            known.setdefault((place, row.hashes[end - 1]), block)
        elif live:
            rows.end(live.pop(data.draw(st.integers(0, len(live) - 1))))
        named = rows.cache.names_of(np.arange(usable + 1))
        assert {name: block for block, name in enumerate(named) if name} == known
        assert rows.cache.num_cached == len(known)
        assert rows.cache.num_hashes == len({name for _, name in known})


def _hit_of(row: Row, rows: CachedRows) -> set[int]:
    """The blocks that a row was admitted with."""
    return {
        block
        for table, group in zip(row.tables, rows.groups, strict=True)
        for block in table[: row.hit // group.block_size]
        if block
    }
