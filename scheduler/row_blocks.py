"""Which blocks each row holds, per KV group. The scheduler's twin of the workers' block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .kv_groups import KVGroupSpec, blocks_needed


class RowBlocks:
    """Block tables of all rows and groups.

    Shapes, per group: num_blocks [max_num_seqs] int32; block_ids [max_num_seqs, max_blocks] int32, 0 beyond num_blocks.
    """

    def __init__(
        self, groups: Sequence[KVGroupSpec], *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.num_blocks = tuple(np.zeros(max_num_seqs, np.int32) for _ in groups)
        self.block_ids = tuple(
            np.zeros((max_num_seqs, blocks_needed(max_model_len, spec.block_size)), np.int32)
            for spec in groups
        )

    def grow(self, group: int, rows: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> None:
        """Append counts[0] of ids to rows[0], the next counts[1] to rows[1], ... Rows are unique."""
        held = self.num_blocks[group]
        if len(ids) == len(rows):  # one each: the steady case
            self.block_ids[group][rows, held[rows]] = ids
        else:
            starts = np.cumsum(counts) - counts
            places = np.arange(len(ids)) - np.repeat(starts - held[rows], counts)
            self.block_ids[group][np.repeat(rows, counts), places] = ids
        held[rows] += counts

    def release(self, row: int) -> np.ndarray:
        """Empty a row and name what it held, each group's deepest block first."""
        ids = []
        for held, table in zip(self.num_blocks, self.block_ids, strict=True):
            count = int(held[row])
            ids.append(table[row, :count][::-1].copy())
            table[row, :count] = 0
            held[row] = 0
        return np.concatenate(ids)
