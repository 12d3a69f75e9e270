"""Numba twin of kernels/block_table_gather.py: same name, same parameters, NumPy arrays instead of tensors."""

from __future__ import annotations

import numpy as np

from . import _numba
from ._views import view_at


@_numba.jit("void(int32[::1], int32[:, :, :], int32[::1], int32[:, :, :])")
def _block_table_gather(index_mapping, block_table, num_blocks, out):
    num_reqs = index_mapping.shape[0]
    num_groups, num_rows, width = out.shape
    group_stride, row_stride = block_table.strides[0] // 4, block_table.strides[1] // 4
    out_group_stride, out_row_stride = out.strides[0] // 4, out.strides[1] // 4
    for group in range(num_groups):
        for batch_index in range(num_reqs):
            row = np.int64(index_mapping[batch_index])
            held = num_blocks[row]
            source = view_at(block_table, group * group_stride + row * row_stride, width)
            target = view_at(out, group * out_group_stride + batch_index * out_row_stride, width)
            # one loop without a branch: it vectorises, two short ones do not
            for block_index in range(width):
                target[block_index] = source[block_index] if block_index < held else np.int32(0)
        for batch_index in range(num_reqs, num_rows):
            target = view_at(out, group * out_group_stride + batch_index * out_row_stride, width)
            for block_index in range(width):
                target[block_index] = 0


def block_table_gather(
    index_mapping: np.ndarray,  # [num_reqs] int32
    block_table: np.ndarray,  # [num_groups, max_num_seqs, max_blocks] int32
    num_blocks: np.ndarray,  # [max_num_seqs] int32
    *,
    out: np.ndarray,  # [num_groups, >= num_reqs, width <= max_blocks] int32, written
) -> None:
    """See kernels/block_table_gather.py."""
    if block_table.ndim == 2 and out.ndim == 2:
        block_table, out = block_table[None], out[None]
    try:
        num_groups, num_rows, width = out.shape
        if (
            num_rows < index_mapping.shape[0]
            or width > block_table.shape[2]
            or num_groups != block_table.shape[0]
        ):
            raise ValueError(
                f"block_table_gather: out must have {block_table.shape[0]} groups of at least "
                f"{index_mapping.shape[0]} rows and at most {block_table.shape[2]} columns, got {out.shape}"
            )
        for name, array in (("block_table", block_table), ("out", out)):
            if array.strides[2] != array.itemsize and array.shape[2] > 1:
                raise ValueError(
                    f"block_table_gather: {name} must be packed in its last dimension, got strides {array.strides}"
                )
        _block_table_gather(index_mapping, block_table, num_blocks, out)
    except (TypeError, IndexError) as error:
        raise _numba.refuse(
            "block_table_gather",
            index_mapping=(index_mapping, "int32", 1),
            block_table=(block_table, "int32", 3),
            num_blocks=(num_blocks, "int32", 1),
            out=(out, "int32", 3),
        ) from error
