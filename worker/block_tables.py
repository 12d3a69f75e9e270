"""One block table per KV group: which pool blocks hold a row's keys and values, in order of position.

Owns the tables and their counts. Decides nothing: which block a row gets is the scheduler's choice, and how many it
must get is `scheduler.agreement.derive_growth`. Cells beyond a row's count hold 0, the null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..scheduler.kv_groups import KVGroupSpec, blocks_needed


def ragged_cells(
    rows: np.ndarray, counts: np.ndarray, first: np.ndarray | int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """List the cells (row, column) of runs of columns, one run per row.

    Shapes: rows and counts [n]; first [n] or one number, the run's first column. Returns two arrays [sum(counts)].
    Example: rows [7, 6], counts [2, 1], first [0, 3] -> rows [7, 7, 6], columns [0, 1, 3].
    """
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    columns = np.arange(total) - (ends - counts - first).repeat(counts)
    return rows.repeat(counts), columns


@dataclass(frozen=True, kw_only=True, slots=True)
class SameSize:
    """The groups of one block size: a row holds the same number of blocks in each, so they grow and shrink together.

    Shapes, int32: num_blocks [max_num_seqs]; table [groups of this size, max_num_seqs, max_blocks].
    """

    block_size: int
    max_blocks: int
    groups: tuple[int, ...]
    num_blocks: np.ndarray
    table: np.ndarray


class BlockTables:
    """Shapes, all int32: table[group] [max_num_seqs, max_blocks[group]]; num_blocks[group] [max_num_seqs].

    sizes: the same memory, by block size. Groups of one size share their counts.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, groups: Sequence[KVGroupSpec]
    ) -> None:
        of_size: dict[int, list[int]] = {}
        for group, spec in enumerate(groups):
            of_size.setdefault(spec.block_size, []).append(group)
        self.sizes = tuple(
            SameSize(
                block_size=size,
                max_blocks=blocks_needed(max_model_len, size),
                groups=tuple(same),
                num_blocks=np.zeros(max_num_seqs, np.int32),
                table=np.zeros(
                    (len(same), max_num_seqs, blocks_needed(max_model_len, size)), np.int32
                ),
            )
            for size, same in of_size.items()
        )
        homes = [self.sizes[list(of_size).index(spec.block_size)] for spec in groups]
        self.max_blocks = tuple(home.max_blocks for home in homes)
        self.num_blocks = tuple(home.num_blocks for home in homes)
        self.table = tuple(home.table[home.groups.index(group)] for group, home in enumerate(homes))

    @property
    def num_groups(self) -> int:
        return len(self.table)

    def replace(
        self, size: int, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray
    ) -> None:
        """Give rows [n] new lists of blocks in the groups of sizes[size]; the rest of a row is 0.

        Shapes: counts [n]; block_ids [groups of this size, sum(counts)], each group's lists behind each other.
        """
        same = self.sizes[size]
        self._check_width(size, rows, counts, counts)
        same.table[:, rows] = 0
        if block_ids.size:  # hardly anyone comes with blocks
            same.table[:, *ragged_cells(rows, counts)] = block_ids
        same.num_blocks[rows] = counts

    def append(
        self, size: int, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put blocks behind what rows [n] hold, at least one each, shapes as in `replace`; returns the cells written.

        Example: row 2 holds [9, 10, 11]; append [12] -> [9, 10, 11, 12].
        Raises: ValueError, before anything is written, if a row would pass the table's width.
        """
        same = self.sizes[size]
        held = same.num_blocks[rows]
        after = held + counts
        self._check_width(size, rows, counts, after)
        one_each = block_ids.shape[-1] == len(rows)  # steady decode
        cells = (rows, held) if one_each else ragged_cells(rows, counts, held)
        if len(same.groups) == 1:
            same.table[0][cells] = block_ids.ravel()
        else:
            same.table[:, *cells] = block_ids
        same.num_blocks[rows] = after
        return cells

    def remove(self, rows: np.ndarray) -> None:
        """Clear rows [n] in every group."""
        for same in self.sizes:
            same.table[:, rows] = 0
            same.num_blocks[rows] = 0

    def _check_width(
        self, size: int, rows: np.ndarray, counts: np.ndarray, after: np.ndarray
    ) -> None:
        same = self.sizes[size]
        if not len(after) or after.max() <= same.max_blocks:
            return
        i = int(after.argmax())
        raise ValueError(
            f"row {rows[i]}: {after[i] - counts[i]} blocks of KV group {same.groups[0]} and {counts[i]} more make "
            f"{after[i]}, its table has {same.max_blocks} columns"
        )
