"""Which cells of the tables changed since somebody last looked: what a device mirror has to copy.

Owns the list of cells, not their values: those are read when the list is taken, so that a cell that was written twice,
or whose row was reused in between, simply has its newest value.
"""

from __future__ import annotations

import numpy as np

TOKEN_IDS = ("token_ids", 0)
NUM_COMPUTED_TOKENS = ("num_computed_tokens", 0)


def block_table(size: int) -> tuple[str, int]:
    """The tables of `BlockTables.sizes[size]`: a cell of them is that of each group."""
    return ("block_table", size)


def num_blocks(size: int) -> tuple[str, int]:
    return ("num_blocks", size)


class TableChanges:
    """Cells by array; an array is named by one of the constants or functions above."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray | int]]] = {}

    def add(self, array: tuple[str, int], rows: np.ndarray, columns: np.ndarray | int = 0) -> None:
        """Note cells (rows [n], columns [n]) of an array; the column of a one-dimensional array is 0."""
        if len(rows):
            self._cells.setdefault(array, []).append((rows, columns))

    def take(self) -> dict[tuple[str, int], list[tuple[np.ndarray, np.ndarray | int]]]:
        """Hand over everything noted so far and start afresh."""
        cells, self._cells = self._cells, {}
        return cells
