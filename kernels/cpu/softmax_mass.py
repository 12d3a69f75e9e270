"""Numba twin of kernels/softmax_mass.py: same name, same parameters, NumPy arrays."""

from __future__ import annotations

import math

import numba
import numpy as np

from . import _numba
from ._logits import check_rows, order_of
from ._views import view_at

_LOG_2_E = 1 / math.log(2)
_LOG_2 = math.log(2)
_FACTORS = tuple(1 / math.factorial(power) for power in range(12, -1, -1))
_ROUNDS = 1.5 * 2.0**52  # added to a small number it leaves no room behind the point
_BITS_OF_ROUNDS = np.int64(np.float64(_ROUNDS).view(np.int64))
_LEAST = -700.0  # what is less weighs nothing


@_numba.jit("float64(float64)", exact=True)
def _exp(x):
    """exp(x) of x in [-700, 0], to about three last bits, without a call: so that a loop of it becomes vectors."""
    rounded = x * _LOG_2_E + _ROUNDS
    r = x - (rounded - _ROUNDS) * _LOG_2
    p = _FACTORS[0]
    for place in range(1, 13):
        p = p * r + _FACTORS[place]
    k = np.float64(rounded).view(np.int64) - _BITS_OF_ROUNDS
    return p * np.int64((k + 1023) << 52).view(np.float64)


@_numba.jit("float64(float32[::1], int32[::1], float64, int64, int64)")
def _mass_of_row(scores, score_bits, highest, above, first_id):
    """score_bits are the same memory as scores."""
    above_order = np.int32(above >> 32)
    above_place = np.int64(0xFFFFFFFF) - (above & np.int64(0xFFFFFFFF)) - first_id
    total = 0.0
    for place in range(len(scores)):
        order = order_of(score_bits[place])
        order = np.int32(0) if order == -1 else order  # -0.0 counts as 0.0
        counts = (order > above_order) | ((order == above_order) & (place < above_place))
        x = np.float64(scores[place]) - highest
        counts = (counts & ~(x < _LEAST)) | (x != x)  # a NaN must show in the sum
        weight = _exp(_LEAST if x < _LEAST else x)
        total += weight if counts else 0.0
    return total


_SIGNATURE = (
    "void(float32[:, :], int32[:, :], int32[::1], float32[::1], int64[::1], int64, float64[::1])"
)


@_numba.jit(_SIGNATURE)
def _serial(scores, score_bits, rows, highest, above, first_id, out):
    for place in range(len(rows)):
        start = rows[place] * (scores.strides[0] // 4)
        out[place] = _mass_of_row(
            view_at(scores, start, scores.shape[1]),
            view_at(score_bits, start, scores.shape[1]),
            highest[place],
            above[place],
            first_id,
        )


@_numba.jit(_SIGNATURE, parallel=True)
def _parallel(scores, score_bits, rows, highest, above, first_id, out):
    for place in numba.prange(len(rows)):
        start = rows[place] * (scores.strides[0] // 4)
        out[place] = _mass_of_row(
            view_at(scores, start, scores.shape[1]),
            view_at(score_bits, start, scores.shape[1]),
            highest[place],
            above[place],
            first_id,
        )


def softmax_mass(
    scores: np.ndarray,  # [num_rows, num_ids] float32, packed behind the first dimension
    rows: np.ndarray,  # [n] int32
    highest: np.ndarray,  # [n] float32
    above: np.ndarray,  # [n] int64
    *,
    out: np.ndarray,  # [n] float64, written
    first_id: int = 0,
) -> None:
    """See kernels/softmax_mass.py."""
    check_rows("softmax_mass", rows, scores=scores, highest=highest, above=above, out=out)
    arguments = (scores, scores.view(np.int32), rows, highest, above, first_id, out)
    try:
        threads = min(_numba.get_threads(), len(rows))
        if threads <= 1:
            _serial(*arguments)
        else:
            with _numba.parallel_lock:
                numba.set_num_threads(threads)
                _parallel(*arguments)
    except TypeError as error:
        raise _numba.refuse(
            "softmax_mass",
            rows=(rows, "int32", 1),
            highest=(highest, "float32", 1),
            above=(above, "int64", 1),
            out=(out, "float64", 1),
        ) from error
