"""Hits in several KV groups: what every group can serve, at one length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.tests.scheduler.cached_rows import (
    ANY_GROUP,
    COMMON,
    CachedRows,
    spec,
    tokens_of,
    with_tail,
)


def test_tables_of_a_full_and_two_window_groups():
    """H-01, ids and all: a window's table keeps its width, with the null block where nobody reads."""
    rows = CachedRows(spec(16), spec(16, window=32), spec(16, window=32), usable=20)
    r0 = rows.publish(rows.admit(with_tail(100, 7)))
    assert r0.tables == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    r1 = rows.admit(with_tail(200, 5))
    assert r1.hit == 48
    assert r1.tables == [[1, 2, 3, 13], [0, 6, 7, 14], [0, 10, 11, 15]]
    assert rows.refs([1, 2, 3, 6, 7, 10, 11]) == [2] * 7
    assert rows.refs([4, 5, 8, 9, 12, 13, 14, 15]) == [1] * 8
    assert rows.pool.num_free == 5
    h = r0.hashes
    assert rows.cache.names_of(np.array([1, 5, 9, 2])) == [
        (0, h[0]),
        (1, h[0]),
        (2, h[0]),
        (0, h[1]),
    ]


@pytest.mark.parametrize(
    ("dropped", "blocks"),
    [
        ((set(), {0}, {0}), 3),
        (({0}, set(), set()), 0),
        (({2}, {2}, {2}), 2),
        (({2}, set(), set()), 2),
        ((set(), {2}, set()), 2),
        ((set(), set(), {2}), 2),
        (({2}, {0}, {0}), 0),
    ],
)
def test_a_hit_is_what_every_group_can_honour(dropped, blocks):
    """H-02: one full group, two of window 32; the last line hit 2 where the windows held only blocks 1 and 2."""
    rows = CachedRows(spec(16), spec(16, window=32), spec(16, window=32), usable=20)
    rows.keep(COMMON, *({0, 1, 2} - gone for gone in dropped))
    hit = rows.cache.lookup(rows.hashes(with_tail(200, 5)), 53)
    assert hit.num_tokens == blocks * 16
    assert [len(ids) for ids in hit.block_ids] == [blocks] * 3


