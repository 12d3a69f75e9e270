"""Numba twin of kernels/block_table_gather.py: same name, same parameters, NumPy arrays instead of tensors."""

from __future__ import annotations

import numpy as np

from . import _numba
from ._views import view_at


@_numba.jit("void(int32[::1], int32[:, :], int32[::1], int32[:, :])")
def _block_table_gather(index_mapping, block_table, num_blocks, out):
    num_reqs = index_mapping.shape[0]
    width = out.shape[1]
    for batch_index in range(num_reqs):
        row = np.int64(index_mapping[batch_index])
        held = num_blocks[row]
        source = view_at(block_table, row * (block_table.strides[0] // 4), width)
        target = view_at(out, batch_index * (out.strides[0] // 4), width)
        for block_index in range(
            width
        ):  # one loop without a branch: it vectorises, two short ones do not
            target[block_index] = source[block_index] if block_index < held else np.int32(0)
    for batch_index in range(num_reqs, out.shape[0]):
        target = view_at(out, batch_index * (out.strides[0] // 4), width)
        for block_index in range(width):
            target[block_index] = 0


def block_table_gather(
    index_mapping: np.ndarray,  # [num_reqs] int32
    block_table: np.ndarray,  # [max_num_seqs, max_blocks] int32
    num_blocks: np.ndarray,  # [max_num_seqs] int32
    *,
    out: np.ndarray,  # [>= num_reqs, width <= max_blocks] int32, written
) -> None:
    """See kernels/block_table_gather.py."""
    if out.shape[0] < index_mapping.shape[0] or out.shape[1] > block_table.shape[1]:
        raise ValueError(
            f"block_table_gather: out must have at least {index_mapping.shape[0]} rows and "
            f"at most {block_table.shape[1]} columns, got {out.shape}"
        )
    for name, array in (("block_table", block_table), ("out", out)):
        if not _numba.is_packed(array):
            raise ValueError(
                f"block_table_gather: {name} must be packed in its last dimension, got strides {array.strides}"
            )
    try:
        _block_table_gather(index_mapping, block_table, num_blocks, out)
    except TypeError as error:
        raise _numba.refuse(
            "block_table_gather",
            index_mapping=(index_mapping, "int32", 1),
            block_table=(block_table, "int32", 2),
            num_blocks=(num_blocks, "int32", 1),
            out=(out, "int32", 2),
        ) from error
