"""The prefix cache with its pool: names, hits, eviction. The scheduler's use of them is tested with the scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.block_pool import BlockPool
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.scheduler.prefix_cache import CacheStats, PrefixCache
from rowcast.tests.scheduler.cached_rows import CachedRows, Row, spec, tokens_of

COMMON = tokens_of((1, 48))


def with_tail(first: int, count: int) -> np.ndarray:
    """48 common tokens and `count` of one's own."""
    return np.concatenate((COMMON, tokens_of((first, count))))


# ------------------------------------------------------------ life of a block


def test_the_life_of_shared_blocks():
    """PC-01, ids and order. Nameless blocks are reused first, then never used ones, then the deepest cached."""
    rows = CachedRows(spec(16), usable=10)
    r0 = rows.publish(rows.admit(with_tail(100, 7)))
    assert r0.tables == [[1, 2, 3, 4]]
    assert [name is not None for name in rows.cache.names_of(np.arange(1, 5))] == [True] * 3 + [
        False
    ]
    r1 = rows.publish(rows.admit(with_tail(200, 5)))
    assert (r1.hit, r1.tables) == (48, [[1, 2, 3, 5]])
    assert rows.refs([1, 2, 3, 4, 5]) == [2, 2, 2, 1, 1]
    assert rows.pool.num_free == 5
    rows.end(r0)
    rows.end(r1)
    assert rows.pool.free_ids().tolist() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    r2 = rows.publish(rows.admit(with_tail(300, 6)))
    assert (r2.hit, r2.tables, rows.pool.num_free) == (48, [[1, 2, 3, 5]], 6)
    rows.end(r2)
    r3 = rows.admit(tokens_of((1000, 160)))
    assert r3.tables == [[5, 4, 6, 7, 8, 9, 10, 3, 2, 1]]
    assert (rows.pool.num_free, rows.cache.num_cached, rows.cache.num_evicted) == (0, 0, 3)


def test_only_full_blocks_are_published():
    """PC-02: a block with room for one more token would name tokens that are not there yet."""
    rows = CachedRows(spec(16), usable=10)
    row = rows.publish(rows.admit(with_tail(100, 7)))
    rows.extend(row, tokens_of((107, 4)))
    rows.publish(row)
    assert row.tables == [[1, 2, 3, 4]]
    assert rows.cache.names_of(np.array([4])) == [None]
    rows.extend(row, tokens_of((111, 19)))
    rows.publish(row)
    assert row.tables == [[1, 2, 3, 4, 5]]
    assert rows.cache.names_of(np.array([4, 5])) == [(0, row.hashes[3]), None]


def test_eviction_takes_the_least_recently_released_deepest_first():
    """PC-03, ids and order."""
    rows = CachedRows(spec(16), usable=10)
    r0 = rows.publish(rows.admit(tokens_of((1, 87))))
    r1 = rows.publish(rows.admit(tokens_of((500, 48))))
    assert rows.pool.num_free == 1
    rows.end(r0)
    assert rows.pool.free_ids().tolist() == [6, 10, 5, 4, 3, 2, 1]
    rows.end(r1)
    assert rows.pool.free_ids().tolist() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    r2 = rows.admit(tokens_of((1, 35)))
    assert (r2.hit, r2.tables, rows.pool.num_free) == (32, [[1, 2, 6]], 7)


def test_a_recycled_block_loses_its_name():
    """PC-05: the old tokens would be served from what another request wrote there since."""
    rows = CachedRows(spec(16), usable=1)
    old = tokens_of((1, 16))
    rows.serve(old)
    longer = np.concatenate((old, old))
    assert rows.hit(longer) == 16
    row = rows.admit(tokens_of((50, 15)))
    assert row.tables == [[1]]
    assert rows.cache.names_of(np.array([1])) == [None]
    assert rows.hit(longer) == 0


def test_a_failed_admission_leaves_no_trace():
    """PC-07: idle hits leave the free list too, so nine blocks of which six are cached need more than three."""
    rows = CachedRows(spec(16), usable=10)
    rows.publish(rows.admit(COMMON))
    twice = rows.publish(rows.admit(np.concatenate((COMMON, COMMON))))
    six = twice.tables[0]
    rows.end(twice)
    assert rows.refs(six) == [1, 1, 1, 0, 0, 0]
    assert rows.admit(tokens_of((900, 32))) is not None
    assert rows.pool.num_free == 5
    before = rows.pool.free_ids().tolist()
    thrice = np.concatenate((COMMON, COMMON, COMMON))
    assert rows.hit(thrice) == 96
    assert rows.admit(thrice) is None
    assert rows.refs(six) == [1, 1, 1, 0, 0, 0]
    assert rows.pool.free_ids().tolist() == before


