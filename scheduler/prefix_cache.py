"""Which blocks hold the keys and values of a prefix that was computed before, in every KV group.

Owns the names of blocks, not the blocks (`block_pool.py`). A prefix is cut into links of `base` tokens (the greatest
common divisor of the groups' block sizes). Link i has a chain hash that depends on everything before it:

    h[-1] = root(cache_salt, adapter)
    h[i]  = sha256(h[i - 1] + tokens of link i as little-endian int32)

A group's block that ends where link i ends is known by (group, h[i]). One dict maps a hash to a key, small arrays map a
key to the groups' blocks: hashing and looking up cost the same for one group and for six. sha256 stands in for a
comparison of the tokens themselves: nobody can make two prefixes collide.

A hash has a key as long as one group's block is known under it. A block loses its name when the pool reuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import repeat

import numpy as np

from .block_pool import BlockPool
from .kv_groups import (
    AttentionKind,
    KVGroupSpec,
    base_block_size,
    first_needed_block,
    hit_alignment,
)

_ENCODING = b"rowcast prefix 1"  # a change of what is hashed, or how, changes this


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A prefix that every group can serve: num_tokens, a multiple of every block size.

    block_ids: per group [num_tokens / block_size] int32; 0 for blocks left of the window, which nobody reads.
    """

    num_tokens: int
    block_ids: tuple[np.ndarray, ...]

    @property
    def ids(self) -> np.ndarray:
        """The blocks themselves, all distinct: [n] int32."""
        ids = np.concatenate(self.block_ids)
        return ids[ids > 0]


