"""KV-cache groups: which layers share one block table, and how many blocks a row needs.

Owns the description of a group and the block arithmetic that scheduler and workers share. Does not hand out blocks
(`block_pool.py`) and knows no bytes of any rank's shard (`worker/kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

CountT = TypeVar("CountT", int, np.ndarray)


class AttentionKind(StrEnum):
    """What the attention of a group's layers can see."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED = "chunked"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroupSpec:
    """One KV-cache group, the same on every rank.

    Units: block_size and window are tokens. num_kv_heads counts the whole model's heads, not a rank's.
    window is 0 for full attention; for a sliding window the keys seen including the token itself; for chunked
    attention the chunk's length.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    kind: AttentionKind = AttentionKind.FULL
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KV group: {name} must be at least 1, got {getattr(self, name)}")
        if not self.layers:
            raise ValueError("KV group: needs at least one layer, got none")
        if (self.window > 0) != (self.kind is not AttentionKind.FULL):
            raise ValueError(
                f"KV group: kind {self.kind} with window {self.window}; a window belongs to exactly "
                "the sliding_window and chunked kinds"
            )


def blocks_needed(num_tokens: CountT, block_size: int) -> CountT:
    """Count the blocks that hold `num_tokens` tokens (an int or an integer array, elementwise).

    Example: 33 tokens at block_size 16 -> 3.
    """
    return -(-num_tokens // block_size)


def agree_on_groups(
    specs_of_rank: Sequence[Sequence[KVGroupSpec]], num_blocks_of_rank: Sequence[int]
) -> tuple[tuple[KVGroupSpec, ...], int]:
    """Check that all ranks describe the same groups, and take the pool size that every rank can hold.

    Example: ranks able to hold 2,111 and 2,055 blocks -> 2,055 on both (ids 0..2,054, the null block included).
    Raises: ValueError naming both ranks if their groups differ, or the rank that holds fewer than 2 blocks.
    """
    first = tuple(specs_of_rank[0])
    for rank, specs in enumerate(specs_of_rank):
        if tuple(specs) != first:
            raise ValueError(
                f"rank {rank} describes its KV-cache groups as {list(specs)}, rank 0 as {list(first)}; "
                "all ranks must load the same model with the same options"
            )
    rank = min(range(len(num_blocks_of_rank)), key=lambda r: num_blocks_of_rank[r])
    num_blocks = num_blocks_of_rank[rank]
    if num_blocks < 2:
        raise ValueError(
            f"rank {rank} has memory for {num_blocks} KV blocks, needs at least 2 (one is the null block); "
            "raise --kv-cache-memory or lower --block-size"
        )
    return first, num_blocks