@pytest.mark.parametrize(("usable", "fits"), [(4, True), (3, False)])
def test_a_matched_prefix_is_pinned_and_a_refused_one_is_not(usable, fits):
    """B11: the block just matched was evicted by the same allocation."""
    rows = CachedRows(spec(16), usable=usable)
    prefix = tokens_of((1, 32))
    rows.serve(prefix)
    free, refs = rows.pool.free_ids().tolist(), rows.pool.ref_counts.copy()
    row = rows.admit(np.concatenate((prefix, tokens_of((700, 32)))))
    if fits:
        assert row.tables == [[1, 2, 3, 4]]
        assert rows.pool.num_free == 0
    else:
        assert row is None
        assert rows.pool.free_ids().tolist() == free
        assert (rows.pool.ref_counts == refs).all()
        assert rows.hit(np.concatenate((prefix, prefix))) == 32


@pytest.mark.parametrize("deferred", [False, True])
def test_the_start_of_a_chain_outlives_its_continuation_in_every_group(deferred):
    """B09: with one group's blocks before the other's, the first group lost all and the hit was 0."""
    rows = CachedRows(spec(4), spec(4), usable=6)
    prompt = tokens_of((1, 12))
    row = rows.publish(rows.admit(prompt))
    assert row.tables == [[1, 2, 3], [4, 5, 6]]
    if deferred:  # someone else holds them until later: the order is that of the last release
        blocks = np.arange(1, 7, dtype=np.int32)
        rows.pool.touch(blocks)
        rows.end(row)
    rows.end(row)
    assert rows.pool.free_ids().tolist() == [3, 6, 2, 5, 1, 4]
    assert rows.pool.allocate(1).tolist() == [3]
    assert rows.pool.allocate(1).tolist() == [6]
    assert rows.hit(np.concatenate((prompt, prompt))) == 8


# ------------------------------------------------------------ what hits, and how far


def test_the_last_token_is_always_computed():
    """PC-04: zero tokens to run is an empty step that samples nothing."""
    rows = CachedRows(spec(16), usable=10)
    assert rows.serve(COMMON) == 0
    assert rows.serve(COMMON) == 32
    assert rows.serve(with_tail(100, 1)) == 48


def test_a_prompt_that_is_cached_whole():
    """B01: hits 16, 0, 32, 32, 0; the recomputed tail never goes into the shared block."""
    rows = CachedRows(spec(16), usable=10)
    prompt = tokens_of((1, 32))
    first = rows.publish(rows.admit(prompt))
    again = rows.publish(rows.admit(prompt))
    assert (first.hit, again.hit) == (0, 16)
    assert first.tables == [[1, 2]]
    assert again.tables == [[1, 3]]
    assert rows.cache.names_of(np.array([2, 3])) == [(0, first.hashes[1]), None]
    rows.end(first)
    rows.end(again)
    more = tokens_of((900, 16))
    assert rows.serve(prompt[:16]) == 0
    assert rows.serve(np.concatenate((prompt, more[:1]))) == 32
    assert rows.serve(np.concatenate((prompt, more))) == 32
    assert rows.serve(prompt[:15]) == 0


def test_prompts_that_part_inside_a_block():
    """PC-09: equal but for the 48th token."""
    rows = CachedRows(spec(16), usable=10)
    rows.serve(COMMON)
    other = COMMON.copy()
    other[47] = 999
    assert rows.hit(np.concatenate((other, COMMON))) == 32
    for size, hit in ((1, 5), (2, 4), (4, 4)):
        paged = CachedRows(spec(size), usable=20)
        paged.serve(tokens_of((1, 8)))
        assert paged.hit(np.concatenate((tokens_of((1, 5)), tokens_of((90, 5))))) == hit


def test_the_same_tokens_at_another_place_are_another_block():
    """PC-10: what a block's keys hold depends on everything before it."""
    rows = CachedRows(spec(4), usable=8)
    page = np.array([1, 2, 3, 4], np.int32)
    row = rows.publish(rows.admit(np.concatenate((page, page))))
    assert len(set(row.hashes)) == 2
    assert rows.cache.num_cached == 2
    other = np.array([9, 9, 9, 9, 1, 2, 3, 4, 5], np.int32)
    assert rows.hit(other) == 0
    assert rows.hit(np.concatenate((page, other))) == 4


