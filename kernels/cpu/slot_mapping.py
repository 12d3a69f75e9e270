"""Numba twin of kernels/slot_mapping.py: same name, same parameters, NumPy arrays instead of tensors."""

from __future__ import annotations

import numpy as np

from . import _numba
from ._views import view_at


@_numba.jit(
    "void(int32[::1], int32[::1], int64[::1], int32[:, :, :], int64, int64[:, :], int32[:, :, :])"
)
def _slot_mapping(
    index_mapping, query_start_loc, positions, block_table, block_size, out, gathered
):
    num_reqs = index_mapping.shape[0]
    num_groups, num_out = out.shape
    width = gathered.shape[2]
    group_stride, row_stride = block_table.strides[0] // 4, block_table.strides[1] // 4
    out_stride = out.strides[0] // 8
    gathered_stride, gathered_row_stride = gathered.strides[0] // 4, gathered.strides[1] // 4
    ids = view_at(block_table, 0, group_stride * num_groups)
    slots = view_at(out, 0, out_stride * num_groups)
    copies = view_at(gathered, 0, gathered_stride * num_groups)
    for batch_index in range(num_reqs):
        row = np.int64(index_mapping[batch_index])
        for flat_token in range(query_start_loc[batch_index], query_start_loc[batch_index + 1]):
            position = positions[flat_token]
            block_index = position // block_size
            block_offset = position - block_index * block_size
            # unsigned, so that no index is asked whether it counts from the end
            cell = np.uint64(row * row_stride + block_index)
            slot = np.uint64(flat_token)
            copy = np.uint64(batch_index * gathered_row_stride + block_index)
            for _ in range(num_groups):
                block_id = ids[cell]
                slots[slot] = np.int64(block_id) * block_size + block_offset
                if block_offset == 0 and block_index < width:
                    copies[copy] = block_id
                cell += np.uint64(group_stride)
                slot += np.uint64(out_stride)
                copy += np.uint64(gathered_stride)
    for group in range(num_groups):
        for flat_token in range(query_start_loc[num_reqs], num_out):
            slots[group * out_stride + flat_token] = -1


def slot_mapping(
    index_mapping: np.ndarray,  # [num_reqs] int32
    query_start_loc: np.ndarray,  # [num_reqs + 1] int32
    positions: np.ndarray,  # [>= num_tokens] int64
    block_table: np.ndarray,  # [num_groups, max_num_seqs, max_blocks] int32
    *,
    block_size: int,
    out: np.ndarray,  # [num_groups, >= num_tokens] int64, written
    gathered: np.ndarray | None = None,  # [num_groups, >= num_reqs, width] int32, written
) -> None:
    """See kernels/slot_mapping.py."""
    if block_table.ndim == 2 and out.ndim == 1:
        block_table, out = block_table[None], out[None]
        gathered = gathered if gathered is None else gathered[None]
    if (block_table.ndim, out.ndim) != (3, 2):
        raise ValueError(
            "slot_mapping: block_table and out must have 3 and 2 dimensions, or 2 and 1 for one group, got "
            f"{block_table.shape} and {out.shape}"
        )
    copies = block_table[:, :, :0] if gathered is None else gathered
    num_reqs = index_mapping.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"slot_mapping: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    num_tokens = query_start_loc[num_reqs]
    if out.shape[-1] < num_tokens or positions.shape[0] < num_tokens:
        raise ValueError(
            f"slot_mapping: positions and out must hold {num_tokens} tokens, "
            f"got {positions.shape[0]} and {out.shape[-1]}"
        )
    num_groups = block_table.shape[0]
    if out.shape[0] != num_groups or copies.shape[0] != num_groups or copies.shape[1] < num_reqs:
        raise ValueError(
            f"slot_mapping: out and gathered must have the {num_groups} groups of block_table, and gathered at least "
            f"{num_reqs} rows, got {out.shape} and {copies.shape}"
        )
    for name, array in (("block_table", block_table), ("out", out), ("gathered", copies)):
        if array.strides[-1] != array.itemsize and array.shape[-1] > 1:
            raise ValueError(
                f"slot_mapping: {name} must be packed in its last dimension, got strides {array.strides}"
            )
    if block_size < 1:
        raise ValueError(f"slot_mapping: block_size must be at least 1, got {block_size}")
    try:
        _slot_mapping(
            index_mapping, query_start_loc, positions, block_table, block_size, out, copies
        )
    except TypeError as error:
        raise _numba.refuse(
            "slot_mapping",
            index_mapping=(index_mapping, "int32", 1),
            query_start_loc=(query_start_loc, "int32", 1),
            positions=(positions, "int64", 1),
            block_table=(block_table, "int32", 3),
            out=(out, "int64", 2),
            gathered=(copies, "int32", 3),
        ) from error
