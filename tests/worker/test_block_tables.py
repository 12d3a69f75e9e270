"""Block tables: rows per group, growth, and the width of a row."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.tests.worker.steps import group, i32
from rowcast.worker.block_tables import BlockTables, ragged_cells


def make(*block_sizes: int, max_num_seqs: int = 4, max_model_len: int = 64) -> BlockTables:
    return BlockTables(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        groups=[group(size) for size in block_sizes],
    )


def test_ragged_cells_lists_each_rows_run_of_columns():
    rows, columns = ragged_cells(i32(7, 6), i32(2, 1), i32(0, 3))
    assert (rows.tolist(), columns.tolist()) == ([7, 7, 6], [0, 1, 3])
    rows, columns = ragged_cells(i32(3, 1, 2), i32(0, 2, 0))
    assert (rows.tolist(), columns.tolist()) == ([1, 1], [0, 1])
    assert [len(part) for part in ragged_cells(i32(), i32())] == [0, 0]


def test_each_group_has_its_own_blocks_counts_and_width():
    """W-02: three groups side by side; an append touches the rows it names and no other."""
    tables = make(16, 32, 8, max_model_len=64)
    assert tables.max_blocks == (64 // 16, 64 // 32, 64 // 8)
    tables = make(16, 32, 8, max_model_len=256)
    rows = i32(0, 1)
    tables.replace(0, rows, i32(2, 1), i32(1, 2, 3))
    tables.replace(1, rows, i32(2, 1), i32(10, 11, 12))
    tables.replace(2, rows, i32(0, 2), i32(5, 6))
    assert [counts[:2].tolist() for counts in tables.num_blocks] == [[2, 1], [2, 1], [0, 2]]
    before = [table[1].copy() for table in tables.table]
    for index, block in enumerate((7, 13, 8)):
        tables.append(index, i32(0), i32(1), i32(block))
    assert tables.table[0][0, :4].tolist() == [1, 2, 7, 0]
    assert tables.table[1][0, :4].tolist() == [10, 11, 13, 0]
    assert tables.table[2][0, :2].tolist() == [8, 0]
    assert [int(counts[0]) for counts in tables.num_blocks] == [3, 3, 1]
    assert all(
        np.array_equal(table[1], row) for table, row in zip(tables.table, before, strict=True)
    )


def test_append_takes_different_counts_in_one_call():
    tables = make(4, max_model_len=64)
    tables.replace(0, i32(2, 3), i32(3, 1), i32(9, 10, 11, 5))
    rows, columns = tables.append(0, i32(2, 3), i32(1, 3), i32(12, 6, 7, 8))
    assert tables.table[0][2, :5].tolist() == [9, 10, 11, 12, 0]
    assert tables.table[0][3, :5].tolist() == [5, 6, 7, 8, 0]
    assert (rows.tolist(), columns.tolist()) == ([2, 3, 3, 3], [3, 1, 2, 3])


def test_groups_of_one_block_size_grow_together():
    """Their counts are one array: a row that held more blocks in one of them could not be told."""
    tables = make(4, 8, 4, max_model_len=64)
    assert [same.groups for same in tables.sizes] == [(0, 2), (1,)]
    assert tables.num_blocks[0] is tables.num_blocks[2]
    tables.replace(0, i32(2, 1), i32(1, 2), np.array([[5, 6, 7], [15, 16, 17]]))
    tables.append(0, i32(1, 2), i32(1, 1), np.array([[8, 9], [18, 19]]))
    assert tables.table[0][1:3, :3].tolist() == [[6, 7, 8], [5, 9, 0]]
    assert tables.table[2][1:3, :3].tolist() == [[16, 17, 18], [15, 19, 0]]
    assert not tables.table[1].any()
    assert tables.num_blocks[2].tolist() == [0, 3, 2, 0]


def test_replace_leaves_nothing_of_the_longer_list_before():
    """W02: a resumed row that keeps freed blocks behind the new ones reads another request's KV."""
    tables = make(16, max_model_len=64)
    tables.replace(0, i32(2), i32(4), i32(3, 4, 5, 6))
    tables.replace(0, i32(2), i32(1), i32(9))
    assert tables.table[0][2].tolist() == [9, 0, 0, 0]
    tables.remove(i32(2))
    assert not tables.table[0].any()
    assert not tables.num_blocks[0].any()


def test_a_row_past_its_width_is_refused_and_nothing_moves():
    """W-03: width 4, 3 held, 2 more: an unchecked write lands in the neighbour row."""
    tables = make(16, max_model_len=64)
    tables.replace(0, i32(1, 2), i32(3, 1), i32(1, 2, 3, 7))
    before = tables.table[0].copy()
    with pytest.raises(
        ValueError, match=r"row 1: 3 blocks of KV group 0 and 2 more make 5.* 4 col"
    ):
        tables.append(0, i32(2, 1), i32(1, 2), i32(8, 4, 5))
    assert np.array_equal(tables.table[0], before)
    assert tables.num_blocks[0].tolist() == [0, 3, 1, 0]
