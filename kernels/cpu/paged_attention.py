"""Numba twin of kernels/paged_attention.py: same name, same parameters, NumPy arrays instead of tensors. float32 only.

It walks the pages where they lie. One work item is a KV head of a request and a tile of its query tokens: the tile's
rows are (token, head of the group), the keys come in chunks, and a running maximum and sum make the softmax exact.
Few rows (decode) take dot products against the pages; many rows (prefill, wide groups) first turn a chunk of keys
on its side, so that every inner loop runs along packed memory and needs no horizontal sum.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from . import _numba
from ._views import prefetch, view_at

_KEYS = 128  # keys a chunk: a turned chunk of head_dim 64 is 32 KiB
_ROWS = 48  # rows a tile, unless one token alone has more heads in its group
_TURN_FROM = 8  # rows from which turning the keys pays
_LOG2_E = math.log2(math.e)


@_numba.jit()
def _exp2(x):
    """2**x for float32 x <= 0, good to 2 units in the last place; the platform's own does not vectorise."""
    x = max(x, np.float32(-126.0))
    whole = np.int32(x - np.float32(0.5))  # cuts towards zero: the nearest integer, as x <= 0
    r = x - np.float32(whole)
    # Taylor's series of exp(r * ln 2), |r| <= 1/2: the first term left out is below 2**-24.
    p = np.float32(1.5403530e-4)
    p = p * r + np.float32(1.3333558e-3)
    p = p * r + np.float32(9.6181291e-3)
    p = p * r + np.float32(5.5504109e-2)
    p = p * r + np.float32(2.4022651e-1)
    p = p * r + np.float32(6.9314718e-1)
    p = p * r + np.float32(1.0)
    return p * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@_numba.jit()
def _dot_scores(keys, base, num_keys, head_dim, q, scores):
    """scores[j] = q . (the head_dim items of `keys` at base + j * head_dim), four keys at a time."""
    j = 0
    while j + 4 <= num_keys:
        k0 = view_at(keys, base + j * head_dim, head_dim)
        k1 = view_at(k0, head_dim, head_dim)
        k2 = view_at(k1, head_dim, head_dim)
        k3 = view_at(k2, head_dim, head_dim)
        s0 = np.float32(0)
        s1 = np.float32(0)
        s2 = np.float32(0)
        s3 = np.float32(0)
        for d in range(head_dim):
            x = q[d]
            s0 += x * k0[d]
            s1 += x * k1[d]
            s2 += x * k2[d]
            s3 += x * k3[d]
        four = view_at(scores, j, 4)
        four[0] = s0
        four[1] = s1
        four[2] = s2
        four[3] = s3
        j += 4
    while j < num_keys:
        k0 = view_at(keys, base + j * head_dim, head_dim)
        s0 = np.float32(0)
        for d in range(head_dim):
            s0 += q[d] * k0[d]
        scores[j] = s0
        j += 1


@_numba.jit()
def _add_rows(matrix, base, stride, count, weights, out, length):
    """out[x] += sum over j < count of weights[j] * matrix[base + j * stride + x], for x < length.

    Eight rows at a time, so that `out` is read and written once for eight multiply-adds.
    """
    j = 0
    while j + 8 <= count:
        a0 = view_at(matrix, base + j * stride, length)
        a1 = view_at(a0, stride, length)
        a2 = view_at(a1, stride, length)
        a3 = view_at(a2, stride, length)
        a4 = view_at(a3, stride, length)
        a5 = view_at(a4, stride, length)
        a6 = view_at(a5, stride, length)
        a7 = view_at(a6, stride, length)
        w = view_at(weights, j, 8)
        w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
        w4, w5, w6, w7 = w[4], w[5], w[6], w[7]
        for x in range(length):
            low = w0 * a0[x] + w1 * a1[x] + w2 * a2[x] + w3 * a3[x]
            high = w4 * a4[x] + w5 * a5[x] + w6 * a6[x] + w7 * a7[x]
            out[x] += low + high
        j += 8
    while j < count:
        a0 = view_at(matrix, base + j * stride, length)
        w0 = weights[j]
        for x in range(length):
            out[x] += w0 * a0[x]
        j += 1


