"""Rows over a pool and its prefix cache, without a scheduler: what the cache's tests need of one, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from rowcast.scheduler.block_pool import BlockPool
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec, blocks_needed
from rowcast.scheduler.prefix_cache import PrefixCache


def spec(block_size: int = 16, *, window: int = 0, chunk: int = 0) -> KVGroupSpec:
    """A full group, unless a window or a chunk (tokens) is given."""
    kind = AttentionKind.FULL
    if window or chunk:
        kind = AttentionKind.SLIDING_WINDOW if window else AttentionKind.CHUNKED
    return KVGroupSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_dim=8,
        layers=(0,),
        kind=kind,
        window=window or chunk,
    )


ANY_GROUP = st.builds(
    lambda size, kind, window: spec(size, **({kind: window} if kind else {})),
    st.sampled_from([2, 4, 6]),
    st.sampled_from(["", "window", "chunk"]),
    st.integers(1, 20),
)


def tokens_of(*parts: tuple[int, int]) -> np.ndarray:
    """Concatenate runs of consecutive token ids, each (first id, how many). Example: (7, 2), (1, 1) -> [7, 8, 1]."""
    return np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in parts])


COMMON = tokens_of((1, 48))


def with_tail(first: int, count: int) -> np.ndarray:
    """48 common tokens and `count` of one's own."""
    return np.concatenate((COMMON, tokens_of((first, count))))


@dataclass
class Row:
    """One request: its tokens, its chain of hashes, the hit it was admitted with, a table per group."""

    tokens: np.ndarray
    hashes: list[bytes]
    hit: int
    tables: list[list[int]]
    num_published: int = field(default=0)  # links


class CachedRows:
    """Admits, grows, publishes and ends rows by the rules that a scheduler keeps."""

    def __init__(self, *groups: KVGroupSpec, usable: int) -> None:
        self.groups = groups
        self.pool = BlockPool(usable + 1)
        self.cache = PrefixCache(groups, self.pool)

    def hashes(self, tokens: np.ndarray, salt: str | None = None) -> list[bytes]:
        hashes: list[bytes] = []
        self.cache.extend(hashes, self.cache.root(salt), tokens)
        return hashes

    def hit(self, tokens: np.ndarray, salt: str | None = None) -> int:
        return self.cache.lookup(self.hashes(tokens, salt), len(tokens)).num_tokens

    def admit(self, tokens: np.ndarray, salt: str | None = None, *, resumed=False) -> Row | None:
        """Take the blocks of a whole prompt, hits before fresh ones; None, and nothing changed, if they do not fit."""
        hashes = self.hashes(tokens, salt)
        hit = self.cache.lookup(hashes, len(tokens))
        needed = sum(blocks_needed(len(tokens), s.block_size) for s in self.groups)
        fresh = needed - sum(len(ids) for ids in hit.block_ids)
        if not self.pool.can_allocate(fresh + self.pool.num_idle(hit.ids)):
            return None
        self.pool.touch(hit.ids)
        self.cache.record(len(tokens), hit.num_tokens, resumed)
        row = Row(tokens, hashes, hit.num_tokens, [ids.tolist() for ids in hit.block_ids])
        self._grow(row)
        return row

    def extend(self, row: Row, more: np.ndarray) -> None:
        row.tokens = np.concatenate((row.tokens, more))
        self.cache.extend(row.hashes, b"", row.tokens)
        self._grow(row)

    def _grow(self, row: Row) -> None:
        for table, s in zip(row.tables, self.groups, strict=True):
            missing = blocks_needed(len(row.tokens), s.block_size) - len(table)
            table += self.pool.allocate(missing).tolist()

    def publish(self, row: Row) -> Row:
        """Name every block that is full by now."""
        base = self.cache.base
        ends = range(row.num_published + 1, len(row.hashes) + 1)
        ids = np.zeros((len(self.groups), len(ends)), np.int32)
        for group, (table, s) in enumerate(zip(row.tables, self.groups, strict=True)):
            for place, end in enumerate(ends):
                if end * base % s.block_size == 0:
                    ids[group, place] = table[end * base // s.block_size - 1]
        self.cache.publish(row.hashes[row.num_published :], ids)
        row.num_published = len(row.hashes)
        return row

    def end(self, row: Row) -> None:
        """Free a row's blocks, deepest first, the groups side by side."""
        ended = [
            (-(place + 1) * s.block_size, group, block)
            for group, (table, s) in enumerate(zip(row.tables, self.groups, strict=True))
            for place, block in enumerate(table)
            if block
        ]
        self.pool.free(np.array([block for _, _, block in sorted(ended)], np.int32))

    def serve(self, tokens: np.ndarray, salt: str | None = None) -> int:
        """Admit, compute, publish and end a request; tell how many of its tokens were cached."""
        row = self.admit(tokens, salt)
        assert row is not None
        self.end(self.publish(row))
        return row.hit

    def keep(self, tokens: np.ndarray, *known: set[int]) -> np.ndarray:
        """Cache only the given blocks of a prompt, by place, in each group, and leave them idle.

        Returns: block ids [num_groups, links], 0 where none of that group was cached.
        """
        hashes = self.hashes(tokens)
        ids = np.zeros((len(self.groups), len(hashes)), np.int32)
        for group, places in enumerate(known):
            links = self.groups[group].block_size // self.cache.base
            for place in sorted(places):
                ids[group, (place + 1) * links - 1] = self.pool.allocate(1)[0]
        self.cache.publish(hashes, ids)
        self.pool.free(ids[ids > 0])
        return ids

    def refs(self, blocks: Sequence[int]) -> list[int]:
        return self.pool.ref_counts[list(blocks)].tolist()
