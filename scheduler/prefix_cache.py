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
from itertools import compress, repeat
from operator import add, ne

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """Groups that see alike: one spec but for the layers. They are asked together. groups [n] int64, ascending."""

    spec: KVGroupSpec
    groups: np.ndarray


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
        self._pool = pool
        pool.on_reuse = self._forget
        self._num_groups = len(groups)
        self._offsets = np.arange(len(groups))[:, None]
        self._key_of_hash: dict[bytes, int] = {}
        self._hash_of_key = np.full(1 + 2 * pool.usable, None, object)
        # Key 0 is "unknown" and has no block. Every other key in use has a named block, and publish offers keys for
        # about as many blocks before it knows which hashes are new: twice the blocks is nearly always enough.
        self._free_keys: list[int] = []
        self._next_key = 1
        self._block_of_cell = np.zeros((1 + 2 * pool.usable) * len(groups), np.int32)
        alike: dict[tuple[AttentionKind, int, int], list[int]] = {}
        for group, spec in enumerate(groups):
            alike.setdefault((spec.kind, spec.window, spec.block_size), []).append(group)
        views = [
            _View(spec=groups[members[0]], groups=np.array(members)) for members in alike.values()
        ]
        views.sort(key=lambda view: view.spec.kind is not AttentionKind.FULL)
        self._views = views  # those of the whole prefix first
        self._num_full = sum(view.spec.kind is AttentionKind.FULL for view in views)
        # The link that ends the first block of the first of those: mostly nobody knows it, and so no prefix at all.
        self._first_link = views[0].spec.block_size // self.base - 1
        self._nothing_found = [np.zeros(0, np.intp) for _ in views]
        nothing = np.zeros(0, np.int32)
        self._no_hit = Hit(num_tokens=0, block_ids=tuple(nothing for _ in groups))

    @property
    def num_cached(self) -> int:
        """Count the blocks that have a name."""
        return int(np.count_nonzero(self._pool.names))

    @property
    def num_hashes(self) -> int:
        """Count the hashes that are remembered: at most one for each block that has a name."""
        return len(self._key_of_hash)

    @property
    def num_keys(self) -> int:
        """Count the keys that were ever made, in use or to be used again: what the tables grow with."""
        return self._next_key - 1

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
        parent = hashes[-1] if hashes else root
        end = len(tokens) // self.base * self.base
        for link in self._links(tokens[len(hashes) * self.base : end]):
            parent = sha256(parent + link).digest()
            hashes.append(parent)

    def extend_each(self, parents: Sequence[bytes], links: Sequence[bytes]) -> list[bytes]:
        """Hash one more link for each of n chains. Shapes: all [n]; a link is base little-endian int32."""
        return [sha256(data).digest() for data in map(add, parents, links)]

    def _links(self, tokens: np.ndarray) -> list[bytes]:
        """Cut tokens into the bytes of links, each base little-endian int32."""
        return np.ascontiguousarray(tokens, "<i4").reshape(-1).view(f"V{4 * self.base}").tolist()

    # ------------------------------------------------------------ asking

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> Hit:
        """Find the longest prefix that every group still holds, leaving at least one of num_tokens to compute.

        Changes nothing: touch the hit's blocks before any are allocated.
        """
        hit = min(num_tokens - 1, len(hashes) * self.base) // self.alignment * self.alignment
        if not hit or (self._num_full and hashes[self._first_link] not in self._key_of_hash):
            return self._no_hit
        keys = self._nothing_found.copy()
        for place in range(self._num_full):
            hit, keys[place] = self._served(self._views[place], hashes, hit)
        num_windowed = len(self._views) - self._num_full
        agreed = turn = 0
        while hit and agreed < num_windowed:
            place = self._num_full + turn % num_windowed
            served, keys[place] = self._served(self._views[place], hashes, hit)
            if served < hit:  # every window has to hold the shorter prefix, this one included
                hit, agreed = served, 0
            else:
                agreed, turn = agreed + 1, turn + 1
        if not hit:
            return self._no_hit
        block_ids = list(self._no_hit.block_ids)
        for view, found in zip(self._views, keys, strict=True):
            first, end = first_needed_block(view.spec, hit), hit // view.spec.block_size
            ids = np.zeros((len(view.groups), end), np.int32)
            ids[:, first:] = self._blocks(view, found[: end - first])
            for group, row in zip(view.groups.tolist(), ids, strict=True):
                block_ids[group] = row
        return Hit(num_tokens=hit, block_ids=tuple(block_ids))

    def _served(self, view: _View, hashes: Sequence[bytes], hit: int) -> tuple[int, np.ndarray]:
        """Find the longest prefix, up to `hit` tokens, that a view's groups may hold: `hit` itself if they hold it.

        The leftmost missing block decides, for every shorter prefix that reaches beyond it needs it too. Asking from
        the left, in growing strides, makes a miss at the start cheap, and lets a window skip what lies right of it.

        Returns: tokens, and the keys of the needed blocks from the first on, at least as far as that.
        """
        size = view.spec.block_size
        links = size // self.base
        start, end = first_needed_block(view.spec, hit), hit // size
        keys, stride = [], 8
        while start < end:
            asked = hashes[(start + 1) * links - 1 : min(start + stride, end) * links : links]
            known = 0
            if asked[0] in self._key_of_hash:
                keys.append(np.array(list(map(self._key_of_hash.get, asked, repeat(0)))))
                blocks = self._blocks(view, keys[-1])
                known = len(asked)
                if np.count_nonzero(blocks) < blocks.size:
                    known = int(blocks.all(axis=0).argmin())
            start += known
            if known < len(asked):
                hit = start * size // self.alignment * self.alignment
                break
            stride *= 8
        return hit, np.concatenate(keys) if keys else self._nothing_found[0]

    def _blocks(self, view: _View, keys: np.ndarray) -> np.ndarray:
        """Read the blocks that a view's groups have under `keys`: [groups of the view, len(keys)], 0 for none."""
        return self._block_of_cell[keys * self._num_groups + view.groups[:, None]]

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
        ids = block_ids.astype(np.intp)
        complete = np.count_nonzero(ids) == ids.size
        if not complete:
            some = ids.any(axis=0)
            hashes, ids = [hashes[i] for i in np.flatnonzero(some).tolist()], ids[:, some]
        if not hashes:
            return
        lacking = len(hashes) - len(self._free_keys)
        if lacking > 0:
            self._make_keys(lacking)
        offered = self._free_keys[-len(hashes) :]
        keys = list(map(self._key_of_hash.setdefault, hashes, offered))
        if keys == offered:
            del self._free_keys[-len(hashes) :]
        else:
            self._free_keys[-len(hashes) :] = compress(offered, map(ne, keys, offered))
        at = np.array(keys, np.intp)
        self._hash_of_key[at] = hashes
        cells = at * self._num_groups + self._offsets
        if complete and keys == offered:
            self._name(cells, ids)
        else:
            vacant = (ids > 0) & (self._block_of_cell[cells] == 0)
            cells, ids = cells[vacant], ids[vacant]
            # Of two blocks with one name the first keeps it: marked last, it is the one found there.
            place = np.arange(len(cells), dtype=np.int32)
            self._block_of_cell[cells[::-1]] = place[::-1]
            first = self._block_of_cell[cells] == place
            self._name(cells[first], ids[first])

    def _make_keys(self, count: int) -> None:
        self._free_keys += range(self._next_key, self._next_key + count)
        self._next_key += count
        lacking = self._next_key - len(self._hash_of_key)
        if lacking > 0:
            self._hash_of_key = np.concatenate((self._hash_of_key, np.full(lacking, None, object)))
            more = np.zeros(lacking * self._num_groups, np.int32)
            self._block_of_cell = np.concatenate((self._block_of_cell, more))

    def _name(self, cells: np.ndarray, ids: np.ndarray) -> None:
        """Know blocks by cells: all distinct, the blocks held and nameless."""
        pool = self._pool
        assert np.count_nonzero(pool.names[ids]) == 0, "a block cannot be known by two names"
        assert np.count_nonzero(pool.ref_counts[ids]) == ids.size, "a free block cannot get a name"
        self._block_of_cell[cells] = ids
        pool.names[ids] = cells

    def reset(self) -> bool:
        """Forget every name. False, and nothing changed, while any block is referenced."""
        if self._pool.num_free < self._pool.usable:
            return False
        self._pool.drop_names()
        self._key_of_hash.clear()
        self._hash_of_key[:] = None
        self._free_keys = []
        self._next_key = 1
        self._block_of_cell[:] = 0
        return True

    def names_of(self, ids: np.ndarray) -> list[tuple[int, bytes] | None]:
        """Tell each block's name, (group, hash), or None. For tests and explanations."""
        hashes: list[bytes] = self._hash_of_key.tolist()
        return [
            (cell % self._num_groups, hashes[cell // self._num_groups]) if cell else None
            for cell in self._pool.names[ids].tolist()
        ]

    def _forget(self, ids: np.ndarray) -> None:
        """Forget blocks that are being reused, and each hash by which no group's block is known any more."""
        cells = self._pool.names[ids].astype(np.intp)
        self._block_of_cell[cells] = 0
        self.num_evicted += len(ids)
        keys = cells // self._num_groups
        if self._num_groups > 1:
            left = self._block_of_cell.reshape(-1, self._num_groups)[keys].any(axis=1)
            keys = keys[~left]
        gone = list(dict.fromkeys(keys.tolist()))
        for name in self._hash_of_key[gone]:
            del self._key_of_hash[name]
        self._hash_of_key[gone] = None
        self._free_keys += gone