@_numba.jit()
def _prefetch(pages, start, end):
    """Start fetching items [start, end): pages lie anywhere, so the processor never guesses the next one itself."""
    for item in range(start, end, 16):  # 64 bytes a cache line
        prefetch(pages, item)


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
    out,
    q_tile,
    scores,
    acc,
    turned,
    running_max,
    running_sum,
):
    """One work item: num_tile_tokens query tokens, the first at first_position, times `group` heads."""
    head_dim = query.shape[2]
    num_rows = num_tile_tokens * group
    row_items = (min(block_size, 64) * head_dim // num_rows + 15) // 16 * 16
    for row in range(num_rows):
        token = first_token + row // group
        head = first_head + row % group
        for d in range(head_dim):
            q_tile[row * head_dim + d] = query[token, head, d] * scale
            acc[row * head_dim + d] = np.float32(0)
        running_max[row] = np.float32(-np.inf)
        running_sum[row] = np.float32(0)

    limit = first_position + num_tile_tokens  # the tile's last token sees keys below this
    for chunk in range(0, limit, _KEYS):
        num_keys = min(_KEYS, limit - chunk)
        if num_rows < _TURN_FROM:
            done = 0
            while done < num_keys:
                block_index = (chunk + done) // block_size
                offset = chunk + done - block_index * block_size
                run = min(block_size - offset, num_keys - done)
                base = (
                    np.int64(block_row[block_index]) * k_block_stride
                    + head_offset
                    + offset * head_dim
                )
                if done + run < num_keys:
                    ahead = np.int64(block_row[block_index + 1]) * k_block_stride + head_offset
                else:
                    ahead = np.int64(block_row[chunk // block_size]) * v_block_stride + head_offset
                for row in range(num_rows):
                    if done + run < num_keys:
                        _prefetch(keys, ahead + row * row_items, ahead + (row + 1) * row_items)
                    else:
                        _prefetch(values, ahead + row * row_items, ahead + (row + 1) * row_items)
                    _dot_scores(
                        keys,
                        base,
                        run,
                        head_dim,
                        view_at(q_tile, row * head_dim, head_dim),
                        view_at(scores, row * _KEYS + done, run),
                    )
                done += run
        else:
            done = 0
            while done < num_keys:
                block_index = (chunk + done) // block_size
                offset = chunk + done - block_index * block_size
                run = min(block_size - offset, num_keys - done)
                base = (
                    np.int64(block_row[block_index]) * k_block_stride
                    + head_offset
                    + offset * head_dim
                )
                page = view_at(keys, base, run * head_dim)
                for d in range(head_dim):
                    column = view_at(turned, d * _KEYS + done, run)
                    for j in range(run):
                        column[j] = page[j * head_dim + d]
                done += run
            for j in range(num_rows * _KEYS):
                scores[j] = np.float32(0)
            for d in range(0, head_dim, 8):
                for row in range(num_rows):
                    _add_rows(
                        turned,
                        d * _KEYS,
                        _KEYS,
                        min(8, head_dim - d),
                        view_at(q_tile, row * head_dim + d, 8),
                        view_at(scores, row * _KEYS, num_keys),
                        num_keys,
                    )

        for row in range(num_rows):
            seen = max(0, min(num_keys, first_position + row // group + 1 - chunk))
            weights = view_at(scores, row * _KEYS, _KEYS)
            if seen > 0:
                before = running_max[row]
                highest = before
                for j in range(seen):
                    highest = max(highest, weights[j])
                total = np.float32(0)
                for j in range(seen):
                    weight = _exp2(weights[j] - highest)
                    weights[j] = weight
                    total += weight
                if highest > before:
                    running_max[row] = highest
                    shrink = _exp2(before - highest)  # 0 at the first chunk, to float32's last bits
                    running_sum[row] *= shrink
                    sums = view_at(acc, row * head_dim, head_dim)
                    for d in range(head_dim):
                        sums[d] *= shrink
                running_sum[row] += total
            for j in range(seen, num_keys):  # keys after this row's own token
                weights[j] = np.float32(0)

        done = 0
        while done < num_keys:
            block_index = (chunk + done) // block_size
            offset = chunk + done - block_index * block_size
            run = min(block_size - offset, num_keys - done)
            base = (
                np.int64(block_row[block_index]) * v_block_stride + head_offset + offset * head_dim
            )
            ahead = np.int64(0)
            if done + run < num_keys:
                ahead = np.int64(block_row[block_index + 1]) * v_block_stride + head_offset
            for row in range(num_rows):
                if ahead:
                    _prefetch(values, ahead + row * row_items, ahead + (row + 1) * row_items)
                _add_rows(
                    values,
                    base,
                    head_dim,
                    run,
                    view_at(scores, row * _KEYS + done, run),
                    view_at(acc, row * head_dim, head_dim),
                    head_dim,
                )
            done += run

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
    turned = np.empty(head_dim * _KEYS if max_rows >= _TURN_FROM else 0, np.float32)
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
                        out,
                        q_tile,
                        scores,
                        acc,
                        turned,
                        running_max,
                        running_sum,
                    )
                item += 1


_ARRAYS = (
    "float32[:, :, :], float32[:, :, :, :], float32[:, :, :, :], int32[:, :], int32[::1], int32[::1], "
    "float32, float32[:, :, :]"
)


@_numba.jit(f"void({_ARRAYS})")
def _serial(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, out):
    _share(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, out, 0, 1)


@_numba.jit(f"void({_ARRAYS}, int64)", parallel=True)
def _parallel(
    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, out, num_threads
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
    arguments = (
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale * _LOG2_E,
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
