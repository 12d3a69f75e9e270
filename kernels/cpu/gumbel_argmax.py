"""Numba twin of kernels/gumbel_argmax.py: same name, same parameters, NumPy arrays. float32 only.

Two logarithms an id would take ten times what reading it does, and of 100,000 ids a handful can win. So the ids go by
in blocks. A block's highest score says how large the noise must be to beat the best so far, hence how small `bits` must
be: noise <= -log(u). Only a block whose smallest `bits` is small enough is looked at id by id. The hot loop is
comparisons and integer arithmetic, which the compiler turns into vectors; it tells NaN and -0.0 from their bits.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .. import _noise
from . import _numba
from ._logits import NO_KEY, check_rows, key_of, order_of
from ._views import view_at

_BLOCK = 128

_GOLDEN = np.uint64(_noise.GOLDEN)
_MULTIPLIER_0, _MULTIPLIER_1 = (np.uint64(value) for value in _noise.MULTIPLIERS)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (np.uint64(value) for value in _noise.SHIFTS)
_LOWEST_U, _HIGHEST_U = np.float32(_noise.LOWEST_U), np.float32(_noise.HIGHEST_U)
_SQRT_HALF_BITS = np.int32(_noise.SQRT_HALF_BITS)
_COEFFICIENTS = tuple(np.float32(value) for value in _noise.LOG_COEFFICIENTS)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(_noise.LOG_2_HIGH), np.float32(_noise.LOG_2_LOW)
_HALF, _ONE = np.float32(0.5), np.float32(1)
_2_TO_64 = 2.0**64
_HIGHEST_NOISE = 44.0  # -log(2**-63) is 43.67
# The order of -inf. Counted from there without a sign, +inf is this high, and NaN of either sign is higher.
_LOWEST_ORDER = np.int32(-0x7F800001)
_HEIGHT = np.uint32(0x7F800000 + 0x7F800001)


@_numba.jit("uint64(uint64)", exact=True)
def _mix(z):
    z = (z ^ (z >> _SHIFT_0)) * _MULTIPLIER_0
    z = (z ^ (z >> _SHIFT_1)) * _MULTIPLIER_1
    return z ^ (z >> _SHIFT_2)


@_numba.jit("float32(float32)", exact=True)
def _log(x):
    bits = np.float32(x).view(np.int32)
    k = np.int32((bits - _SQRT_HALF_BITS) >> np.int32(23))
    f = np.int32(bits - (k << np.int32(23))).view(np.float32) - _ONE
    exponent = np.float32(k)
    p = _COEFFICIENTS[0]
    for place in range(1, 8):
        p = p * f + _COEFFICIENTS[place]
    square = f * f
    tail = (p * f) * square + exponent * _LOG_2_LOW - _HALF * square
    return (f + tail) + exponent * _LOG_2_HIGH


@_numba.jit("float32(uint64)", exact=True)
def _gumbel(bits):
    u = np.float32(np.int64(bits >> np.uint64(1))) * _LOWEST_U
    u = min(max(u, _LOWEST_U), _HIGHEST_U)
    w = _ONE - u
    return -_log(-(_log(w) + ((_ONE - w) - u)))


@_numba.jit("float64(float32, float32, float32)", exact=True)
def _most_bits(highest, temperature, best):
    """The largest `bits` with which a logit of at most `highest` may beat `best`; -1.0 if none can."""
    bound = np.float64(highest / temperature)
    distance = np.float64(best) - bound
    # what rounding of the sum and of the noise may add
    distance -= 1e-3 + 1e-6 * (abs(bound) + abs(np.float64(best)))
    if distance > 0:
        return _2_TO_64 * math.exp(-distance) if distance < _HIGHEST_NOISE else -1.0
    return _2_TO_64  # also where infinities or NaN say nothing


@_numba.jit("int64(float32[::1], int32[::1], float32, uint64, int64, int64)", exact=True)
def _best_of_row(logits, logit_bits, temperature, stream, below, first_id):
    """logit_bits are the same memory as logits."""
    num_ids = len(logits)
    best_key, best = NO_KEY, np.float32(-np.inf)
    for start in range(0, num_ids, _BLOCK):
        stop = min(start + _BLOCK, num_ids)
        highest = np.uint32(0)
        for place in range(start, stop):
            highest = max(highest, np.uint32(order_of(logit_bits[place]) - _LOWEST_ORDER))
        most = np.uint64(2**64 - 1)
        if best_key != NO_KEY and highest <= _HEIGHT:
            highest_logit = np.int32(order_of(np.int32(highest + _LOWEST_ORDER))).view(np.float32)
            if temperature == 0:
                if highest_logit <= best:
                    continue
            else:
                limit = _most_bits(highest_logit, temperature, best)
                if limit < 0:
                    continue
                if limit < _2_TO_64:
                    most = np.uint64(limit)
                    least = np.uint64(2**64 - 1)
                    for place in range(start, stop):
                        least = min(
                            least, _mix(stream + np.uint64(np.int64(first_id + place)) * _GOLDEN)
                        )
                    if least > most:
                        continue
        for place in range(start, stop):
            score = logits[place]
            if temperature > 0:
                bits = _mix(stream + np.uint64(np.int64(first_id + place)) * _GOLDEN)
                if bits > most:
                    continue
                score = score / temperature + _gumbel(bits)
            key = key_of(score, np.int64(first_id + place))
            if best_key < key < below:
                best_key, best = key, score
    return best_key


_SIGNATURE = (
    "void(float32[:, :], int32[:, :], int32[::1], float32[::1], int64[::1], int64[::1], int64, "
    "int64[::1])"
)


@_numba.jit(_SIGNATURE, exact=True)
def _serial(logits, logit_bits, rows, temperature, streams, below, first_id, out):
    for place in range(len(rows)):
        start = rows[place] * (logits.strides[0] // 4)
        out[place] = _best_of_row(
            view_at(logits, start, logits.shape[1]),
            view_at(logit_bits, start, logits.shape[1]),
            temperature[place],
            np.uint64(streams[place]),
            below[place],
            first_id,
        )


@_numba.jit(_SIGNATURE, exact=True, parallel=True)
def _parallel(logits, logit_bits, rows, temperature, streams, below, first_id, out):
    for place in numba.prange(len(rows)):
        start = rows[place] * (logits.strides[0] // 4)
        out[place] = _best_of_row(
            view_at(logits, start, logits.shape[1]),
            view_at(logit_bits, start, logits.shape[1]),
            temperature[place],
            np.uint64(streams[place]),
            below[place],
            first_id,
        )


@_numba.jit(
    "void(float32[:, :], int64[:, :], int32[::1], float32[::1], int64[::1], int64[::1], int64[::1])",
    exact=True,
)
def _listed(logits, ids, rows, temperature, streams, below, out):
    """Few ids a row, whose order says nothing: each with its noise."""
    for place in range(len(rows)):
        row = rows[place]
        best = NO_KEY
        for column in range(logits.shape[1]):
            score, id_ = logits[row, column], ids[row, column]
            if temperature[place] > 0:
                bits = _mix(np.uint64(streams[place]) + np.uint64(id_) * _GOLDEN)
                score = score / temperature[place] + _gumbel(bits)
            key = key_of(score, id_)
            if best < key < below[place]:
                best = key
        out[place] = best


def gumbel_argmax(
    logits: np.ndarray,  # [num_rows, num_ids] float32, packed behind the first dimension
    rows: np.ndarray,  # [n] int32
    temperature: np.ndarray,  # [n] float32, 0 is greedy
    streams: np.ndarray,  # [n] int64
    *,
    out: np.ndarray,  # [n] int64, written
    first_id: int = 0,
    ids: np.ndarray
    | None = None,  # [num_rows, num_ids] int64, None for first_id, first_id + 1, ...
    below: np.ndarray | None = None,  # [n] int64
) -> None:
    """See kernels/gumbel_argmax.py."""
    if below is None:
        below = np.full(len(rows), 2**63 - 1)
    check_rows(
        "gumbel_argmax",
        rows,
        logits=logits,
        temperature=temperature,
        streams=streams,
        out=out,
        below=below,
    )
    if ids is not None and ids.shape != logits.shape:
        raise ValueError(
            f"gumbel_argmax: ids must be {logits.shape} as logits are, got {ids.shape}"
        )
    asked = (rows, temperature, streams, below)
    try:
        threads = min(_numba.get_threads(), len(rows))
        if ids is not None:
            _listed(logits, ids, *asked, out)
        elif threads <= 1:
            _serial(logits, logits.view(np.int32), *asked, first_id, out)
        else:
            with _numba.parallel_lock:
                numba.set_num_threads(threads)
                _parallel(logits, logits.view(np.int32), *asked, first_id, out)
    except TypeError as error:
        raise _numba.refuse(
            "gumbel_argmax",
            rows=(rows, "int32", 1),
            temperature=(temperature, "float32", 1),
            streams=(streams, "int64", 1),
            below=(below, "int64", 1),
            out=(out, "int64", 1),
            **({} if ids is None else {"ids": (ids, "int64", 2)}),
        ) from error
