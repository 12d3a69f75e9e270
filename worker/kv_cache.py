"""The physical KV cache of one rank: one pool of blocks. Its layout is stated here and nowhere else.

A pool block holds, for every layer of a KV group, the keys and then the values of block_size tokens of this rank's
heads:

    pool [num_blocks, block_bytes]
    a block of group g = [layers of g, 2 (K, V), num_kv_heads on this rank, block_size, head_dim], then what is unused

so a block moves, is copied or is sent as one piece of memory, and all groups share one pool: block_bytes is what the
largest group needs. The kernels see a layer as two views [num_blocks, num_kv_heads, block_size, head_dim] whose first
stride is block_bytes and whose other dimensions are packed. Block 0 is the null block: never written, always finite.
Who gets which block is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..scheduler.kv_groups import KVGroupSpec, most_blocks

DEFAULT_CPU_BYTES = 512 * 1024**2
_ALIGN_BYTES = 16  # vector loads; also makes every block start where every dtype may


def group_bytes(group: KVGroupSpec, num_kv_heads: int, itemsize: int) -> int:
    """Bytes of one block of one group on a rank that holds `num_kv_heads` of its heads.

    Example: 1 KV head, head_dim 64, bf16, block_size 1, one layer -> 2 * 1 * 64 * 2 = 256.
    """
    return len(group.layers) * 2 * num_kv_heads * group.block_size * group.head_dim * itemsize


def pool_block_bytes(
    groups: Sequence[KVGroupSpec], num_kv_heads: Sequence[int], itemsize: int
) -> int:
    """Bytes of one pool block on a rank: its largest group's. num_kv_heads is this rank's count for each group."""
    largest = max(
        group_bytes(group, heads, itemsize)
        for group, heads in zip(groups, num_kv_heads, strict=True)
    )
    return -(-largest // _ALIGN_BYTES) * _ALIGN_BYTES


def max_num_blocks(
    groups: Sequence[KVGroupSpec],
    *,
    memory_bytes: int,
    block_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    max_tokens_in_flight: int,
) -> int:
    """Blocks that the memory holds, and never more than full rows could use, the null block included.

    Units: max_tokens_in_flight is what a row's unsettled steps run at most; window groups hold blocks for it.
    Example: block_size 16, max_num_seqs 4, max_model_len 100, full attention -> at most 4 * 7 + 1 = 29.
    """
    of_a_row = sum(most_blocks(group, max_model_len, max_tokens_in_flight) for group in groups)
    return min(memory_bytes // block_bytes, max_num_seqs * of_a_row + 1)


class KVCache:
    """This rank's pool, and each layer's view of it.

    keys, values: by layer, [num_blocks, num_kv_heads, block_size, head_dim]. group_of_layer: by layer, the KV group.
    """

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        *,
        num_kv_heads: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Shapes: num_kv_heads has this rank's KV heads for each group.

        Zeroed, so that what no token wrote is finite; a CPU's pages still stay untouched until used.
        """
        self.num_blocks = num_blocks
        self.block_bytes = pool_block_bytes(groups, num_kv_heads, dtype.itemsize)
        block_items = self.block_bytes // dtype.itemsize
        self._pool = torch.zeros(num_blocks * block_items, dtype=dtype, device=device)
        num_layers = sum(len(group.layers) for group in groups)
        self.keys: list[torch.Tensor] = [self._pool] * num_layers
        self.values: list[torch.Tensor] = [self._pool] * num_layers
        self.group_of_layer = [0] * num_layers
        for index, (group, heads) in enumerate(zip(groups, num_kv_heads, strict=True)):
            shape = (num_blocks, heads, group.block_size, group.head_dim)
            half = heads * group.block_size * group.head_dim
            strides = (block_items, group.block_size * group.head_dim, group.head_dim, 1)
            for place, layer in enumerate(group.layers):
                self.group_of_layer[layer] = index
                self.keys[layer] = self._pool.as_strided(shape, strides, 2 * place * half)
                self.values[layer] = self._pool.as_strided(shape, strides, (2 * place + 1) * half)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def clear(self) -> None:
        """Forget everything, as after `__init__`."""
        self._pool.zero_()
