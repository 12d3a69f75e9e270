"""Which blocks become known to the prefix cache, and under which names: those that a settled step filled.

Owns the moment and the chain of hashes of each row; the names are `prefix_cache.py`'s. A request's hashes may run ahead
of what is computed (its prompt's are made when it asks for a hit) and it keeps them when it is preempted, so that it
finds its own blocks again.
"""

from __future__ import annotations

import numpy as np

from .prefix_cache import PrefixCache
from .request import Request, RequestTable
from .row_blocks import RowBlocks, cells_of


class Publisher:
    """Names what rows compute. Each row's chain is its request's own list, with its length and end beside it."""

    def __init__(self, cache: PrefixCache, blocks: RowBlocks, table: RequestTable) -> None:
        self._cache = cache
        self._blocks = blocks
        self._table = table
        self._num_hashes = np.zeros(len(table.live), np.int32)
        self._chains: list[list[bytes]] = [[] for _ in table.live]
        self._tips: list[bytes] = [b""] * len(table.live)

    def seat(self, row: int, request: Request) -> None:
        """Take up the chain of a request that gets a row."""
        hashes = request.hashes
        self._chains[row] = hashes
        self._tips[row] = hashes[-1] if hashes else request.chain_root
        self._num_hashes[row] = len(hashes)

    def publish_rows(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Name the blocks that rows filled with their tokens starts .. ends, which have just settled.

        Shapes: rows intp, starts, ends [n]. Publish before a window returns any of them.
        """
        base = self._cache.base
        lasts = ends // base
        counts = lasts - starts // base
        filled = np.flatnonzero(counts)
        if not len(filled):
            return
        rows, lasts, counts = rows[filled], lasts[filled], counts[filled]
        next_ones = (counts == 1) & (lasts - self._num_hashes[rows] == 1)
        if not next_ones.all():
            self._publish_runs(rows[~next_ones], lasts[~next_ones], counts[~next_ones])
            rows, lasts = rows[next_ones], lasts[next_ones]
            if not len(rows):
                return
        hashes = self._hash_next(rows, lasts)
        self._cache.publish(hashes, self._blocks.cells(rows, lasts * base))

    def _hash_next(self, rows: np.ndarray, lasts: np.ndarray) -> list[bytes]:
        """Decodes that fill a block: one hash more for each, made together."""
        base, tips, chains = self._cache.base, self._tips, self._chains
        columns = (lasts[:, None] - 1) * base + np.arange(base)
        named = rows.tolist()
        hashes = self._cache.extend_rows(
            [tips[row] for row in named], self._table.token_ids[rows[:, None], columns]
        )
        for row, link in zip(named, hashes, strict=True):
            tips[row] = link
            chains[row].append(link)
        self._num_hashes[rows] = lasts
        return hashes

    def _publish_runs(self, rows: np.ndarray, lasts: np.ndarray, counts: np.ndarray) -> None:
        """Chunks of prompts: any number of blocks each, whose hashes mostly are there."""
        base, names, ends = self._cache.base, [], []
        for row, last, count in zip(rows.tolist(), lasts.tolist(), counts.tolist(), strict=True):
            chain = self._chains[row]
            if len(chain) < last:
                tokens = self._table.token_ids[row, : last * base]
                self._cache.extend(chain, self._table.occupant(row).chain_root, tokens)
                self._tips[row] = chain[-1]
                self._num_hashes[row] = last
            names += chain[last - count : last]
            ends.append(np.arange(last - count + 1, last + 1) * base)
        cells = self._blocks.cells(np.repeat(rows, counts), np.concatenate(ends))
        self._cache.publish(names, cells)

    def publish_held(self, request: Request, start: int, end: int) -> None:
        """The same for one request that holds its blocks without a row."""
        base = self._cache.base
        first, last = start // base, end // base
        if last == first:
            return
        self._cache.extend(request.hashes, request.chain_root, request.tokens[: last * base])
        ends = np.arange(first + 1, last + 1) * base
        cells = cells_of(request.held_blocks, self._blocks.groups, ends)
        self._cache.publish(request.hashes[first:last], cells)
