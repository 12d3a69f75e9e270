"""The block-table rows of this step's requests, in batch order, for the KV groups of one block size.

    row = index_mapping[batch_index]
    out[group, batch_index, block_index] = block_table[group, row, block_index]   for block_index < num_blocks[row]

program_id(0) is batch_index over every row of `out`, the padded ones too: those and all cells behind a row's blocks
become 0, the null block, so that nothing of an earlier, larger batch survives. program_id(1) is the group. Groups of
one block size hold equally many blocks, so that they share num_blocks.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_int_tensors


# These change from step to step, and the strides with the number of groups: a form compiled for a 1 or a multiple of
# 16 would compile while serving.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "width",
        "block_table_group_stride",
        "block_table_stride",
        "out_group_stride",
        "out_stride",
    ]
)
def _block_table_gather_kernel(
    index_mapping,  # [num_reqs] int32
    block_table,  # [num_groups, max_num_seqs, max_blocks] int32
    num_blocks,  # [max_num_seqs] int32
    out,  # [num_groups, >= num_reqs, width] int32, written
    num_reqs,
    width,
    block_table_group_stride,  # items from one group to the next
    block_table_stride,  # items from one row to the next
    out_group_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    batch_index = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = tl.load(index_mapping + batch_index, mask=batch_index < num_reqs, other=0).to(tl.int64)
    held = tl.load(num_blocks + row, mask=batch_index < num_reqs, other=0)
    source = block_table + group * block_table_group_stride + row * block_table_stride
    target = out + group * out_group_stride + batch_index.to(tl.int64) * out_stride
    for first in range(0, width, BLOCK):
        block_index = first + lane
        block_id = tl.load(
            source + block_index, mask=(block_index < held) & (block_index < width), other=0
        )
        tl.store(target + block_index, block_id, mask=block_index < width)


def block_table_gather(
    index_mapping: torch.Tensor,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Gather block-table rows into batch order; everything else in `out` becomes 0.

    Shapes: index_mapping [num_reqs] int32; block_table [num_groups, max_num_seqs, max_blocks] int32; num_blocks
        [max_num_seqs] int32; out [num_groups, >= num_reqs, width <= max_blocks] int32, written. One group may come
        without its dimension, in both.
    Units: num_blocks is the blocks that a row holds, of each group.
    Example: index_mapping [7, 6], rows 7 = [37, 12] and 6 = [81, 44]: out [[37, 12], [81, 44]].
    Raises: ValueError for another dtype, or an `out` with other groups, too few rows or more columns than block_table.
    Source: DESIGN.md sections 1 and 4.
    """
    if block_table.dim() == 2 and out.dim() == 2:
        block_table, out = block_table[None], out[None]
    check_int_tensors(
        "block_table_gather",
        index_mapping=(index_mapping, torch.int32, 1),
        block_table=(block_table, torch.int32, 3),
        num_blocks=(num_blocks, torch.int32, 1),
        out=(out, torch.int32, 3),
    )
    num_reqs = index_mapping.shape[0]
    num_groups, num_rows, width = out.shape
    if num_groups != block_table.shape[0] or num_rows < num_reqs or width > block_table.shape[2]:
        raise ValueError(
            f"block_table_gather: out must have {block_table.shape[0]} groups of at least {num_reqs} rows and at most "
            f"{block_table.shape[2]} columns, got {tuple(out.shape)}"
        )
    if out.numel() == 0:
        return
    _block_table_gather_kernel[(num_rows, num_groups)](
        index_mapping,
        block_table,
        num_blocks,
        out,
        num_reqs,
        width,
        block_table.stride(0),
        block_table.stride(1),
        out.stride(0),
        out.stride(1),
        BLOCK=256,
    )


def block_table_gather_reference(
    index_mapping: torch.Tensor,
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """The same, a cell of all groups at a time."""
    out.zero_()
    for batch_index, row in enumerate(index_mapping.tolist()):
        for block_index in range(min(int(num_blocks[row]), out.shape[-1])):
            out[..., batch_index, block_index] = block_table[..., row, block_index]