@pytest.mark.parametrize(
    ("known", "hit", "places"),
    [
        ({4, 5}, 24, [None, None, None, None, 4, 5]),
        ({5}, 0, []),
        ({2, 3}, 16, [None, None, 2, 3]),
        ({0, 1, 2}, 12, [None, 1, 2]),
    ],
)
def test_the_longest_prefix_that_all_groups_can_serve(known, hit, places):
    """B13: block 4, window 8, prompt 25, the full group has everything."""
    rows = CachedRows(spec(4), spec(4, window=8), usable=20)
    prompt = tokens_of((1, 25))
    ids = rows.keep(prompt, set(range(6)), known)
    found = rows.cache.lookup(rows.hashes(prompt), 25)
    assert found.num_tokens == hit
    assert found.block_ids[0].tolist() == ids[0, : hit // 4].tolist()
    assert found.block_ids[1].tolist() == [0 if p is None else ids[1, p] for p in places]


@pytest.mark.parametrize(("length", "hit"), [(100, 96), (90, 0), (97, 96), (96, 0), (200, 192)])
def test_block_sizes_of_which_neither_divides_the_other(length, hit):
    """B13: 32 and 48 meet at 96 only."""
    rows = CachedRows(spec(32), spec(48), usable=20)
    assert (rows.cache.base, rows.cache.alignment) == (16, 96)
    prompt = tokens_of((1, 200))
    assert rows.serve(prompt) == 0
    found = rows.cache.lookup(rows.hashes(prompt[:length]), length)
    assert found.num_tokens == hit
    assert [len(ids) for ids in found.block_ids] == [hit // 32, hit // 48]


def test_a_window_group_of_smaller_blocks():
    """H-10: full block 32, window block 16, window 32: 4 and 7 blocks; hits are multiples of 32."""
    groups = spec(32), spec(16, window=32)
    rows = CachedRows(*groups, usable=30)
    row = rows.publish(rows.admit(tokens_of((1, 112))))
    assert [len(table) for table in row.tables] == [4, 7]
    found = rows.cache.lookup(rows.hashes(tokens_of((1, 113))), 113)
    assert found.num_tokens == 96
    assert [ids.tolist() for ids in found.block_ids] == [
        row.tables[0][:3],
        [0, 0, 0, 0, *row.tables[1][4:6]],
    ]
    assert rows.hit(tokens_of((1, 97))) == 96
    rows = CachedRows(*groups, usable=30)
    rows.keep(tokens_of((1, 112)), {0, 1, 2}, {0, 1, 2, 3, 4})
    found = rows.cache.lookup(rows.hashes(tokens_of((1, 113))), 113)
    assert (found.num_tokens, [len(ids) for ids in found.block_ids]) == (64, [2, 4])


def test_every_full_block_is_published():
    """H-15: also a window's block that ends at no common multiple yet, since the prompt may go on."""
    rows = CachedRows(spec(32), spec(16, window=16), usable=30)
    row = rows.publish(rows.admit(tokens_of((1, 112))))
    assert all(rows.cache.names_of(np.array(row.tables[1])))
    rows.extend(row, tokens_of((113, 16)))
    rows.end(rows.publish(row))
    assert rows.hit(tokens_of((1, 130))) == 128


W2, W4 = spec(16, window=32), spec(16, window=64)


@pytest.mark.parametrize(
    "groups",
    [
        (spec(16), W2),
        (W2, W4),
        (spec(16), W2, W2),
        (spec(16), W2, W4),
        (spec(16), spec(16), W2),
        (spec(16), W2, spec(16), W4),
    ],
    ids=["f+w2", "w2+w4", "f+w2+w2", "f+w2+w4", "f+f+w2", "f,w2,f,w4"],
)
def test_mixes_of_groups(groups):
    """H-11: 48 shared tokens are 48 cached ones in every mix, also without a full group."""
    rows = CachedRows(*groups, usable=40)
    r0 = rows.publish(rows.admit(with_tail(100, 7)))
    r1 = rows.admit(with_tail(200, 5))
    assert (r0.hit, r1.hit) == (0, 48)
    assert len(r1.tables) == len(groups)
    for s, mine, theirs in zip(groups, r1.tables, r0.tables, strict=True):
        assert mine[:3] == ([0, *theirs[1:3]] if s is W2 else theirs[:3])
        assert mine[3] not in theirs


def test_windows_alone_hit_the_longest_of_several_runs():
    """H-11: without a full group nothing need be cached from the start."""
    rows = CachedRows(W2, W4, usable=80)
    prompt = tokens_of((1, 16 * 20 + 1))
    rows.keep(prompt, {1, 2, 7, 8, 9, 10, 15, 16}, {7, 8, 9, 10, 13, 14, 15, 16, 19})
    found = rows.cache.lookup(rows.hashes(prompt), len(prompt))
    assert found.num_tokens == 17 * 16
    assert [np.flatnonzero(ids).tolist() for ids in found.block_ids] == [[15, 16], [13, 14, 15, 16]]


def test_a_chunk_needs_only_its_own_blocks():
    """What lies in an earlier chunk is seen by no later token, so it is neither asked for nor held."""
    rows = CachedRows(spec(4), spec(4, chunk=8), usable=40)
    prompt = tokens_of((1, 25))
    full = set(range(6))
    ids = rows.keep(prompt, full, {2})
    assert rows.hit(prompt) == 24  # the chunk starts there: it needs nothing
    found = rows.cache.lookup(rows.hashes(prompt), 24)
    assert found.num_tokens == 16  # 20 would need block 4
    assert found.block_ids[1].tolist() == [0, 0, 0, 0]
    found = rows.cache.lookup(rows.hashes(prompt), 15)
    assert found.num_tokens == 12
    assert found.block_ids[1].tolist() == [0, 0, ids[1, 2]]


@pytest.mark.parametrize("num_groups", [2, 3])
def test_no_block_is_handed_out_twice(num_groups):
    """H-12: hits at the head of the free list were taken as fresh blocks by the same admission."""
    rows = CachedRows(*[spec(16)] * num_groups, usable=30)
    prompt = tokens_of((1, 80))
    rows.serve(prompt)
    rows.pool.allocate(30 - 5 * num_groups)  # the cached ones are all that is left
    assert rows.pool.num_free == 5 * num_groups
    assert rows.admit(np.concatenate((prompt, prompt[:16]))) is None
    rows = CachedRows(*[spec(16)] * num_groups, usable=30)
    rows.serve(prompt)
    for _ in range(3):  # admitted, preempted, admitted again
        row = rows.admit(np.concatenate((prompt, tokens_of((500, 80 if num_groups == 3 else 160)))))
        assert row.hit == 80
        used = [block for table in row.tables for block in table]
        assert len(set(used)) == len(used)
        assert rows.refs(used) == [1] * len(used)
        rows.end(row)
        assert rows.pool.num_free == 30


def test_idle_hits_count_against_the_free_blocks():
    """H-06: 40 tokens of block 2 with 10 idle cached blocks take 20; with 5 of them never taken, 15."""
    for window, idle in ((0, 10), (11, 5)):
        rows = CachedRows(spec(2, window=window), usable=40)
        prompt = tokens_of((1, 40))
        rows.serve(prompt[:20])
        hit = rows.cache.lookup(rows.hashes(prompt), 40)
        assert hit.num_tokens == 20
        assert rows.pool.num_idle(hit.ids) == idle
        free = rows.pool.num_free
        row = rows.admit(prompt)
        assert free - rows.pool.num_free == idle + 10
        assert len(row.tables[0]) == 20
    rows = CachedRows(spec(2), usable=40)
    rows.serve(tokens_of((1, 2)))
    hit = rows.cache.lookup(rows.hashes(tokens_of((1, 3))), 3)
    assert rows.pool.num_idle(hit.ids) + 1 == 2
    assert len(rows.admit(tokens_of((1, 3))).tables[0]) == 2


def naive_hit(known: set[tuple[int, bytes]], groups, hashes, base: int, num_tokens: int) -> int:
    """The longest length at which every group knows every block that a later token can see."""
    for hit in range(num_tokens - 1, 0, -1):
        if all(hit % group.block_size == 0 for group in groups) and all(
            (place, hashes[(block + 1) * group.block_size // base - 1]) in known
            for place, group in enumerate(groups)
            for block in range(hit // group.block_size)
            if _sees(group, hit, (block + 1) * group.block_size - 1)
        ):
            return hit
    return 0


def _sees(group: KVGroupSpec, position: int, key: int) -> bool:
    if group.kind is AttentionKind.CHUNKED:
        return key // group.window == position // group.window
    return group.kind is AttentionKind.FULL or key > position - group.window


@settings(deadline=None)
@given(
    groups=st.lists(ANY_GROUP, min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    missing=st.floats(0, 0.6),
    num_tokens=st.integers(1, 90),
)
def test_a_lookup_finds_what_trying_every_length_finds(groups, seed, missing, num_tokens):
    """Any mix of groups, any blocks missing. The hit names the right block wherever a token looks, 0 elsewhere."""
    rng = np.random.default_rng(seed)
    rows = CachedRows(*groups, usable=200)
    prompt = tokens_of((1, num_tokens))
    places = [range(num_tokens // group.block_size) for group in groups]
    ids = rows.keep(prompt, *({p for p in of if rng.random() >= missing} for of in places))
    hashes, base = rows.hashes(prompt), rows.cache.base
    known = {(group, hashes[link]) for group, link in zip(*np.nonzero(ids), strict=True)}
    found = rows.cache.lookup(hashes, num_tokens)
    assert found.num_tokens == naive_hit(known, groups, hashes, base, num_tokens)
    for place, (group, blocks) in enumerate(zip(groups, found.block_ids, strict=True)):
        links = group.block_size // base
        assert blocks.tolist() == [
            ids[place, end * links - 1]
            if _sees(group, found.num_tokens, end * group.block_size - 1)
            else 0
            for end in range(1, found.num_tokens // group.block_size + 1)
        ]
