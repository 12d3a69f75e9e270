"""The KV slot of each token."""

from __future__ import annotations

import pytest
import torch


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def table(rows):
    block_table = torch.zeros((10, 8), dtype=torch.int32)
    for row, blocks in rows.items():
        block_table[row, : len(blocks)] = i32(*blocks)
    return block_table


def test_the_worked_example_number_for_number(kernel):
    out = torch.full((9,), 99, dtype=torch.int64)
    kernel("slot_mapping")(
        i32(7, 6),
        i32(0, 1, 9),
        torch.tensor([31, 16, 17, 18, 19, 20, 21, 22, 23]),
        table({7: [37, 12], 6: [81, 44]}),
        block_size=16,
        out=out,
    )
    assert out.tolist() == [12 * 16 + 15, *(44 * 16 + offset for offset in range(8))]


def test_padding_is_no_slot(kernel):
    """Token padding, and a padded request whose row is outside the tables: an earlier step's slots must not survive."""
    out = torch.full((5,), 99, dtype=torch.int64)
    kernel("slot_mapping")(
        i32(7, 2**30),
        i32(0, 2, 2),
        torch.tensor([15, 16, 0, 0, 0]),
        table({7: [37, 12]}),
        block_size=16,
        out=out,
    )
    assert out.tolist() == [37 * 16 + 15, 12 * 16, -1, -1, -1]


def test_no_requests_map_nothing(kernel):
    out = torch.full((3,), 99, dtype=torch.int64)
    kernel("slot_mapping")(
        i32(), i32(0), torch.zeros(3, dtype=torch.int64), table({}), block_size=16, out=out
    )
    assert out.tolist() == [-1, -1, -1]


def test_slots_pass_two_to_the_31(kernel):
    """int32 * int32 stays int32: block 2**27 of 16 tokens would be slot -2**31."""
    block_id = 2**27 + 5
    out = torch.zeros(1, dtype=torch.int64)
    kernel("slot_mapping")(
        i32(3), i32(0, 1), torch.tensor([7]), table({3: [block_id]}), block_size=16, out=out
    )
    assert out.tolist() == [block_id * 16 + 7]
    assert out.item() > 2**31


@pytest.mark.parametrize("block_size", [1, 8, 16, 48, 528])
def test_equals_the_reference_at_odd_shapes(kernel, reference, block_size):
    generator = torch.Generator().manual_seed(block_size)
    query_lens, computed = (1, 1, 0, 7, 41, 300), (0, 530, 0, 3, 100, 9)
    positions = torch.cat(
        [torch.arange(c, c + n) for n, c in zip(query_lens, computed, strict=True)]
    )
    starts = torch.cumsum(torch.tensor((0, *query_lens)), 0).to(torch.int32)
    rows = torch.randperm(9, generator=generator)[:6].to(torch.int32)
    block_table = torch.randint(
        1, 10**6, (9, 540 // block_size + 1), generator=generator, dtype=torch.int32
    )
    got, wanted = (torch.full((len(positions) + 3,), 99, dtype=torch.int64) for _ in range(2))
    kernel("slot_mapping")(rows, starts, positions, block_table, block_size=block_size, out=got)
    reference("slot_mapping")(
        rows, starts, positions, block_table, block_size=block_size, out=wanted
    )
    assert torch.equal(got, wanted)


def test_groups_of_one_block_size_are_mapped_at_once(kernel):
    """Into a part of a wider buffer, as a step's is."""
    first = table({7: [37, 12], 6: [81, 44]})
    buffer = torch.full((2, 7), 99, dtype=torch.int64)
    kernel("slot_mapping")(
        i32(7, 6),
        i32(0, 1, 3),
        torch.tensor([31, 16, 17]),
        torch.stack([first, first + 1]),
        block_size=16,
        out=buffer[:, :4],
    )
    assert buffer.tolist() == [
        [12 * 16 + 15, 44 * 16, 44 * 16 + 1, -1, 99, 99, 99],
        [13 * 16 + 15, 45 * 16, 45 * 16 + 1, -1, 99, 99, 99],
    ]


@pytest.mark.parametrize("num_groups", [None, 1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_gathered_rows_are_kept_up_to_date(kernel, num_groups, block_size):
    """A batch that goes on as it was needs no other gathering: after each step the rows are as if gathered anew."""
    generator = torch.Generator().manual_seed(block_size)
    rows, query_lens = i32(5, 2, 8), (1, 1, 7)
    starts = i32(0, 1, 2, 9)
    computed = [0, block_size, 2 * block_size - 1]
    groups = () if num_groups is None else (num_groups,)
    shape = (*groups, 9, 40)
    pool = torch.randint(1, 10**6, shape, generator=generator, dtype=torch.int32)
    tables, num_blocks = torch.zeros_like(pool), torch.zeros(9, dtype=torch.int32)
    buffer = torch.full((*groups, 5, 40), 99, dtype=torch.int32)
    for step in range(4):
        positions = [range(c, c + n) for c, n in zip(computed, query_lens, strict=True)]
        for row, run in zip(rows.tolist(), positions, strict=True):
            num_blocks[row] = -(-run.stop // block_size)
            tables[..., row, : num_blocks[row]] = pool[..., row, : num_blocks[row]]
        gathered = buffer[..., :4, :30]
        anew = torch.empty_like(gathered)
        kernel("block_table_gather")(rows, tables, num_blocks, out=anew)
        if step == 0:
            gathered.copy_(anew)
        flat = torch.tensor([position for run in positions for position in run])
        slots = torch.empty((*groups, len(flat)), dtype=torch.int64)
        kernel("slot_mapping")(
            rows, starts, flat, tables, block_size=block_size, out=slots, gathered=gathered
        )
        assert torch.equal(gathered, anew)
        computed = [run.stop for run in positions]
    assert (buffer[..., 4:, :] == 99).all()
    assert (buffer[..., 30:] == 99).all()


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("query_start_loc", i32(0), "query_start_loc must have 2 entries, got 1"),
        ("positions", torch.zeros(4, dtype=torch.int32), "positions must be"),
        ("block_table", torch.zeros((2, 2), dtype=torch.int64), "block_table must be"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("out", torch.zeros(4, dtype=torch.int32), "out must be"),
        ("out", torch.zeros((2, 4), dtype=torch.int64), "must have 3 and 2 dimensions, or 2 and 1"),
        ("gathered", torch.zeros((0, 4), dtype=torch.int32), "gathered at least 1 rows"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "index_mapping": i32(0),
        "query_start_loc": i32(0, 1),
        "positions": torch.zeros(4, dtype=torch.int64),
        "block_table": table({}),
        "block_size": 16,
        "out": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=told):
        kernel("slot_mapping")(**(arguments | {name: wrong}))


def test_the_twin_refuses_outputs_that_are_too_short():
    """The Triton launcher cannot know: the token count is on the device."""
    from rowcast.kernels.cpu.slot_mapping import slot_mapping

    with pytest.raises(ValueError, match="must hold 3 tokens, got 3 and 2"):
        slot_mapping(
            i32(0).numpy(),
            i32(0, 3).numpy(),
            torch.zeros(3, dtype=torch.int64).numpy(),
            table({}).numpy(),
            block_size=16,
            out=torch.zeros(2, dtype=torch.int64).numpy(),
        )
