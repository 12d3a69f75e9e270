"""Block-table rows of a step, in batch order."""

from __future__ import annotations

import pytest
import torch


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def tables():
    """Rows 7 and 6 of the worked example; behind a row's blocks lies what its last owner left."""
    block_table = torch.full((10, 8), 55, dtype=torch.int32)
    block_table[7, :2] = i32(37, 12)
    block_table[6, :2] = i32(81, 44)
    num_blocks = torch.full((10,), 8, dtype=torch.int32)
    num_blocks[7] = num_blocks[6] = 2
    return block_table, num_blocks


def test_the_worked_example(kernel, tables):
    out = torch.full((2, 2), 99, dtype=torch.int32)
    kernel("block_table_gather")(i32(7, 6), *tables, out=out)
    assert out.tolist() == [[37, 12], [81, 44]]


def test_cells_behind_the_blocks_and_padded_rows_are_the_null_block(kernel, tables):
    out = torch.full((4, 3), 99, dtype=torch.int32)
    kernel("block_table_gather")(i32(7, 6), *tables, out=out)
    assert out.tolist() == [[37, 12, 0], [81, 44, 0], [0, 0, 0], [0, 0, 0]]


def test_a_part_of_a_wider_buffer_is_written_and_no_more(kernel, tables):
    buffer = torch.full((3, 6), 99, dtype=torch.int32)
    kernel("block_table_gather")(i32(6), *tables, out=buffer[:2, :4])
    assert buffer.tolist() == [[81, 44, 0, 0, 99, 99], [0, 0, 0, 0, 99, 99], [99] * 6]


def test_no_requests_give_null_rows(kernel, tables):
    out = torch.full((2, 2), 99, dtype=torch.int32)
    kernel("block_table_gather")(i32(), *tables, out=out)
    assert out.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_blocks", "width"), [(9, 7, 5), (41, 1, 1), (7, 600, 531)]
)
def test_equals_the_reference_at_odd_shapes(kernel, reference, max_num_seqs, max_blocks, width):
    generator = torch.Generator().manual_seed(width)
    block_table = torch.randint(
        1, 10**6, (max_num_seqs, max_blocks), generator=generator, dtype=torch.int32
    )
    num_blocks = torch.randint(
        0, max_blocks + 1, (max_num_seqs,), generator=generator, dtype=torch.int32
    )
    rows = torch.randperm(max_num_seqs, generator=generator)[: max_num_seqs - 2].to(torch.int32)
    got, wanted = (torch.full((max_num_seqs, width), 99, dtype=torch.int32) for _ in range(2))
    kernel("block_table_gather")(rows, block_table, num_blocks, out=got)
    reference("block_table_gather")(rows, block_table, num_blocks, out=wanted)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(1, 2), (2, 9)])
def test_an_out_that_does_not_fit_is_refused(kernel, tables, shape):
    with pytest.raises(ValueError, match="1 groups of at least 2 rows and at most 8 columns, got"):
        kernel("block_table_gather")(i32(7, 6), *tables, out=torch.zeros(shape, dtype=torch.int32))


def test_another_dtype_is_refused_by_name(kernel, tables):
    with pytest.raises(ValueError, match="out must be"):
        kernel("block_table_gather")(i32(7, 6), *tables, out=torch.zeros((2, 2), dtype=torch.int64))


def test_groups_of_one_block_size_are_gathered_at_once(kernel, tables):
    """Into a part of a wider buffer, as a step's is."""
    block_table, num_blocks = tables
    groups = torch.stack([block_table, block_table + 100, block_table + 200])
    buffer = torch.full((3, 4, 6), 99, dtype=torch.int32)
    kernel("block_table_gather")(i32(7, 6), groups, num_blocks, out=buffer[:, :3, :3])
    for group in range(3):
        first, second = [100 * group + 37, 100 * group + 12], [100 * group + 81, 100 * group + 44]
        assert buffer[group].tolist() == [
            [*first, 0, 99, 99, 99],
            [*second, 0, 99, 99, 99],
            [0, 0, 0, 99, 99, 99],
            [99] * 6,
        ]


def test_groups_that_do_not_match_are_refused(kernel, tables):
    block_table, num_blocks = tables
    with pytest.raises(ValueError, match="must have 2 groups of at least 2 rows"):
        kernel("block_table_gather")(
            i32(7, 6),
            torch.stack([block_table] * 2),
            num_blocks,
            out=torch.zeros((3, 2, 2), dtype=torch.int32),
        )
