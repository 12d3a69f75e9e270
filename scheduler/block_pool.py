"""The KV blocks that all groups share: which are free, how often each is referenced, which is reused next.

Owns ids and counts, not who holds them (`row_blocks.py`) nor what is in them (`prefix_cache.py`, which names blocks
here and hears when named ones are reused). Block 0 is the null block: never handed out, so an unused block-table cell
can hold 0.

A free block without a name is worth nothing, so those go first, the last one freed first (its memory is warmest), with
the never used ones at the bottom of that stack. Free blocks with a name follow, those that came back longest ago first.
They stand in a line; one that leaves from the middle, because its prefix was hit, only leaves a stale entry behind.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class BlockPool:
    """Equal blocks numbered 1 .. num_blocks - 1, one pool for every KV group.

    Units: blocks. num_blocks counts the null block, usable does not.
    Shapes: ref_counts [num_blocks] int32; names [num_blocks] int32, 0 for a nameless block, else whatever the prefix
        cache knows it by. on_reuse is called with ids [n] whose names are about to be dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}; "
                "raise --kv-cache-memory"
            )
        self.usable = num_blocks - 1
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.names = np.zeros(num_blocks, np.int32)
        self.on_reuse: Callable[[np.ndarray], None] | None = None
        self.num_free = self.usable
        self._stack = np.arange(self.usable, 0, -1, dtype=np.int32)  # free and nameless, top last
        self._num_stacked = self.usable
        # Free and named: line[head : tail]. An entry counts while it is where _place_of says that its block stands.
        # Twice as long as can be needed, so that stale entries are swept out once in num_blocks frees at most.
        self._line = np.zeros(2 * num_blocks, np.int32)
        self._head = 0
        self._tail = 0
        self._place_of = np.full(num_blocks, -1, np.int32)
        self._marks = np.zeros(num_blocks, np.int32)  # scratch of _distinct

    def can_allocate(self, count: int) -> bool:
        """Tell whether `count` blocks are free. Changes nothing."""
        return count <= self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` free blocks, each referenced once. Ask `can_allocate` first.

        Returns: [count] int32 ids in the order of `free_ids`, nameless from now on.
        """
        assert self.can_allocate(count), f"asked for {count} blocks, {self.num_free} are free"
        top = self._num_stacked
        self._num_stacked = max(0, top - count)
        ids = self._stack[self._num_stacked : top][::-1].copy()
        if count > top:
            reused = self._reuse(count - top)
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
        at, mentions = self._distinct(ids)
        left = self.ref_counts[at] - mentions
        idle = at
        if left.any():  # mostly nobody else holds them
            wrong = at[left < 0].tolist()
            assert wrong != [0], "the null block was never handed out and cannot be freed"
            assert not wrong, f"blocks {wrong} were freed more often than held"
            idle = at[left == 0]
        self.ref_counts[at] = left
        self.num_free += len(idle)
        named = self.names[idle] != 0
        num_named = np.count_nonzero(named)
        if num_named == len(idle):
            self._queue(idle)
        elif num_named == 0:
            self._push(idle)
        else:
            self._queue(idle[named])
            self._push(idle[~named])

    def _distinct(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """Name each block once, in order of first mention, as an index (intp), and count its mentions.

        Sorting would show repeats in many times the time that leaving a mark on each block takes.
        """
        at = ids.astype(np.intp)
        marks = np.arange(len(at), dtype=np.int32)
        self._marks[at] = marks
        if np.count_nonzero(self._marks[at] != marks) == 0:
            return at, 1
        distinct, first, mentions = np.unique(at, return_index=True, return_counts=True)
        order = np.argsort(first)
        return distinct[order], mentions[order]

    def touch(self, ids: np.ndarray) -> None:
        """Reference distinct blocks once more; those that were free, waiting under their name, are free no more."""
        idle = ids[self.ref_counts[ids] == 0]
        assert self.names[idle].all(), "a free block without a name has no content to share"
        self._place_of[idle] = -1
        self.num_free -= len(idle)
        self.ref_counts[ids] += 1

    def num_idle(self, ids: np.ndarray) -> int:
        """Count the distinct blocks among `ids` that are free now: what touching them takes from `num_free`."""
        return len(np.unique(ids[(self.ref_counts[ids] == 0) & (ids > 0)]))

    def free_ids(self) -> np.ndarray:
        """List the free blocks in the order in which they will be handed out."""
        return np.concatenate(
            (self._stack[: self._num_stacked][::-1], self._standing(self._tail).astype(np.int32))
        )

    def drop_names(self) -> None:
        """Make every block nameless, as in a new pool. Nobody may hold one. Does not call on_reuse."""
        held = self.usable - self.num_free
        assert not held, f"{held} blocks are still referenced"
        self.names[:] = 0
        self._place_of[:] = -1
        self._head = self._tail = self._num_stacked = 0
        self._push(np.arange(1, self.usable + 1, dtype=np.int32))

    def _push(self, ids: np.ndarray) -> None:
        """Stack nameless blocks; the first of them ends on top."""
        end = self._num_stacked + len(ids)
        self._stack[self._num_stacked : end] = ids[::-1]
        self._num_stacked = end

    def _queue(self, ids: np.ndarray) -> None:
        """Put named blocks at the end of the line."""
        if self._tail + len(ids) > len(self._line):
            waiting = self._standing(self._tail)
            self._head = self._tail = 0
            self._queue(waiting)
        end = self._tail + len(ids)
        self._line[self._tail : end] = ids
        self._place_of[ids] = np.arange(self._tail, end)
        self._tail = end

    def _standing(self, end: int) -> np.ndarray:
        """List the blocks that stand between the head of the line and `end`, as indices (intp)."""
        ids = self._line[self._head : end].astype(np.intp)
        valid = self._place_of[ids] == np.arange(self._head, end)
        return ids if np.count_nonzero(valid) == len(ids) else ids[valid]

    def _reuse(self, count: int) -> np.ndarray:
        """Take `count` blocks from the head of the line, and their names from them."""
        taken = []
        while count:
            end = min(self._head + count, self._tail)
            ids = self._standing(end)
            self._head = end
            count -= len(ids)
            taken.append(ids)
        ids = taken[0] if len(taken) == 1 else np.concatenate(taken)
        if self.on_reuse is not None:
            self.on_reuse(ids)
        self.names[ids] = 0
        self._place_of[ids] = -1
        return ids.astype(np.int32)
