"""Which blocks become known to the prefix cache, and under which names: those that a settled step filled.

Owns the moment, and where each row's chain of hashes ends; the names are `prefix_cache.py`'s. A request keeps the
hashes of its prompt, which are made when it comes and so may run ahead of what is computed. Of what it decodes
only the last hash is kept: a preempted request makes those again when it asks for its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .agreement import StepPlan
from .prefix_cache import PrefixCache
from .request import Request, RequestTable
from .row_blocks import RowBlocks, cells_of

_STEPS_AT_ONCE = 8


class Publisher:
    """Names what rows compute. By row: how many hashes its chain has, and the last of them.

    While the same rows decode and nobody looks, what they fill is named for up to eight steps at once, in half the time
    that eight times one step's would take. Whoever reads names, or takes rows or blocks away, calls `flush` first.
    """

    def __init__(self, cache: PrefixCache, blocks: RowBlocks, table: RequestTable) -> None:
        self._cache = cache
        self._blocks = blocks
        self._table = table
        self._num_hashes = np.zeros(len(table.live), np.int32)
        self._tips = np.full(len(table.live), b"", object)
        # Every row's tokens as links, each one item: little-endian int32, as they are hashed.
        num_links = table.token_ids.shape[1] // cache.base
        self._links = table.token_ids[:, : num_links * cache.base].view(f"V{4 * cache.base}")
        # Blocks to be named later: rows and how many links each then has. A row fills one block in `base` steps, so it
        # is not in here twice. A window may return a block before that, so with windows nothing waits.
        self._unnamed: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_steps = 0  # since the last flush
        self._most_steps = 1 if blocks.windows else min(_STEPS_AT_ONCE, cache.base)

    def seat(self, row: int, request: Request) -> None:
        """Take up the chain of a request that gets a row."""
        self._tips[row] = request.hashes[-1] if request.hashes else request.chain_root
        self._num_hashes[row] = len(request.hashes)

    def publish_step(self, plan: StepPlan, held: np.ndarray | None) -> None:
        """Name the blocks that a step filled, which has just settled. Before a window returns any of them.

        Shapes: held [num_reqs] bool, whose occupant still has his row; None for everyone.
        """
        base, batch, ends = self._cache.base, plan.batch, plan.seq_lens
        if held is None and plan.age > 1:
            # Whoever opens a block in the next step has filled one in this.
            filled = batch.opening(base, plan.age + 1)
            if len(filled):
                self._unnamed.append((batch.rows[filled], ends[filled] // base))
            self._num_steps += 1
            if self._num_steps == self._most_steps:
                self.flush()
            return
        self.flush()
        first, last = plan.num_computed_tokens // base, ends // base
        fills = last > first if held is None else (last > first) & held
        filled = fills.nonzero()[0]
        if len(filled):
            lasts = last[filled]
            self._publish(batch.rows[filled], lasts, lasts - first[filled])

    def flush(self) -> None:
        """Name every block that has settled full."""
        self._num_steps = 0
        if self._unnamed:
            rows, lasts = (np.concatenate(columns) for columns in zip(*self._unnamed, strict=True))
            self._unnamed.clear()
            self._publish(rows, lasts, np.ones(len(rows), np.int32))

    def _publish(self, rows: np.ndarray, lasts: np.ndarray, counts: np.ndarray) -> None:
        """Name the last counts of the blocks that end with link `lasts` of their rows. Shapes: all [n]."""
        runs = (counts != 1) | (self._num_hashes[rows] != lasts - 1)
        of_runs = runs.nonzero()[0]
        if not len(of_runs):
            hashes = self._hash_next(rows, lasts)
        else:
            one_more = (~runs).nonzero()[0]
            columns = (rows[of_runs], lasts[of_runs], counts[of_runs])
            hashes, run_rows, run_lasts = self._hash_runs(*(column.tolist() for column in columns))
            rows, lasts = rows[one_more], lasts[one_more]
            if len(rows):
                hashes += self._hash_next(rows, lasts)
            rows, lasts = np.concatenate((run_rows, rows)), np.concatenate((run_lasts, lasts))
        self._cache.publish(hashes, self._blocks.cells(rows, lasts * self._cache.base))

    def _hash_next(self, rows: np.ndarray, lasts: np.ndarray) -> list[bytes]:
        """Decodes that fill a block: one hash more for each, made together."""
        links = self._links[rows, lasts - 1].tolist()
        hashes = self._cache.extend_each(self._tips[rows].tolist(), links)
        self._tips[rows] = hashes
        self._num_hashes[rows] = lasts
        return hashes

    def _hash_runs(
        self, rows: Sequence[int], lasts: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[bytes], np.ndarray, np.ndarray]:
        """Chunks of prompts: any number of blocks each, whose hashes mostly are there.

        Returns: for each block its hash, its row, and how many links end with it.
        """
        base, hashes, row_of_block, links = self._cache.base, [], [], []
        for row, last, count in zip(rows, lasts, counts, strict=True):
            request = self._table.occupant(row)
            chain = request.hashes
            if len(chain) < last:
                tokens = self._table.token_ids[row, : last * base]
                self._cache.extend(chain, request.chain_root, tokens)
                self._tips[row] = chain[-1]
                self._num_hashes[row] = last
            hashes += chain[last - count : last]
            row_of_block += [row] * count
            links += range(last - count + 1, last + 1)
        return hashes, np.array(row_of_block), np.array(links)

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
