"""The KV blocks that all groups share: which are free, how often each is referenced.

Owns ids and counts, not who holds them (`row_blocks.py`) nor what is in them. Block 0 is the null block: never handed
out, so an unused block-table cell can hold 0. The free blocks form a ring in the order in which they came back, and are
reused oldest first: whoever later remembers a free block's content finds the least recently used at the head.
"""

from __future__ import annotations

import numpy as np


class BlockPool:
    """Equal blocks numbered 1 .. num_blocks - 1, one pool for every KV group.

    Units: blocks. num_blocks counts the null block, usable does not.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}; "
                "raise --kv-cache-memory"
            )
        self.usable = num_blocks - 1
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._ring = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self.num_free = self.usable

    def can_allocate(self, count: int) -> bool:
        """Tell whether `count` blocks are free. Changes nothing."""
        return count <= self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` free blocks, each referenced once. Ask `can_allocate` first.

        Returns: [count] int32 ids, least recently used first.
        """
        assert self.can_allocate(count), f"asked for {count} blocks, {self.num_free} are free"
        end = self._head + count
        if end <= self.usable:
            ids = self._ring[self._head : end].copy()
        else:
            ids = np.concatenate((self._ring[self._head :], self._ring[: end - self.usable]))
        self._head = end % self.usable
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
        if len(ids) > 1:
            idle = idle[np.sort(np.unique(idle, return_index=True)[1])]
        start = (self._head + self.num_free) % self.usable
        self._ring[(start + np.arange(len(idle))) % self.usable] = idle
        self.num_free += len(idle)

    def free_ids(self) -> np.ndarray:
        """List the free blocks in the order in which they will be handed out."""
        return self._ring[(self._head + np.arange(self.num_free)) % self.usable]
