"""Which blocks a row holds: appended in order, given back deepest first, let go left of a window."""

from __future__ import annotations

import numpy as np
from rowcast.scheduler.row_blocks import Growth, RowBlocks
from rowcast.tests.scheduler.fakes import group


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def grow(blocks: RowBlocks, *, rows: np.ndarray, counts: np.ndarray, ids: np.ndarray) -> None:
    """The same rows and counts in each size of blocks."""
    sizes = len(blocks.sizes)
    blocks.grow(Growth(rows=(rows,) * sizes, counts=(counts,) * sizes, num_blocks=len(ids)), ids)


def test_rows_grow_by_different_counts_in_one_step():
    blocks = RowBlocks((group(4),), max_num_seqs=4, max_model_len=16)
    grow(blocks, rows=i32(0, 2, 3), counts=i32(2, 1, 1), ids=i32(11, 12, 13, 14))
    grow(blocks, rows=i32(0, 2), counts=i32(1, 2), ids=i32(15, 16, 17))
    grow(blocks, rows=i32(2, 3), counts=i32(1, 1), ids=i32(18, 19))
    assert blocks.block_ids[0].tolist() == [
        [11, 12, 15, 0],
        [0, 0, 0, 0],
        [13, 16, 17, 18],
        [14, 19, 0, 0],
    ]
    assert blocks.num_blocks[0].tolist() == [3, 0, 4, 2]


def test_new_blocks_go_group_by_group_whatever_their_sizes():
    """The workers read each group's ids in row order: groups of one size are not neighbours in the message."""
    blocks = RowBlocks((group(4), group(8), group(4)), max_num_seqs=3, max_model_len=16)
    growth = Growth(rows=(i32(0, 2), i32(2)), counts=(i32(1, 2), i32(1)), num_blocks=2 * 3 + 1)
    grown = blocks.grow(growth, i32(1, 2, 3, 4, 5, 6, 7))
    assert [ids.tolist() for ids in grown] == [[1, 2, 3], [4], [5, 6, 7]]
    assert [table.tolist() for table in blocks.block_ids] == [
        [[1, 0, 0, 0], [0] * 4, [2, 3, 0, 0]],
        [[0, 0], [0, 0], [4, 0]],
        [[5, 0, 0, 0], [0] * 4, [6, 7, 0, 0]],
    ]
    assert [held.tolist() for held in blocks.num_blocks] == [[1, 0, 2], [0, 0, 1], [1, 0, 2]]


def test_a_released_row_names_its_blocks_deepest_first_and_is_empty():
    """B09: given back first to last, the start of a prefix would be reused before its continuation, in any group."""
    blocks = RowBlocks((group(4), group(8)), max_num_seqs=2, max_model_len=16)
    blocks.grow(
        Growth(rows=(i32(0, 1), i32(0, 1)), counts=(i32(3, 1), i32(2, 1)), num_blocks=7),
        i32(5, 6, 7, 1, 8, 9, 2),
    )
    # row 0 ends at tokens 4, 8, 12 in the one group, at 8 and 16 in the other
    assert blocks.release([0]).tolist() == [9, 7, 6, 8, 5]
    assert blocks.release([0]).tolist() == []
    assert [table[0].tolist() for table in blocks.block_ids] == [[0] * 4, [0] * 2]
    assert blocks.release([1]).tolist() == [2, 1]


def test_rows_that_end_together_are_emptied_one_after_the_other():
    blocks = RowBlocks((group(4), group(4)), max_num_seqs=2, max_model_len=16)
    grow(blocks, rows=i32(0, 1), counts=i32(2, 1), ids=i32(1, 2, 3, 4, 5, 6))
    assert blocks.release([1, 0]).tolist() == [3, 6, 2, 5, 1, 4]
    assert not any(counts.any() for counts in blocks.num_blocks)


def test_a_window_lets_go_in_place():
    """H-04: the table keeps its width and its places; only entries that nobody reads any more become null."""
    blocks = RowBlocks((group(2), group(2, window=4)), max_num_seqs=1, max_model_len=22)
    grow(blocks, rows=i32(0), counts=i32(11), ids=np.arange(1, 23, dtype=np.int32))
    dropped = []
    for computed in (0, 4, 5, 6, 7, 11):
        ids = blocks.return_unseen(i32(0), i32(computed))
        dropped.append([] if ids is None else ids.tolist())
    assert dropped == [[], [], [12], [], [13], [15, 14]]
    assert blocks.block_ids[0][0].tolist() == list(range(1, 12))
    assert blocks.block_ids[1][0].tolist() == [0, 0, 0, 0, *range(16, 23)]
    assert [held.tolist() for held in blocks.num_blocks] == [[11], [11]]
    assert blocks.num_returned[1].tolist() == [4]


def test_a_hit_that_begins_at_its_window_counts_its_null_blocks_as_returned():
    """Counted as still to return, they would be given to the pool as block 0."""
    blocks = RowBlocks((group(2), group(2, window=4)), max_num_seqs=1, max_model_len=22)
    blocks.seat(0, (i32(1, 2, 3, 4), i32(0, 0, 7, 8)))
    assert blocks.return_unseen(i32(0), i32(8)) is None
    ids = blocks.return_unseen(i32(0), i32(9))
    assert ids is not None
    assert ids.tolist() == [7]
    assert blocks.release([0]).tolist() == [4, 8, 3, 2, 1]
    assert blocks.num_returned[1].tolist() == [0]
