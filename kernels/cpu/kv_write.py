"""Numba twin of kernels/kv_write.py: same name, same parameters, NumPy arrays instead of tensors. float32 only."""

from __future__ import annotations

import numpy as np

from . import _numba
from ._views import view_at


@_numba.jit(
    "void(float32[:, :, :], float32[:, :, :], float32[:, :, :, :], float32[:, :, :, :], int64[::1])"
)
def _kv_write(key, value, key_cache, value_cache, slot_mapping):
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    for flat_token in range(slot_mapping.shape[0]):
        slot_id = slot_mapping[flat_token]
        if slot_id < 0:  # padding: -1 // block_size would name the last block
            continue
        block_id = slot_id // block_size
        block_offset = slot_id - block_id * block_size
        for head in range(num_kv_heads):
            in_block = (head * block_size + block_offset) * head_dim
            new_key = view_at(key, flat_token * (key.strides[0] // 4) + head * head_dim, head_dim)
            new_value = view_at(
                value, flat_token * (value.strides[0] // 4) + head * head_dim, head_dim
            )
            k = view_at(key_cache, block_id * (key_cache.strides[0] // 4) + in_block, head_dim)
            v = view_at(value_cache, block_id * (value_cache.strides[0] // 4) + in_block, head_dim)
            for d in range(head_dim):
                k[d] = new_key[d]
            for d in range(head_dim):
                v[d] = new_value[d]


def kv_write(
    key: np.ndarray,  # [num_tokens, num_kv_heads, head_dim] float32
    value: np.ndarray,  # like key
    key_cache: np.ndarray,  # [num_blocks, num_kv_heads, block_size, head_dim] float32, written
    value_cache: np.ndarray,  # like key_cache, written
    slot_mapping: np.ndarray,  # [num_tokens] int64
) -> None:
    """See kernels/kv_write.py."""
    for name, array, ndim in (
        ("key", key, 3),
        ("value", value, 3),
        ("key_cache", key_cache, 4),
        ("value_cache", value_cache, 4),
    ):
        if array.ndim != ndim or not _numba.is_packed(array):
            raise ValueError(
                f"kv_write: {name} must have {ndim} dimensions, packed behind the first, "
                f"got shape {array.shape} with strides {array.strides}"
            )
    if value.shape != key.shape or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"kv_write: key and value must have one shape, got {key.shape} and {value.shape}; "
            f"the caches too, got {key_cache.shape} and {value_cache.shape}"
        )
    if (
        key.shape[0] != slot_mapping.shape[0]
        or key.shape[1] != key_cache.shape[1]
        or key.shape[2] != key_cache.shape[3]
    ):
        raise ValueError(
            f"kv_write: key must be [{slot_mapping.shape[0]}, {key_cache.shape[1]}, "
            f"{key_cache.shape[3]}] as slot_mapping and key_cache say, got {key.shape}"
        )
    try:
        _kv_write(key, value, key_cache, value_cache, slot_mapping)
    except TypeError as error:
        raise _numba.refuse(
            "kv_write",
            key=(key, "float32", 3),
            value=(value, "float32", 3),
            key_cache=(key_cache, "float32", 4),
            value_cache=(value_cache, "float32", 4),
            slot_mapping=(slot_mapping, "int64", 1),
        ) from error
