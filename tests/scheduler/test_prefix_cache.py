"""The prefix cache with its pool: the life of a block, what hits, reset and statistics."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from rowcast.scheduler.block_pool import BlockPool
from rowcast.scheduler.prefix_cache import CacheStats, PrefixCache
from rowcast.tests.scheduler.cached_rows import COMMON, CachedRows, spec, tokens_of, with_tail

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
        links = [row.tobytes() for row in tokens[:, 4 * link : 4 * link + 4]]
        parents = cache.extend_each(parents, links)
        assert parents == [chain[link] for chain in chains]
    assert cache.extend_each([], []) == []
