"""Numba twin of kernels/paged_attention.py: same name, same parameters, NumPy arrays instead of tensors. float32 only.

It walks the pages where they lie. One work item is a KV head of a request and a tile of its query tokens: the tile's
rows are (token, head of the group), the keys come in turns, and a running maximum and sum make the softmax exact.
Rows go in pairs, so that what is read of a page serves two of them. The loops are in `_paged_rows.py`. Window, chunk
and soft cap are plain numbers here: they choose where loops begin or end, and one compiled form serves every layer.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from . import _numba
from ._paged_rows import add_values, cap_scores, fold_softmax, score_keys
from ._views import view_at

_KEYS = 128  # keys a turn: a turn's scores of a whole tile are 24 KiB
_ROWS = 48  # rows a tile, unless one token alone has more heads in its group
_LOG2_E = math.log2(math.e)


@_numba.jit()
def _first_visible(position, window, chunk):
    """The first key that the token at `position` sees."""
    if window > 0:
        return max(np.int64(0), position - window + 1)
    if chunk > 0:
        return position // chunk * chunk
    return np.int64(0)


@_numba.jit()
def _attend(
    query,
    keys,
    values,
    k_block_stride,
    v_block_stride,
    head_offset,
    block_size,
    block_row,
    first_token,
    num_tile_tokens,
    first_position,
    first_head,
    group,
    scale,
    window,
    chunk,
    cap_log2,
    out,
    q_tile,
    scores,
    acc,
    running_max,
    running_sum,
):
    """One work item: num_tile_tokens query tokens, the first at first_position, times `group` heads."""
    head_dim = query.shape[2]
    num_rows = num_tile_tokens * group
    for row in range(num_rows):
        token = first_token + row // group
        head = first_head + row % group
        for d in range(head_dim):
            q_tile[row * head_dim + d] = query[token, head, d] * scale
            acc[row * head_dim + d] = np.float32(0)
        running_max[row] = np.float32(-np.inf)
        running_sum[row] = np.float32(0)

    limit = first_position + num_tile_tokens  # the tile's last token sees keys below this
    first_key = _first_visible(first_position, window, chunk)  # of the tile's first token
    while first_key < limit:
        # to a multiple of _KEYS, so that a window's turns cut few pages in two
        num_keys = min(_KEYS - first_key % _KEYS, limit - first_key)
        score_keys(
            keys,
            k_block_stride,
            values,
            v_block_stride,
            head_offset,
            block_size,
            block_row,
            first_key,
            num_keys,
            head_dim,
            num_rows,
            q_tile,
            scores,
            _KEYS,
        )
        for row in range(num_rows):
            position = first_position + row // group
            first_seen = max(0, _first_visible(position, window, chunk) - first_key)
            num_seen = max(0, min(num_keys, position + 1 - first_key))
            weights = view_at(scores, row * _KEYS, _KEYS)
            if cap_log2 > 0:
                cap_scores(weights, first_seen, num_seen, cap_log2)
            sums = view_at(acc, row * head_dim, head_dim)
            fold_softmax(
                weights,
                first_seen,
                num_seen,
                num_keys,
                running_max,
                running_sum,
                row,
                sums,
                head_dim,
            )
        add_values(
            values,
            v_block_stride,
            head_offset,
            block_size,
            block_row,
            first_key,
            num_keys,
            head_dim,
            num_rows,
            scores,
            _KEYS,
            acc,
        )
        first_key += num_keys

    for row in range(num_rows):
        token = first_token + row // group
        head = first_head + row % group
        inverse = np.float32(1) / running_sum[row]
        for d in range(head_dim):
            out[token, head, d] = acc[row * head_dim + d] * inverse


@_numba.jit()
def _share(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    window,
    chunk,
    cap_log2,
    out,
    share,
    num_shares,
):
    """Every num_shares-th work item from `share` on: dealt out in turn, as later prefill tiles see more keys."""
    head_dim = query.shape[2]
    num_kv_heads = key_cache.shape[1]
    block_size = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    k_block_stride = key_cache.strides[0] // 4
    v_block_stride = value_cache.strides[0] // 4
    keys = view_at(
        key_cache,
        0,
        (key_cache.shape[0] - 1) * k_block_stride + num_kv_heads * block_size * head_dim,
    )
    values = view_at(
        value_cache,
        0,
        (key_cache.shape[0] - 1) * v_block_stride + num_kv_heads * block_size * head_dim,
    )

    tile_tokens = max(1, _ROWS // group)
    longest = 0
    for batch_index in range(seq_lens.shape[0]):
        longest = max(longest, query_start_loc[batch_index + 1] - query_start_loc[batch_index])
    max_rows = min(longest, tile_tokens) * group
    q_tile = np.empty(max_rows * head_dim, np.float32)
    acc = np.empty(max_rows * head_dim, np.float32)
    scores = np.empty(max_rows * _KEYS, np.float32)
    running_max = np.empty(max_rows, np.float32)
    running_sum = np.empty(max_rows, np.float32)

    item = 0
    for batch_index in range(seq_lens.shape[0]):
        start = np.int64(query_start_loc[batch_index])
        query_len = np.int64(query_start_loc[batch_index + 1]) - start
        seq_len = np.int64(seq_lens[batch_index])
        if seq_len == 0:
            continue
        for first in range(0, query_len, tile_tokens):
            for kv_head in range(num_kv_heads):
                if item % num_shares == share:
                    _attend(
                        query,
                        keys,
                        values,
                        k_block_stride,
                        v_block_stride,
                        kv_head * block_size * head_dim,
                        block_size,
                        block_table[batch_index],
                        start + first,
                        min(tile_tokens, query_len - first),
                        seq_len - query_len + first,
                        kv_head * group,
                        group,
                        scale,
                        window,
                        chunk,
                        cap_log2,
                        out,
                        q_tile,
                        scores,
                        acc,
                        running_max,
                        running_sum,
                    )
                item += 1


_ARRAYS = (
    "float32[:, :, :], float32[:, :, :, :], float32[:, :, :, :], int32[:, :], int32[::1], int32[::1], "
    "float32, int64, int64, float32, float32[:, :, :]"
)


@_numba.jit(f"void({_ARRAYS})")
def _serial(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    window,
    chunk,
    cap_log2,
    out,
):
    _share(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        window,
        chunk,
        cap_log2,
        out,
        0,
        1,
    )


@_numba.jit(f"void({_ARRAYS}, int64)", parallel=True)
def _parallel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    window,
    chunk,
    cap_log2,
    out,
    num_threads,
):
    for share in numba.prange(num_threads):
        _share(
            query,
            key_cache,
            value_cache,
            block_table,
            seq_lens,
            query_start_loc,
            scale,
            window,
            chunk,
            cap_log2,
            out,
            share,
            num_threads,
        )


def paged_attention(
    query: np.ndarray,  # [num_tokens, num_heads, head_dim] float32
    key_cache: np.ndarray,  # [num_blocks, num_kv_heads, block_size, head_dim] float32
    value_cache: np.ndarray,  # like key_cache
    block_table: np.ndarray,  # [num_reqs, max_blocks] int32
    seq_lens: np.ndarray,  # [num_reqs] int32
    query_start_loc: np.ndarray,  # [num_reqs + 1] int32
    *,
    scale: float,
    out: np.ndarray,  # [num_tokens, num_heads, head_dim] float32, written
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> None:
    """See kernels/paged_attention.py."""
    num_reqs = seq_lens.shape[0]
    if (
        key_cache.ndim != 4
        or value_cache.shape != key_cache.shape
        or not _numba.is_packed(key_cache)
        or not _numba.is_packed(value_cache)
    ):
        raise ValueError(
            "paged_attention: key_cache and value_cache must be [num_blocks, num_kv_heads, block_size, "
            f"head_dim], packed behind the first dimension, got {key_cache.shape} and "
            f"{value_cache.shape} with strides {key_cache.strides} and {value_cache.strides}"
        )
    _, num_kv_heads, _, head_dim = key_cache.shape
    num_heads = query.shape[1]
    if query.shape[2] != head_dim or num_heads % num_kv_heads or out.shape != query.shape:
        raise ValueError(
            f"paged_attention: query and out must be [num_tokens, a multiple of {num_kv_heads}, "
            f"{head_dim}] as the cache says, got {query.shape} and {out.shape}"
        )
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"paged_attention: {num_reqs} seq_lens need {num_reqs + 1} query_start_loc and "
            f"{num_reqs} block_table rows, got {query_start_loc.shape[0]} and {block_table.shape[0]}"
        )
    if query_start_loc[num_reqs] > query.shape[0]:
        raise ValueError(
            f"paged_attention: query must hold {query_start_loc[num_reqs]} tokens, got {query.shape[0]}"
        )
    if window < 0 or chunk < 0 or (window and chunk):
        raise ValueError(
            f"paged_attention: at most one of window and chunk may be above 0, got {window} and {chunk}"
        )
    if not 0 <= softcap < math.inf:
        raise ValueError(f"paged_attention: softcap must be a number, 0 or above, got {softcap}")
    arguments = (
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale * _LOG2_E,
        window,
        chunk,
        softcap * _LOG2_E,
        out,
    )
    threads = _numba.get_threads()
    try:
        if threads == 1:
            _serial(*arguments)
        else:
            with _numba.parallel_lock:
                numba.set_num_threads(threads)  # Numba keeps the count per calling thread
                _parallel(*arguments, threads)
    except TypeError as error:
        raise _numba.refuse(
            "paged_attention",
            query=(query, "float32", 3),
            key_cache=(key_cache, "float32", 4),
            value_cache=(value_cache, "float32", 4),
            block_table=(block_table, "int32", 2),
            seq_lens=(seq_lens, "int32", 1),
            query_start_loc=(query_start_loc, "int32", 1),
            out=(out, "float32", 3),
        ) from error
