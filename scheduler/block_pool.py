"""The KV blocks that all groups share: which are free, how often each is referenced, which is reused next.

Owns ids and counts, not who holds them (`row_blocks.py`) nor what is in them (`prefix_cache.py`, which marks the blocks
that it has a name for, and hears when one of them is reused). Block 0 is the null block: never handed out, so an unused
block-table cell can hold 0.

A free block without a name is worth nothing, so those go first, the last one freed first (its memory is warmest) and
never-used ones at the bottom of that stack. Free blocks with a name follow, least recently freed first. They wait in a
ring; one that is taken out of the middle, because its prefix was hit again, only leaves a stale entry behind.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class BlockPool:
    """Equal blocks numbered 1 .. num_blocks - 1, one pool for every KV group.

    Units: blocks. num_blocks counts the null block, usable does not.
    Shapes: ref_counts [num_blocks] int32; named [num_blocks] bool, written by the prefix cache.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}; "
                "raise --kv-cache-memory"
            )
        self.usable = num_blocks - 1
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.named = np.zeros(num_blocks, bool)
        self.on_reuse: Callable[[np.ndarray], None] = _ignore
        self.num_free = self.usable
        self._stack = np.arange(self.usable, 0, -1, dtype=np.int32)  # free and nameless, top last
        self._num_stacked = self.usable
        # Free and named: entries head .. tail of an endless line, kept modulo the ring's length. An entry counts only
        # while it is its block's latest; entry_of is -1 for a block that does not wait there.
        self._ring = np.zeros(2 * num_blocks, np.int32)
        self._entry_of = np.full(num_blocks, -1, np.int64)
        self._head = 0
        self._tail = 0

    def can_allocate(self, count: int) -> bool:
        """Tell whether `count` blocks are free. Changes nothing."""
        return count <= self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` free blocks, each referenced once. Ask `can_allocate` first.

        Returns: [count] int32 ids in order of reuse; those that had a name have lost it.
        """
        assert self.can_allocate(count), f"asked for {count} blocks, {self.num_free} are free"
        top = self._num_stacked
        self._num_stacked = max(0, top - count)
        ids = self._stack[self._num_stacked : top][::-1].copy()
        if count > top:
            reused = self._take_oldest(count - top)
            ids = np.concatenate((ids, reused)) if top else reused
        self.num_free -= count
        self.ref_counts[ids] = 1
        return ids

    def free(self, ids: np.ndarray) -> None:
        """Drop one reference a mention; blocks that nobody references any more are free, in the order given.

        Give a request's blocks deepest first: the start of a prefix then outlives its continuation.
        Example: a block referenced twice and named twice comes back once.
        """
        if not len(ids):
            return
        assert int(ids.min()) > 0, "the null block was never handed out and cannot be freed"
        np.subtract.at(self.ref_counts, ids, 1)
        left = self.ref_counts[ids]
        if int(left.min()) < 0:
            np.add.at(self.ref_counts, ids, 1)
            raise AssertionError(f"blocks {ids[left < 0].tolist()} were freed more often than held")
        idle = ids[left == 0]
        if len(idle) > 1:
            idle = idle[np.sort(np.unique(idle, return_index=True)[1])]
        self.num_free += len(idle)
        named = self.named[idle]
        self._queue(idle[named])
        self._push(idle[~named])

    def touch(self, ids: np.ndarray) -> None:
        """Reference distinct blocks once more; those that were free, waiting under their name, are free no more."""
        idle = ids[self.ref_counts[ids] == 0]
        assert self.named[idle].all(), "a free block without a name has no content to share"
        self._entry_of[idle] = -1
        self.num_free -= len(idle)
        self.ref_counts[ids] += 1

    def num_idle(self, ids: np.ndarray) -> int:
        """Count the distinct blocks among `ids` that are free now: what touching them takes from `num_free`."""
        return len(np.unique(ids[(self.ref_counts[ids] == 0) & (ids > 0)]))

    def free_ids(self) -> np.ndarray:
        """List the free blocks in the order in which they will be handed out."""
        entries = np.arange(self._head, self._tail)
        waiting = self._ring[entries % len(self._ring)]
        waiting = waiting[self._entry_of[waiting] == entries]
        return np.concatenate((self._stack[: self._num_stacked][::-1], waiting))

    def drop_names(self) -> None:
        """Make every block nameless while nobody references any: the pool is as new."""
        assert self.num_free == self.usable, (
            f"{self.usable - self.num_free} blocks are still referenced"
        )
        self.named[:] = False
        self._entry_of[:] = -1
        self._head = self._tail = 0
        self._num_stacked = 0
        self._push(np.arange(1, self.usable + 1, dtype=np.int32))

    def _push(self, ids: np.ndarray) -> None:
        """Stack nameless blocks so that the first of them is on top."""
        end = self._num_stacked + len(ids)
        self._stack[self._num_stacked : end] = ids[::-1]
        self._num_stacked = end

    def _queue(self, ids: np.ndarray) -> None:
        """Let named blocks wait for their reuse behind all others."""
        if self._tail + len(ids) - self._head > len(self._ring):
            self._compact()
        entries = np.arange(self._tail, self._tail + len(ids))
        self._ring[entries % len(self._ring)] = ids
        self._entry_of[ids] = entries
        self._tail += len(ids)

    def _compact(self) -> None:
        """Drop the stale entries. At most half of the ring is left, so this comes once in num_blocks frees at most."""
        waiting = self.free_ids()[self._num_stacked :]
        self._head = self._tail = 0
        self._queue(waiting)

    def _take_oldest(self, count: int) -> np.ndarray:
        """Remove `count` named blocks that have waited longest, and say so to whoever named them."""
        taken, missing = [], count
        while missing:
            entries = np.arange(self._head, min(self._head + missing, self._tail))
            ids = self._ring[entries % len(self._ring)]
            ids = ids[self._entry_of[ids] == entries]
            self._head = int(entries[-1]) + 1
            taken.append(ids)
            missing -= len(ids)
        ids = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self._entry_of[ids] = -1
        self.named[ids] = False
        self.on_reuse(ids)
        return ids


def _ignore(_ids: np.ndarray) -> None:
    """Nobody has named a block."""
