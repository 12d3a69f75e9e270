"""A score and its vocabulary id in one int64 (`worker/sampler/keys.py` packs and unpacks them in torch).

    key(score, id) = (order(score) << 32) | (2**32 - 1 - id)

order() turns a float32's bits into an int32 that sorts as the floats do, -0.0 as 0.0, NaN of either sign above all.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

NO_KEY = -(2**63)  # below the key of any score


@triton.jit
def pack_keys(scores, ids):
    """float32 scores and int64 ids -> int64 keys."""
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 too
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(scores != scores, 0x7FC00000, bits)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - ids)


def key(score: float, id_: int) -> int:
    """One key, by Python's own numbers."""
    score = float("nan") if score != score else score + 0.0
    (order,) = struct.unpack("<i", struct.pack("<f", score))
    if order < 0:  # the more negative a float, the larger its other 31 bits
        order = -(order & 0x7FFFFFFF) - 1
    return order * 2**32 + 2**32 - 1 - id_