@dataclass(kw_only=True, slots=True)
class CacheStats:
    """What admissions asked of the cache: requests; queries, the tokens they brought; hits, the tokens it had."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


class PrefixCache:
    """Names for the blocks of one pool. `base` and `alignment` are tokens.

    stats counts first admissions; resumed_stats those of preempted requests, which mostly find themselves.
    """

    def __init__(self, groups: Sequence[KVGroupSpec], pool: BlockPool) -> None:
        self.base = base_block_size(groups)
        self.alignment = hit_alignment(groups)
        self.stats = CacheStats()
        self.resumed_stats = CacheStats()
        self.num_evicted = 0
        self._groups = tuple(groups)
        self._pool = pool
        pool.on_reuse = self._forget
        num_blocks = pool.usable + 1
        self._key_of_hash: dict[bytes, int] = {}
        self._hash_of_key: list[bytes] = [b""] * num_blocks
        self._free_keys = list(range(pool.usable, 0, -1))  # key 0 is "unknown": no block
        self._block_of_key = np.zeros((len(groups), num_blocks), np.int32)
        self._key_of_block = np.zeros(num_blocks, np.int32)
        self._group_of_block = np.zeros(num_blocks, np.int32)
        # Groups that see alike are asked together; whole prefixes first, since those only shorten a hit once.
        alike: dict[tuple[bool, int, int, AttentionKind], list[int]] = {}
        for group, spec in enumerate(groups):
            windowed = spec.kind is not AttentionKind.FULL
            alike.setdefault((windowed, spec.block_size, spec.window, spec.kind), []).append(group)
        self._full = [members for (windowed, *_), members in alike.items() if not windowed]
        self._windowed = [members for (windowed, *_), members in alike.items() if windowed]

    @property
    def num_cached(self) -> int:
        """Count the blocks that have a name."""
        return int(np.count_nonzero(self._key_of_block))

    # ------------------------------------------------------------ hashing

    def root(self, cache_salt: str | None, adapter: str | None = None) -> bytes:
        """Hash what else makes keys and values differ. Prefixes under different roots share nothing.

        Each value goes in with its kind and its length in UTF-8 bytes (8 bytes, little-endian), so that salt "a" is not
        adapter "a", and no two pairs run into the same bytes. None and "" are the same: not given.
        """
        encoded = [_ENCODING]
        for kind, value in ((b"salt", cache_salt), (b"adapter", adapter)):
            if value:
                text = value.encode(errors="surrogatepass")
                encoded += [kind, len(text).to_bytes(8, "little"), text]
        return sha256(b"".join(encoded)).digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: np.ndarray) -> None:
        """Append the chain hashes of all full links of `tokens` that `hashes` lacks.

        Shapes: tokens [num_tokens] int32, from position 0.
        Example: base 16, 33 tokens, no hashes -> two.
        """
        size, first = self.base * 4, len(hashes)
        data = tokens[first * self.base :].astype("<i4", copy=False).tobytes()
        parent = hashes[-1] if hashes else root
        for start in range(0, len(data) - size + 1, size):
            parent = sha256(parent + data[start : start + size]).digest()
            hashes.append(parent)

    def extend_rows(self, parents: Sequence[bytes], tokens: np.ndarray) -> list[bytes]:
        """Hash one more link for each of n chains. Shapes: parents [n]; tokens [n, base] int32; returns [n]."""
        size = self.base * 4
        data = tokens.astype("<i4", copy=False).tobytes()
        starts = range(0, len(data), size)
        return [
            sha256(parent + data[start : start + size]).digest()
            for parent, start in zip(parents, starts, strict=True)
        ]

    # ------------------------------------------------------------ asking

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> Hit:
        """Find the longest prefix that every group still holds, leaving at least one of num_tokens to compute.

        Changes nothing: touch the hit's blocks before any are allocated.
        """
        hit = min(num_tokens - 1, len(hashes) * self.base) // self.alignment * self.alignment
        for members in self._full:
            hit = self._served(members, hashes, hit)
        agreed, turn = 0, 0
        while hit and agreed < len(self._windowed):
            served = self._served(self._windowed[turn % len(self._windowed)], hashes, hit)
            if served < hit:  # everyone must hold the shorter prefix too, this one included
                hit, agreed = served, 0
            else:
                agreed, turn = agreed + 1, turn + 1
        return Hit(
            num_tokens=hit,
            block_ids=tuple(self._blocks(group, hashes, hit) for group in range(len(self._groups))),
        )

    def _served(self, members: list[int], hashes: Sequence[bytes], hit: int) -> int:
        """Tell the longest prefix up to `hit` that groups which see alike may hold: `hit` itself if they hold it.

        The leftmost block that is missing decides: every shorter prefix that reaches beyond it needs it too. Asking
        from the left, in growing steps, makes a miss at the start of a long prompt cheap, and a miss of a window skip
        the rest of the window.
        """
        spec = self._groups[members[0]]
        first, end = first_needed_block(spec, hit), hit // spec.block_size
        step = 1
        while first < end:
            stop = min(first + step, end)
            keys = self._keys(spec, hashes, first, stop)
            known = self._block_of_key[np.array(members)[:, None], keys].all(axis=0)
            if not known.all():
                missing = first + int(known.argmin())
                return missing * spec.block_size // self.alignment * self.alignment
            first, step = stop, step * 8
        return hit

    def _keys(
        self, spec: KVGroupSpec, hashes: Sequence[bytes], first: int, stop: int
    ) -> np.ndarray:
        """Look up the keys of a group's blocks first .. stop; 0 for unknown ones."""
        links = spec.block_size // self.base
        names = hashes[(first + 1) * links - 1 : stop * links : links]
        return np.array(list(map(self._key_of_hash.get, names, repeat(0))), np.int32)

    def _blocks(self, group: int, hashes: Sequence[bytes], hit: int) -> np.ndarray:
        spec = self._groups[group]
        first, end = first_needed_block(spec, hit), hit // spec.block_size
        ids = np.zeros(end, np.int32)
        ids[first:] = self._block_of_key[group, self._keys(spec, hashes, first, end)]
        return ids

    def record(self, num_tokens: int, hit: int, resumed: bool) -> None:
        """Count an admission, not an attempt: a request of num_tokens of which `hit` were cached."""
        stats = self.resumed_stats if resumed else self.stats
        stats.requests += 1
        stats.queries += num_tokens
        stats.hits += hit

    # ------------------------------------------------------------ naming

    def publish(self, hashes: Sequence[bytes], block_ids: np.ndarray) -> None:
        """Name blocks that are computed and still held. The first block of a name stays; a duplicate is nameless.

        Shapes: hashes [n]; block_ids [num_groups, n] int32, the block of each group that ends where that link ends, or
        0 for none.
        """
        some = block_ids.any(axis=0)
        if not some.all():
            hashes = [hashes[i] for i in np.flatnonzero(some).tolist()]
            block_ids = block_ids[:, some]
        n = len(hashes)
        if not n:
            return
        for h, column in zip(hashes, block_ids.T.tolist(), strict=True):
            key = self._key_of_hash.get(h)
            if key is None:
                if not any(b and not self._pool.named[b] for b in column):
                    continue
                key = self._free_keys.pop()
                self._key_of_hash[h] = key
                self._hash_of_key[key] = h
            for group, block in enumerate(column):
                if block and not self._block_of_key[group, key] and not self._pool.named[block]:
                    self._block_of_key[group, key] = block
                    self._key_of_block[block] = key
                    self._group_of_block[block] = group
                    self._pool.named[block] = True

    def reset(self) -> bool:
        """Forget every name. False, and nothing changed, while any block is referenced."""
        if self._pool.num_free < self._pool.usable:
            return False
        self._pool.drop_names()
        self._key_of_hash.clear()
        self._hash_of_key = [b""] * len(self._hash_of_key)
        self._free_keys = list(range(self._pool.usable, 0, -1))
        self._block_of_key[:] = 0
        self._key_of_block[:] = 0
        return True

    def names_of(self, ids: np.ndarray) -> list[tuple[int, bytes] | None]:
        """Tell each block's name, (group, hash), or None. For tests and explanations."""
        return [
            (int(self._group_of_block[block]), self._hash_of_key[self._key_of_block[block]])
            if self._key_of_block[block]
            else None
            for block in ids.tolist()
        ]

    def _forget(self, ids: np.ndarray) -> None:
        """Drop the names of blocks that are being reused, and each hash that no group's block is known by any more."""
        keys = self._key_of_block[ids]
        self._block_of_key[self._group_of_block[ids], keys] = 0
        self._key_of_block[ids] = 0
        self.num_evicted += len(ids)
        gone = keys[~self._block_of_key[:, keys].any(axis=0)]
        for key in set(gone.tolist()):
            del self._key_of_hash[self._hash_of_key[key]]
            self._hash_of_key[key] = b""
            self._free_keys.append(key)
