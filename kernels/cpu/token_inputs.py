"""Numba twin of kernels/token_inputs.py: same name, same parameters, NumPy arrays instead of tensors."""

from __future__ import annotations

import numpy as np

from . import _numba


@_numba.jit(
    "void(int32[::1], int32[::1], int32[::1], int32[:, :], int32[::1], int64[::1], int32[::1])"
)
def _token_inputs(
    index_mapping,
    query_start_loc,
    num_computed_tokens,
    token_ids,
    input_ids,
    positions,
    seq_lens,
):
    num_reqs = index_mapping.shape[0]
    for batch_index in range(num_reqs):
        row = index_mapping[batch_index]
        start = query_start_loc[batch_index]
        query_len = query_start_loc[batch_index + 1] - start
        computed = num_computed_tokens[row]
        if query_len == 0:  # a padded request: its row is not to be trusted
            seq_lens[batch_index] = 0
            continue
        seq_lens[batch_index] = computed + query_len
        for offset in range(query_len):
            positions[start + offset] = computed + offset
            input_ids[start + offset] = token_ids[row, computed + offset]
    num_tokens = query_start_loc[num_reqs]
    input_ids[num_tokens:] = 0
    positions[num_tokens:] = 0
    seq_lens[num_reqs:] = 0


def token_inputs(
    index_mapping: np.ndarray,  # [num_reqs] int32
    query_start_loc: np.ndarray,  # [num_reqs + 1] int32
    num_computed_tokens: np.ndarray,  # [max_num_seqs] int32
    token_ids: np.ndarray,  # [max_num_seqs, max_model_len] int32
    *,
    input_ids: np.ndarray,  # [>= num_tokens] int32, written
    positions: np.ndarray,  # [>= num_tokens] int64, written
    seq_lens: np.ndarray,  # [>= num_reqs] int32, written
) -> None:
    """See kernels/token_inputs.py."""
    num_reqs = index_mapping.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1:
        raise ValueError(
            f"token_inputs: query_start_loc must have {num_reqs + 1} entries, got {query_start_loc.shape[0]}"
        )
    num_tokens = query_start_loc[num_reqs]
    if input_ids.shape[0] < num_tokens or positions.shape[0] < num_tokens:
        raise ValueError(
            f"token_inputs: input_ids and positions must hold {num_tokens} tokens, "
            f"got {input_ids.shape[0]} and {positions.shape[0]}"
        )
    if seq_lens.shape[0] < num_reqs:
        raise ValueError(
            f"token_inputs: seq_lens must hold {num_reqs} requests, got {seq_lens.shape[0]}"
        )
    try:
        _token_inputs(
            index_mapping,
            query_start_loc,
            num_computed_tokens,
            token_ids,
            input_ids,
            positions,
            seq_lens,
        )
    except TypeError as error:
        raise _numba.refuse(
            "token_inputs",
            index_mapping=(index_mapping, "int32", 1),
            query_start_loc=(query_start_loc, "int32", 1),
            num_computed_tokens=(num_computed_tokens, "int32", 1),
            token_ids=(token_ids, "int32", 2),
            input_ids=(input_ids, "int32", 1),
            positions=(positions, "int64", 1),
            seq_lens=(seq_lens, "int32", 1),
        ) from error
