"""One block table per KV group: which pool blocks hold a row's keys and values, in order of position.

Owns the tables and their counts. Decides nothing: which block a row gets is the scheduler's choice, and how many it
must get is `scheduler.agreement.derive_growth`. Cells beyond a row's count hold 0, the null block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..scheduler.kv_groups import KVGroupSpec, blocks_needed


def ragged_cells(
    rows: np.ndarray, counts: np.ndarray, first: np.ndarray | int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """List the cells (row, column) of runs of columns, one run per row.

    Shapes: rows and counts [n]; first [n] or one number, the run's first column. Returns two arrays [sum(counts)].
    Example: rows [7, 6], counts [2, 1], first [0, 3] -> rows [7, 7, 6], columns [0, 1, 3].
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    columns = np.arange(total) - np.repeat(ends - counts - first, counts)
    return np.repeat(rows, counts), columns


class BlockTables:
    """Shapes, all int32: table[group] [max_num_seqs, max_blocks[group]]; num_blocks[group] [max_num_seqs]."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, groups: Sequence[KVGroupSpec]
    ) -> None:
        self.block_sizes = tuple(spec.block_size for spec in groups)
        self.max_blocks = tuple(blocks_needed(max_model_len, size) for size in self.block_sizes)
        self.table = tuple(np.zeros((max_num_seqs, width), np.int32) for width in self.max_blocks)
        self.num_blocks = tuple(np.zeros(max_num_seqs, np.int32) for _ in self.block_sizes)

    @property
    def num_groups(self) -> int:
        return len(self.block_sizes)

    def replace(
        self, group: int, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray
    ) -> None:
        """Give rows [n] new lists of blocks, counts [n] of block_ids [sum(counts)] each; the rest of a row is 0."""
        table = self.table[group]
        self._check_width(group, rows, counts, np.zeros_like(counts))
        table[rows] = 0
        table[ragged_cells(rows, counts)] = block_ids
        self.num_blocks[group][rows] = counts

    def append(
        self, group: int, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put block_ids [sum(counts)] behind what rows [n] hold, counts [n] each; returns the cells written.

        Example: row 2 holds [9, 10, 11]; append [12] -> [9, 10, 11, 12].
        Raises: ValueError, before anything is written, if a row would pass the table's width.
        """
        held = self.num_blocks[group][rows]
        self._check_width(group, rows, counts, held)
        one_each = (counts == 1).all()  # steady decode
        cells = (rows, held) if one_each else ragged_cells(rows, counts, held)
        self.table[group][cells] = block_ids
        self.num_blocks[group][rows] = held + counts
        return cells

    def remove(self, rows: np.ndarray) -> None:
        """Clear rows [n] in every group."""
        for table, num_blocks in zip(self.table, self.num_blocks, strict=True):
            table[rows] = 0
            num_blocks[rows] = 0

    def _check_width(
        self, group: int, rows: np.ndarray, counts: np.ndarray, held: np.ndarray
    ) -> None:
        width = self.max_blocks[group]
        past = np.flatnonzero(held + counts > width)
        if len(past):
            i = past[0]
            raise ValueError(
                f"row {rows[i]}: {held[i]} blocks of KV group {group} and {counts[i]} more make "
                f"{held[i] + counts[i]}, its table has {width} columns"
            )
