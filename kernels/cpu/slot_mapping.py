"""Numba twin of kernels/slot_mapping.py: same name, same parameters, NumPy arrays instead of tensors."""

from __future__ import annotations

import numpy as np

from . import _numba


@_numba.jit("void(int32[::1], int32[::1], int64[::1], int32[:, :], int64, int64[::1])")
def _slot_mapping(index_mapping, query_start_loc, positions, block_table, block_size, out):
    num_reqs = index_mapping.shape[0]
    for batch_index in range(num_reqs):
        row = index_mapping[batch_index]
        for flat_token in range(query_start_loc[batch_index], query_start_loc[batch_index + 1]):
            position = positions[flat_token]
            block_index = position // block_size
            block_id = np.int64(block_table[row, block_index])
            out[flat_token] = block_id * block_size + (position - block_index * block_size)
    out[query_start_loc[num_reqs] :] = -1


def slot_mapping(
    index_mapping: np.ndarray,  # [num_reqs] int32
    query_start_loc: np.ndarray,  # [num_reqs + 1] int32
    positions: np.ndarray,  # [>= num_tokens] int64
    block_table: np.ndarray,  # [max_num_seqs, max_blocks] int32
    *,
    block_size: int,
    out: np.ndarray,  # [>= num_tokens] int64, written
) -> None:
    """See kernels/slot_mapping.py."""
    num_reqs = index_mapping.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"slot_mapping: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    num_tokens = query_start_loc[num_reqs]
    if out.shape[0] < num_tokens or positions.shape[0] < num_tokens:
        raise ValueError(
            f"slot_mapping: positions and out must hold {num_tokens} tokens, "
            f"got {positions.shape[0]} and {out.shape[0]}"
        )
    if block_size < 1:
        raise ValueError(f"slot_mapping: block_size must be at least 1, got {block_size}")
    try:
        _slot_mapping(index_mapping, query_start_loc, positions, block_table, block_size, out)
    except TypeError as error:
        raise _numba.refuse(
            "slot_mapping",
            index_mapping=(index_mapping, "int32", 1),
            query_start_loc=(query_start_loc, "int32", 1),
            positions=(positions, "int64", 1),
            block_table=(block_table, "int32", 2),
            out=(out, "int64", 1),
        ) from error
