"""The inner loops of the paged-attention twin: scores of a turn's keys, their softmax, their values.

A tile's rows lie behind one another: `q` and `acc` [num_rows, head_dim], `scores` [num_rows, scores_stride], all flat.
A page of one head is block_size rows of head_dim items that begin at block_id * block_stride + head_offset.
"""

from __future__ import annotations

import numpy as np

from . import _numba
from ._views import prefetch, view_at

_FETCHING_ROWS = 6  # the rows of a tile among which fetching the next page is divided


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
def _item_of(position, block_row, block_stride, head_offset, block_size, head_dim):
    """Where the key or value at `position` begins in its cache, in items."""
    block_index = position // block_size
    block_offset = position - block_index * block_size
    return np.int64(block_row[block_index]) * block_stride + head_offset + block_offset * head_dim


@_numba.jit()
def _fetch(pages, item, num_items):
    """Start fetching num_items items: pages lie anywhere, so the processor cannot guess the next one itself.

    Little by little, between the products: the processor stops when it is asked for a whole page at once.
    """
    for line in range(0, num_items, 16):  # 16 items are 64 bytes, a cache line
        prefetch(pages, item + line)


@_numba.jit()
def _fetch_step(run, head_dim, num_rows):
    """How many items to fetch at each step of four keys, so that the first rows together fetch `run` rows of a page."""
    num_steps = max(1, run // 4) * ((min(num_rows, _FETCHING_ROWS) + 1) // 2)
    return (run * head_dim // num_steps + 15) // 16 * 16


@_numba.jit()
def _dot_two(keys, base, num_keys, head_dim, q, scores, scores_stride, pages, ahead, step):
    """The scores of two rows with num_keys keys in a row: four keys at a time, each read once for both rows."""
    q_a = view_at(q, 0, head_dim)
    q_b = view_at(q, head_dim, head_dim)
    j = 0
    while j + 4 <= num_keys:
        _fetch(pages, ahead, step)
        ahead += step
        k0 = view_at(keys, base + j * head_dim, head_dim)
        k1 = view_at(k0, head_dim, head_dim)
        k2 = view_at(k1, head_dim, head_dim)
        k3 = view_at(k2, head_dim, head_dim)
        a0 = a1 = a2 = a3 = np.float32(0)
        b0 = b1 = b2 = b3 = np.float32(0)
        for d in range(head_dim):
            x = q_a[d]
            y = q_b[d]
            a0 += x * k0[d]
            a1 += x * k1[d]
            a2 += x * k2[d]
            a3 += x * k3[d]
            b0 += y * k0[d]
            b1 += y * k1[d]
            b2 += y * k2[d]
            b3 += y * k3[d]
        a = view_at(scores, j, 4)
        b = view_at(scores, scores_stride + j, 4)
        a[0], a[1], a[2], a[3] = a0, a1, a2, a3
        b[0], b[1], b[2], b[3] = b0, b1, b2, b3
        j += 4
    while j < num_keys:
        k0 = view_at(keys, base + j * head_dim, head_dim)
        a0 = b0 = np.float32(0)
        for d in range(head_dim):
            a0 += q_a[d] * k0[d]
            b0 += q_b[d] * k0[d]
        view_at(scores, j, 1)[0] = a0
        view_at(scores, scores_stride + j, 1)[0] = b0
        j += 1


@_numba.jit()
def _dot_one(keys, base, num_keys, head_dim, q, scores, pages, ahead, step):
    """The same for one row."""
    j = 0
    while j + 4 <= num_keys:
        _fetch(pages, ahead, step)
        ahead += step
        k0 = view_at(keys, base + j * head_dim, head_dim)
        k1 = view_at(k0, head_dim, head_dim)
        k2 = view_at(k1, head_dim, head_dim)
        k3 = view_at(k2, head_dim, head_dim)
        a0 = a1 = a2 = a3 = np.float32(0)
        for d in range(head_dim):
            x = q[d]
            a0 += x * k0[d]
            a1 += x * k1[d]
            a2 += x * k2[d]
            a3 += x * k3[d]
        a = view_at(scores, j, 4)
        a[0], a[1], a[2], a[3] = a0, a1, a2, a3
        j += 4
    while j < num_keys:
        k0 = view_at(keys, base + j * head_dim, head_dim)
        a0 = np.float32(0)
        for d in range(head_dim):
            a0 += q[d] * k0[d]
        scores[j] = a0
        j += 1


@_numba.jit()
def _add_two(values, base, num_keys, head_dim, weights, weights_stride, acc, pages, ahead, step):
    """Add num_keys weighted values in a row to two rows of acc: four at a time, each read once for both rows."""
    acc_a = view_at(acc, 0, head_dim)
    acc_b = view_at(acc, head_dim, head_dim)
    j = 0
    while j + 4 <= num_keys:
        _fetch(pages, ahead, step)
        ahead += step
        v0 = view_at(values, base + j * head_dim, head_dim)
        v1 = view_at(v0, head_dim, head_dim)
        v2 = view_at(v1, head_dim, head_dim)
        v3 = view_at(v2, head_dim, head_dim)
        a = view_at(weights, j, 4)
        b = view_at(weights, weights_stride + j, 4)
        a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
        b0, b1, b2, b3 = b[0], b[1], b[2], b[3]
        for d in range(head_dim):
            x0 = v0[d]
            x1 = v1[d]
            x2 = v2[d]
            x3 = v3[d]
            acc_a[d] += (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
            acc_b[d] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
        j += 4
    while j < num_keys:
        v0 = view_at(values, base + j * head_dim, head_dim)
        a0 = view_at(weights, j, 1)[0]
        b0 = view_at(weights, weights_stride + j, 1)[0]
        for d in range(head_dim):
            acc_a[d] += a0 * v0[d]
            acc_b[d] += b0 * v0[d]
        j += 1


@_numba.jit()
def _add_one(values, base, num_keys, head_dim, weights, acc, pages, ahead, step):
    """The same for one row."""
    j = 0
    while j + 4 <= num_keys:
        _fetch(pages, ahead, step)
        ahead += step
        v0 = view_at(values, base + j * head_dim, head_dim)
        v1 = view_at(v0, head_dim, head_dim)
        v2 = view_at(v1, head_dim, head_dim)
        v3 = view_at(v2, head_dim, head_dim)
        a = view_at(weights, j, 4)
        a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
        for d in range(head_dim):
            acc[d] += (a0 * v0[d] + a1 * v1[d]) + (a2 * v2[d] + a3 * v3[d])
        j += 4
    while j < num_keys:
        v0 = view_at(values, base + j * head_dim, head_dim)
        a0 = weights[j]
        for d in range(head_dim):
            acc[d] += a0 * v0[d]
        j += 1


@_numba.jit()
def score_keys(
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
    q,
    scores,
    scores_stride,
):
    """scores[row, j] = q[row] . key at position first_key + j, for j < num_keys; values are fetched ahead, not read."""
    end = first_key + num_keys
    position = first_key
    while position < end:
        run = min(block_size - position % block_size, end - position)
        base = _item_of(position, block_row, k_block_stride, head_offset, block_size, head_dim)
        after = position + run
        step = _fetch_step(run, head_dim, num_rows)
        pages = keys
        if after < end:
            ahead = _item_of(after, block_row, k_block_stride, head_offset, block_size, head_dim)
        else:
            pages = values
            ahead = _item_of(
                first_key, block_row, v_block_stride, head_offset, block_size, head_dim
            )
        column = position - first_key
        for row in range(0, num_rows, 2):
            q_rows = view_at(q, row * head_dim, 2 * head_dim)
            s_rows = view_at(scores, row * scores_stride + column, run)
            if row + 1 < num_rows:
                _dot_two(
                    keys, base, run, head_dim, q_rows, s_rows, scores_stride, pages, ahead, step
                )
            else:
                _dot_one(keys, base, run, head_dim, q_rows, s_rows, pages, ahead, step)
            ahead += run // 4 * step
            if row + 2 >= _FETCHING_ROWS:
                step = np.int64(0)
        position = after


@_numba.jit()
def cap_scores(scores, first_seen, num_seen, cap_log2):
    """Bound a row's scores [first_seen, num_seen), in powers of two as cap_log2 is: cap * tanh(score / cap).

    Without overflow, as exp's argument is never above 0. Near 0, where 1 - exp(-2 |x|) cancels, Taylor's series: the
    first term left out is below 2**-26 of the sum.
    """
    for j in range(first_seen, num_seen):
        x = scores[j] / cap_log2
        size = abs(x)
        left = _exp2(size * np.float32(-2.8853900817779268))
        far = (np.float32(1) - left) / (np.float32(1) + left)
        square = x * x
        p = square * np.float32(62 / 2835) + np.float32(-17 / 315)
        p = p * square + np.float32(2 / 15)
        p = p * square + np.float32(-1 / 3)
        p = p * square + np.float32(1)
        size = size * p if size < np.float32(0.25) else far
        scores[j] = cap_log2 * (-size if x < np.float32(0) else size)


@_numba.jit()
def fold_softmax(
    scores, first_seen, num_seen, num_keys, running_max, running_sum, row, acc, head_dim
):
    """Turn a row's scores [first_seen, num_seen) into weights, the others into 0; rescale what earlier turns gave."""
    for j in range(min(first_seen, num_keys)):  # keys that this row's window has left
        scores[j] = np.float32(0)
    if num_seen > first_seen:
        seen = view_at(scores, first_seen, num_seen - first_seen)
        before = running_max[row]
        highest = before
        for j in range(num_seen - first_seen):
            highest = max(highest, seen[j])
        total = np.float32(0)
        for j in range(num_seen - first_seen):
            weight = _exp2(seen[j] - highest)
            seen[j] = weight
            total += weight
        if highest > before:
            running_max[row] = highest
            shrink = _exp2(before - highest)  # before the first turn there is only 0 to shrink
            running_sum[row] *= shrink
            for d in range(head_dim):
                acc[d] *= shrink
        running_sum[row] += total
    for j in range(num_seen, num_keys):  # keys behind this row's own token
        scores[j] = np.float32(0)


@_numba.jit()
def add_values(
    values,
    v_block_stride,
    head_offset,
    block_size,
    block_row,
    first_key,
    num_keys,
    head_dim,
    num_rows,
    weights,
    weights_stride,
    acc,
):
    """acc[row] += sum over j < num_keys of weights[row, j] * value at position first_key + j."""
    end = first_key + num_keys
    position = first_key
    while position < end:
        run = min(block_size - position % block_size, end - position)
        base = _item_of(position, block_row, v_block_stride, head_offset, block_size, head_dim)
        after = position + run
        step = np.int64(0)
        ahead = base
        if after < end:
            step = _fetch_step(run, head_dim, num_rows)
            ahead = _item_of(after, block_row, v_block_stride, head_offset, block_size, head_dim)
        column = position - first_key
        for row in range(0, num_rows, 2):
            w_rows = view_at(weights, row * weights_stride + column, run)
            acc_rows = view_at(acc, row * head_dim, 2 * head_dim)
            if row + 1 < num_rows:
                _add_two(
                    values,
                    base,
                    run,
                    head_dim,
                    w_rows,
                    weights_stride,
                    acc_rows,
                    values,
                    ahead,
                    step,
                )
            else:
                _add_one(values, base, run, head_dim, w_rows, acc_rows, values, ahead, step)
            ahead += run // 4 * step
            if row + 2 >= _FETCHING_ROWS:
                step = np.int64(0)
        position = after