@pytest.mark.parametrize(
    ("cached", "asked"),
    [
        ([65] * 4 + [1], [321] * 4 + [1]),  # equal in the low byte
        ([1, 23, 7, 7, 7], [12, 3, 7, 7, 7]),  # equal as concatenated digits
        ([0, 1, 0, 0, 0], [256, 0, 0, 0, 0]),  # equal after a slip of one byte
        ([1, 2, 3, 4, 5], [-1 % 2**31, 2, 3, 4, 5]),
    ],
)
def test_different_tokens_never_share(cached, asked):
    """B05: ids were cut to a byte, or run together, and another user's prompt was served."""
    rows = CachedRows(spec(4), usable=4)
    rows.serve(np.array(cached, np.int32))
    assert rows.hit(np.array(cached, np.int32)) == 4
    assert rows.hit(np.array(asked, np.int32)) == 0


def test_hashes_are_the_same_in_every_process():
    """B05: Python's own hash differs from process to process, so caches could never be compared."""
    code = (
        "import numpy as np;from rowcast.scheduler.block_pool import BlockPool;"
        "from rowcast.scheduler.prefix_cache import PrefixCache;"
        "from rowcast.tests.scheduler.cached_rows import spec;"
        "cache=PrefixCache([spec(4)],BlockPool(3));hashes=[];"
        "cache.extend(hashes,cache.root('salt','adapter'),np.arange(9,dtype=np.int32));"
        "print(hashes[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    salted = b"salt" + (4).to_bytes(8, "little") + b"salt"
    adapted = b"adapter" + (7).to_bytes(8, "little") + b"adapter"
    parent = sha256(b"rowcast prefix 1" + salted + adapted).digest()
    parent = sha256(parent + bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])).digest()
    parent = sha256(parent + bytes([4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0])).digest()
    assert outputs == {parent.hex() + "\n"}


