"""Write the keys and values of this step's tokens into their slots of the paged cache.

    key_cache[slot_id // block_size, head, slot_id % block_size] = key[flat_token, head],   the same for value

program_id(0) is flat_token; a program writes all its heads. Slot -1 is padding and writes nothing (as an index, -1
would name the last slot of the cache). A cache is a view whose first stride is free: K and V may be interleaved in
one pool block, with other layers between.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_cache, check_int_tensors, is_packed


@triton.jit
def _kv_write_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,  # [num_tokens, num_kv_heads, head_dim]
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim], written
    value_cache,  # [num_blocks, num_kv_heads, block_size, head_dim], written
    slot_mapping,  # [num_tokens] int64
    key_stride,  # items from one token to the next
    value_stride,
    key_cache_stride,  # items from one block to the next
    value_cache_stride,
    BLOCK_SIZE: tl.constexpr,  # tokens a block
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat_token = tl.program_id(0).to(tl.int64)
    slot_id = tl.load(slot_mapping + flat_token)
    if slot_id < 0:
        return
    block_id = slot_id // BLOCK_SIZE
    block_offset = slot_id % BLOCK_SIZE
    for first in range(0, NUM_KV_HEADS * HEAD_DIM, BLOCK):
        item = first + tl.arange(0, BLOCK)
        real = item < NUM_KV_HEADS * HEAD_DIM
        head = item // HEAD_DIM
        target = (head * BLOCK_SIZE + block_offset) * HEAD_DIM + item % HEAD_DIM
        k = tl.load(key + flat_token * key_stride + item, mask=real, other=0.0)
        v = tl.load(value + flat_token * value_stride + item, mask=real, other=0.0)
        tl.store(key_cache + block_id * key_cache_stride + target, k, mask=real)
        tl.store(value_cache + block_id * value_cache_stride + target, v, mask=real)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's K and V into its slot; slot -1 writes nothing.

    Shapes: key, value [num_tokens, num_kv_heads, head_dim], packed behind the first dimension; key_cache, value_cache
        [num_blocks, num_kv_heads, block_size, head_dim] likewise, written; slot_mapping [num_tokens] int64.
    Units: a slot is one token's K and V in one layer.
    Example: block_size 16, slot 207 -> key_cache[12, :, 15] = key[flat_token].
    Raises: ValueError for shapes, strides, dtypes or devices that do not fit together.
    Source: DESIGN.md section 1.
    """
    check_int_tensors("kv_write", slot_mapping=(slot_mapping, torch.int64, 1))
    check_cache("kv_write", key_cache, value_cache)
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    shape = (slot_mapping.shape[0], num_kv_heads, head_dim)
    for name, tensor in (("key", key), ("value", value)):
        if tuple(tensor.shape) != shape or tensor.dtype != key_cache.dtype:
            raise ValueError(
                f"kv_write: {name} must be {key_cache.dtype} {shape} as slot_mapping and key_cache say, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not is_packed(tensor):
            raise ValueError(
                f"kv_write: {name} must be packed behind its first dimension, got strides {tensor.stride()}"
            )
    if shape[0] == 0:
        return
    _kv_write_kernel[(shape[0],)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=min(1024, triton.next_power_of_2(num_kv_heads * head_dim)),
    )


def kv_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The same, a token at a time."""
    block_size = key_cache.shape[2]
    for flat_token, slot_id in enumerate(slot_mapping.tolist()):
        if slot_id < 0:
            continue
        block_id, block_offset = divmod(slot_id, block_size)
        key_cache[block_id, :, block_offset] = key[flat_token]
        value_cache[block_id, :, block_offset] = value[flat_token]
