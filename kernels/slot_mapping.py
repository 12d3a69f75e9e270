"""The KV slot that each token of this step is written to, for the KV groups of one block size.

    slot_id = block_table[group, row, position // block_size] * block_size + position % block_size

program_id(0) is batch_index, program_id(1) the group; one more program than requests writes -1 (no slot) behind the
last token.
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
        "num_out",
        "width",
        "block_table_group_stride",
        "out_group_stride",
        "gathered_group_stride",
        "gathered_stride",
    ]
)
def _slot_mapping_kernel(
    index_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    positions,  # [>= num_tokens] int64
    block_table,  # [num_groups, max_num_seqs, max_blocks] int32
    out,  # [num_groups, num_out] int64, written
    gathered,  # [num_groups, >= num_reqs, width] int32, blocks that begin in this step are written
    num_reqs,
    num_out,
    width,  # 0: nothing is gathered
    block_table_group_stride,  # items from one group to the next
    block_table_stride,  # items from one row to the next
    out_group_stride,
    gathered_group_stride,
    gathered_stride,
    BLOCK_SIZE: tl.constexpr,  # tokens a block
    BLOCK: tl.constexpr,
):
    batch_index = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    out += group * out_group_stride
    lane = tl.arange(0, BLOCK)
    if batch_index == num_reqs:
        num_tokens = tl.load(query_start_loc + num_reqs)
        for first in range(num_tokens, num_out, BLOCK):
            index = first + lane
            tl.store(out + index, tl.full([BLOCK], -1, tl.int64), mask=index < num_out)
        return
    start = tl.load(query_start_loc + batch_index)
    end = tl.load(query_start_loc + batch_index + 1)
    if start == end:
        return
    row = tl.load(index_mapping + batch_index).to(tl.int64)
    ids = block_table + group * block_table_group_stride + row * block_table_stride
    copies = gathered + group * gathered_group_stride + batch_index.to(tl.int64) * gathered_stride
    for first in range(start, end, BLOCK):
        flat_token = first + lane
        real = flat_token < end
        position = tl.load(positions + flat_token, mask=real, other=0)
        block_index = position // BLOCK_SIZE
        block_id = tl.load(ids + block_index, mask=real, other=0)
        # int64 before the product: block 2**27 of 16 tokens already passes 2**31
        slot_id = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out + flat_token, slot_id, mask=real)
        begins = real & (position % BLOCK_SIZE == 0) & (block_index < width)
        tl.store(copies + block_index, block_id, mask=begins)


def slot_mapping(
    index_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
    gathered: torch.Tensor | None = None,
) -> None:
    """Find the KV slot that each token of this step is written to; -1 behind the last token.

    Shapes: index_mapping [num_reqs] int32; query_start_loc [num_reqs + 1] int32; positions [>= num_tokens] int64, in
        flat-token order; block_table [num_groups, max_num_seqs, max_blocks] int32; out [num_groups, >= num_tokens]
        int64, written. One group may come without its dimension.
    gathered: None, or what block_table_gather made of the same index_mapping for the step before, [num_groups,
        >= num_reqs, width] int32: a block whose first token is in this step is put into its cell. Those are all
        blocks that a step adds, so a batch that is that of the step before needs no other gathering.
    Units: block_size is tokens; a slot is one token's K and V, not bytes.
    Example: block_size 16, block_table row 7 = [37, 12], position 31 -> slot 12 * 16 + 15 = 207.
    Raises: ValueError for another dtype, a query_start_loc of another length, groups that do not match, or block_size
        below 1. That positions and out hold query_start_loc[-1] tokens is the caller's to know: asking the device
        would stop the stream.
    Source: DESIGN.md section 1.
    """
    if block_table.dim() == 2 and out.dim() == 1:
        block_table, out = block_table[None], out[None]
        gathered = gathered if gathered is None else gathered[None]
    if (block_table.dim(), out.dim()) != (3, 2):
        raise ValueError(
            "slot_mapping: block_table and out must have 3 and 2 dimensions, or 2 and 1 for one group, got "
            f"{tuple(block_table.shape)} and {tuple(out.shape)}"
        )
    copies = block_table[:, :, :0] if gathered is None else gathered
    check_int_tensors(
        "slot_mapping",
        index_mapping=(index_mapping, torch.int32, 1),
        query_start_loc=(query_start_loc, torch.int32, 1),
        positions=(positions, torch.int64, 1),
        block_table=(block_table, torch.int32, 3),
        out=(out, torch.int64, 2),
        gathered=(copies, torch.int32, 3),
    )
    num_reqs = index_mapping.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"slot_mapping: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    num_groups = block_table.shape[0]
    if out.shape[0] != num_groups or copies.shape[0] != num_groups or copies.shape[1] < num_reqs:
        raise ValueError(
            f"slot_mapping: out and gathered must have the {num_groups} groups of block_table, and gathered at least "
            f"{num_reqs} rows, got {tuple(out.shape)} and {tuple(copies.shape)}"
        )
    if block_size < 1:
        raise ValueError(f"slot_mapping: block_size must be at least 1, got {block_size}")
    _slot_mapping_kernel[(num_reqs + 1, num_groups)](
        index_mapping,
        query_start_loc,
        positions,
        block_table,
        out,
        copies,
        num_reqs,
        out.shape[1],
        copies.shape[2],
        block_table.stride(0),
        block_table.stride(1),
        out.stride(0),
        copies.stride(0),
        copies.stride(1),
        BLOCK_SIZE=block_size,
        BLOCK=256,
    )


def slot_mapping_reference(
    index_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
    gathered: torch.Tensor | None = None,
) -> None:
    """The same, a token at a time."""
    if block_table.dim() == 2:
        block_table, out = block_table[None], out[None]
        gathered = gathered if gathered is None else gathered[None]
    out.fill_(-1)
    for group in range(block_table.shape[0]):
        for batch_index, row in enumerate(index_mapping.tolist()):
            start, end = query_start_loc[batch_index : batch_index + 2].tolist()
            for flat_token in range(start, end):
                block_index, block_offset = divmod(int(positions[flat_token]), block_size)
                block_id = int(block_table[group, row, block_index])
                out[group, flat_token] = block_id * block_size + block_offset
                if gathered is not None and block_offset == 0 and block_index < gathered.shape[2]:
                    gathered[group, batch_index, block_index] = block_id