def test_salts_and_adapters_share_nothing():
    """B06: salts a, b, a, none, "" in order, then an adapter of a salt's name."""
    rows = CachedRows(spec(16), usable=20)
    prompt = tokens_of((1, 33))
    assert [rows.serve(prompt, salt) for salt in ("a", "b", "a", None, "")] == [0, 0, 32, 0, 32]
    root = rows.cache.root
    assert root(None) == root("") == root("", "")
    roots = [
        root(None), root("a"), root(None, "a"), root("a", "a"), root("aadapter"), root("ab", "c"),
        root("a", "bc"), root("\ud800"), root("salt"), root(None, "salt"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_a_salt_isolates():
    """PC-12."""
    rows = CachedRows(spec(16), usable=20)
    rows.serve(with_tail(100, 11), "salt1")
    other = with_tail(200, 11)
    assert [rows.hit(other, salt) for salt in ("salt1", "salt2", None)] == [48, 0, 0]


def test_what_was_in_flight_past_the_end_is_not_cached():
    """PC-16: of 6 tokens the last has no keys yet, so the next prompt may hit 5."""
    rows = CachedRows(spec(1), usable=10)
    row = rows.admit(tokens_of((1, 5)))  # 4 of the prompt, 1 output that was run
    rows.end(rows.publish(row))
    assert rows.hit(tokens_of((1, 7))) == 5


def test_pages_of_several_tokens_come_back_whole():
    """PC-19: page 4, 4 pages; blocks are pages, so ids are page numbers and nothing can straddle one."""
    rows = CachedRows(spec(4), usable=4)
    rows.serve(tokens_of((1, 8)))
    held = [rows.admit(tokens_of((100, 4))), rows.admit(tokens_of((200, 4)))]
    assert [row.tables for row in held] == [[[3]], [[4]]]
    assert rows.cache.num_cached == 2
    a, b = rows.pool.allocate(1), rows.pool.allocate(1)
    assert [a.tolist(), b.tolist()] == [[2], [1]]
    assert (rows.pool.num_free, rows.cache.num_cached) == (0, 0)


# ------------------------------------------------------------ groups


def kept(rows: CachedRows, tokens: np.ndarray, *known: set[int]) -> np.ndarray:
    """Cache only the given blocks of a prompt, by place, in each group; tell block ids [group, link]."""
    hashes = rows.hashes(tokens)
    ids = np.zeros((len(rows.groups), len(hashes)), np.int32)
    for group, places in enumerate(known):
        size = rows.groups[group].block_size // rows.cache.base
        for place in sorted(places):
            ids[group, (place + 1) * size - 1] = rows.pool.allocate(1)[0]
    rows.cache.publish(hashes, ids)
    rows.pool.free(ids[ids > 0])
    return ids


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
    kept(rows, COMMON, *({0, 1, 2} - gone for gone in dropped))
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
    ids = kept(rows, prompt, set(range(6)), known)
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
    kept(rows, tokens_of((1, 112)), {0, 1, 2}, {0, 1, 2, 3, 4})
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
    kept(rows, prompt, {1, 2, 7, 8, 9, 10, 15, 16}, {7, 8, 9, 10, 13, 14, 15, 16, 19})
    found = rows.cache.lookup(rows.hashes(prompt), len(prompt))
    assert found.num_tokens == 17 * 16
    assert [np.flatnonzero(ids).tolist() for ids in found.block_ids] == [[15, 16], [13, 14, 15, 16]]


def test_a_chunk_needs_only_its_own_blocks():
    """What lies in an earlier chunk is seen by no later token, so it is neither asked for nor held."""
    rows = CachedRows(spec(4), spec(4, chunk=8), usable=40)
    prompt = tokens_of((1, 25))
    full = set(range(6))
    ids = kept(rows, prompt, full, {2})
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


# ------------------------------------------------------------ naming and forgetting


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
    kept(rows, prompt, {0}, {0})
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


# ------------------------------------------------------------ reset and statistics


def test_reset():
    """PC-18: refused while anyone holds a block, then complete."""
    rows = CachedRows(spec(16), usable=10)
    r0 = rows.publish(rows.admit(with_tail(100, 7)))
    r1 = rows.publish(rows.admit(with_tail(200, 5)))
    assert rows.pool.num_free == 5
    assert not rows.cache.reset()
    assert rows.cache.names_of(np.array([1, 2, 3])) == [(0, name) for name in r0.hashes]
    rows.end(r0)
    assert not rows.cache.reset()
    rows.end(r1)
    assert rows.cache.reset()
    assert rows.cache.names_of(np.arange(11)) == [None] * 11
    assert (rows.cache.num_cached, rows.cache.num_evicted) == (0, 0)
    assert rows.pool.free_ids().tolist() == list(range(1, 11))
    row = rows.publish(rows.admit(with_tail(100, 7)))
    assert row.hit == 0
    rows.end(row)
    assert rows.hit(with_tail(100, 7)) == 48


def test_statistics_count_admissions_not_attempts():
    """PC-17: a refused attempt counts nothing; a resumed request counts apart."""
    rows = CachedRows(spec(16), usable=4)
    rows.end(rows.publish(rows.admit(tokens_of((1, 32)))))
    rows.cache.stats.requests = rows.cache.stats.queries = 0
    blocker = rows.pool.allocate(2)
    prompt = tokens_of((1, 48))
    assert rows.hit(prompt) == 32
    assert rows.admit(prompt) is None
    assert rows.cache.stats == CacheStats()
    rows.pool.free(blocker)
    row = rows.admit(prompt)
    assert rows.cache.stats == CacheStats(requests=1, queries=48, hits=32)
    rows.end(rows.publish(row))
    assert rows.admit(np.concatenate((prompt, prompt[:1])), resumed=True).hit == 48
    assert rows.cache.stats == CacheStats(requests=1, queries=48, hits=32)
    assert rows.cache.resumed_stats == CacheStats(requests=1, queries=49, hits=48)


def test_hashing_rows_is_hashing_each():
    """The steady path hashes one block of many rows; a prompt's blocks come one after the other: the same names."""
    cache = PrefixCache([spec(4)], BlockPool(3))
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 2**31 - 1, (5, 12)).astype(np.int32)
    roots = [cache.root(f"salt {i}") for i in range(5)]
    chains = [[] for _ in range(5)]
    for row, chain in enumerate(chains):
        cache.extend(chain, roots[row], tokens[row, :11])  # two full blocks
        assert len(chain) == 2
        cache.extend(chain, roots[row], tokens[row])  # goes on where it stopped
    parents = roots
    for link in range(3):
        parents = cache.extend_rows(parents, tokens[:, 4 * link : 4 * link + 4])
        assert parents == [chain[link] for chain in chains]
    assert cache.extend_rows([], np.zeros((0, 4), np.int32)) == []


# ------------------------------------------------------------ against plain loops


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


GROUP = st.builds(
    lambda size, kind, window: spec(size, **({kind: window} if kind else {})),
    st.sampled_from([2, 4, 6]),
    st.sampled_from(["", "window", "chunk"]),
    st.integers(1, 20),
)


@settings(deadline=None)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=4),
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
    ids = kept(rows, prompt, *({p for p in of if rng.random() >= missing} for of in places))
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


@settings(deadline=None)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=3),
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
