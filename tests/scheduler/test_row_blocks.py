"""Which blocks a row holds: appended in order, given back deepest first."""

from __future__ import annotations

import numpy as np
from rowcast.scheduler.row_blocks import RowBlocks
from rowcast.tests.scheduler.fakes import group


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_rows_grow_by_different_counts_in_one_step():
    blocks = RowBlocks((group(4),), max_num_seqs=4, max_model_len=16)
    blocks.grow(0, i32(0, 2, 3), i32(2, 1, 1), i32(11, 12, 13, 14))
    blocks.grow(0, i32(0, 2), i32(1, 2), i32(15, 16, 17))
    blocks.grow(0, i32(2, 3), i32(1, 1), i32(18, 19))
    assert blocks.block_ids[0].tolist() == [
        [11, 12, 15, 0],
        [0, 0, 0, 0],
        [13, 16, 17, 18],
        [14, 19, 0, 0],
    ]
    assert blocks.num_blocks[0].tolist() == [3, 0, 4, 2]


def test_a_released_row_names_its_blocks_deepest_first_and_is_empty():
    """B09: given back first to last, the start of a prefix would be reused before its continuation."""
    blocks = RowBlocks((group(4), group(8)), max_num_seqs=2, max_model_len=16)
    blocks.grow(0, i32(0, 1), i32(3, 1), i32(5, 6, 7, 1))
    blocks.grow(1, i32(1, 0), i32(1, 2), i32(2, 8, 9))
    assert blocks.release(0).tolist() == [7, 6, 5, 9, 8]
    assert blocks.release(0).tolist() == []
    assert [table[0].tolist() for table in blocks.block_ids] == [[0] * 4, [0] * 2]
    assert blocks.release(1).tolist() == [1, 2]
