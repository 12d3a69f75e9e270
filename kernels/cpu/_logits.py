"""What the twins over rows of logits share: the keys of kernels/_keys.py, and the check of their arguments."""

from __future__ import annotations

import numpy as np

from . import _numba

NO_KEY = -(2**63)
_ORDER_OF_NAN = np.int32(0x7FC00000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ZERO = np.float32(0)
_LOW_32 = np.int64(0xFFFFFFFF)


@_numba.jit("int32(int32)", exact=True)
def order_of(bits):
    """Sorts as the floats do that have these bits; of -0.0 it is -1, of 0.0 it is 0."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _MAGNITUDE))


@_numba.jit("int64(float32, int64)", exact=True)
def key_of(score, id_):
    order = _ORDER_OF_NAN
    if score == score:
        order = order_of(np.float32(score + _ZERO).view(np.int32))  # -0.0 + 0.0 is 0.0
    return (np.int64(order) << 32) | (_LOW_32 - id_)


def check_rows(kernel: str, rows: np.ndarray, **arrays: np.ndarray) -> None:
    """Refuse what compiled code would read past: the first array has two dimensions, the others a number a row."""
    (name, table), *others = arrays.items()
    if table.ndim != 2 or table.dtype != np.float32 or not _numba.is_packed(table):
        raise ValueError(
            f"{kernel}: {name} must be float32 with 2 dimensions, packed in its last dimension, got {table.dtype} of "
            f"shape {table.shape} with strides {table.strides}"
        )
    for name, array in others:
        if len(array) != len(rows):
            raise ValueError(
                f"{kernel}: {name} must be as long as rows, {len(rows)}, got {len(array)}"
            )
