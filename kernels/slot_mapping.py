"""The KV slot that each token of this step is written to, for one KV group.

    slot_id = block_table[row, position // block_size] * block_size + position % block_size

program_id(0) is batch_index; one more program than requests writes -1 (no slot) behind the last token.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_int_tensors


# These change from step to step: a form compiled for a 1 or a multiple of 16 would compile while serving.
@triton.jit(do_not_specialize=["num_reqs", "num_out"])
def _slot_mapping_kernel(
    index_mapping,  # [num_reqs] int32
    query_start_loc,  # [num_reqs + 1] int32
    positions,  # [>= num_tokens] int64
    block_table,  # [max_num_seqs, max_blocks] int32
    out,  # [num_out] int64, written
    num_reqs,
    num_out,
    block_table_stride,  # items from one row to the next
    BLOCK_SIZE: tl.constexpr,  # tokens a block
    BLOCK: tl.constexpr,
):
    batch_index = tl.program_id(0)
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
    for first in range(start, end, BLOCK):
        flat_token = first + lane
        real = flat_token < end
        position = tl.load(positions + flat_token, mask=real, other=0)
        block_id = tl.load(
            block_table + row * block_table_stride + position // BLOCK_SIZE, mask=real, other=0
        )
        # int64 before the product: block 2**27 of 16 tokens already passes 2**31
        slot_id = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out + flat_token, slot_id, mask=real)


def slot_mapping(
    index_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
) -> None:
    """Find the KV slot that each token of this step is written to; -1 behind the last token.

    Shapes: index_mapping [num_reqs] int32; query_start_loc [num_reqs + 1] int32; positions, out [>= num_tokens] int64,
        in flat-token order, out is written; block_table [max_num_seqs, max_blocks] int32.
    Units: block_size is tokens; a slot is one token's K and V, not bytes.
    Example: block_size 16, block_table row 7 = [37, 12], position 31 -> slot 12 * 16 + 15 = 207.
    Raises: ValueError for another dtype, a query_start_loc of another length, or block_size below 1. That positions
        and out hold query_start_loc[-1] tokens is the caller's to know: asking the device would stop the stream.
    Source: DESIGN.md section 1.
    """
    check_int_tensors(
        "slot_mapping",
        index_mapping=(index_mapping, torch.int32, 1),
        query_start_loc=(query_start_loc, torch.int32, 1),
        positions=(positions, torch.int64, 1),
        block_table=(block_table, torch.int32, 2),
        out=(out, torch.int64, 1),
    )
    num_reqs = index_mapping.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"slot_mapping: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    if block_size < 1:
        raise ValueError(f"slot_mapping: block_size must be at least 1, got {block_size}")
    _slot_mapping_kernel[(num_reqs + 1,)](
        index_mapping,
        query_start_loc,
        positions,
        block_table,
        out,
        num_reqs,
        out.shape[0],
        block_table.stride(0),
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
) -> None:
    """The same, a token at a time."""
    out.fill_(-1)
    for batch_index, row in enumerate(index_mapping.tolist()):
        start, end = query_start_loc[batch_index : batch_index + 2].tolist()
        for flat_token in range(start, end):
            block_index, block_offset = divmod(int(positions[flat_token]), block_size)
            out[flat_token] = int(block_table[row, block_index]) * block_size + block_offset
