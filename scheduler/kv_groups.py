"""KV-cache groups: which layers share one block table, and how many blocks a row needs.

Owns the description of a group and the block arithmetic that scheduler and workers share. Does not hand out blocks
(`block_pool.py`) and knows no bytes of any rank's shard (`worker/kv_cache.py`).
"""

from __future__ import annotations

import math
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


def first_needed_block(spec: KVGroupSpec, num_computed: CountT) -> CountT:
    """Find the first block that a token at position `num_computed` or later may still read; those left of it may go.

    Units: num_computed is tokens (an int or an integer array, elementwise). The step that computes the last of them
    must have settled before a block is returned: until then it may read further left.
    Example: a sliding window of 128 over blocks of 32 needs all at 158 tokens, and returns block 0 at 159.
    """
    if spec.kind is AttentionKind.FULL:
        return num_computed * 0
    if spec.kind is AttentionKind.CHUNKED:
        return num_computed // spec.window * spec.window // spec.block_size
    hidden = num_computed - (spec.window - 1)  # tokens left of everything that can be seen
    return (hidden * (hidden > 0)) // spec.block_size


def most_blocks(spec: KVGroupSpec, num_tokens: CountT, max_tokens_in_flight: int) -> CountT:
    """Count the blocks that a row holds at most, at any time on its way to `num_tokens` tokens.

    A window group returns what no later token sees, but only on settled progress: up to max_tokens_in_flight tokens
    are scheduled beyond it. What is seen and what is in flight may begin and end in the middle of a block.

    Units: tokens in (num_tokens an int or an integer array, elementwise), blocks out.
    Example: window 1,024, 1,024 tokens in flight, block_size 16, 16,384 tokens -> 129; full attention -> 1,024.
    """
    whole = blocks_needed(num_tokens, spec.block_size)
    if spec.kind is AttentionKind.FULL:
        return whole
    span = spec.window - 1 + max_tokens_in_flight
    most = blocks_needed(span - 1, spec.block_size) + 1 if span > 0 else 0
    return whole - (whole - most) * (whole > most)  # the smaller, for an int and for an array


def base_block_size(groups: Sequence[KVGroupSpec]) -> int:
    """Find the tokens of one link of the hash chain: every group's blocks end at a link. Example: 32, 48 -> 16."""
    return math.gcd(*(spec.block_size for spec in groups))


def hit_alignment(groups: Sequence[KVGroupSpec]) -> int:
    """Find the tokens of which each prefix hit is a multiple: blocks of all groups end there. Example: 32, 48 -> 96."""
    return math.lcm(*(spec.block_size for spec in groups))


def describe_groups(groups: Sequence[KVGroupSpec]) -> str:
    """Say in a few words how the layers share the pool: the groups, and what the emptiest leaves of each of its blocks.

    Counts the whole model's KV heads; a rank that holds a copy of a head may differ.
    Example: 3 layers full, 7 of a window -> "4 KV groups, up to 33% of a block unused".
    """
    if len(groups) == 1:
        return "1 KV group"
    needs = [
        len(spec.layers) * spec.num_kv_heads * spec.head_dim * spec.block_size for spec in groups
    ]
    unused = 1 - min(needs) / max(needs)
    return f"{len(groups)} KV groups, {'up to ' if unused else ''}{unused:.0%} of a block unused"


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
