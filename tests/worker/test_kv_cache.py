"""The pool's layout: which bytes belong to which layer, and how many blocks there are."""

from __future__ import annotations

import pytest
import torch
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.worker.kv_cache import KVCache, group_bytes, max_num_blocks, pool_block_bytes
from rowcast.worker.layer_groups import split_layers
from rowcast.worker.layer_kinds import LayerKind


def spec(*layers: int, block_size: int = 4, head_dim: int = 8, window: int = 0) -> KVGroupSpec:
    return KVGroupSpec(
        block_size=block_size,
        num_kv_heads=3,
        head_dim=head_dim,
        layers=layers,
        kind=AttentionKind.SLIDING_WINDOW if window else AttentionKind.FULL,
        window=window,
    )


def test_every_item_of_a_group_belongs_to_one_layer_and_one_block():
    cache = KVCache(
        [spec(0, 1, 2)], num_kv_heads=[2], num_blocks=5, dtype=torch.float32, device="cpu"
    )
    assert cache.block_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert cache.num_bytes == 5 * cache.block_bytes
    for views in zip(cache.keys, cache.values, strict=True):
        for view in views:
            assert view.shape == (5, 2, 4, 8)
            assert view.stride()[1:] == (4 * 8, 8, 1)  # packed behind the first dimension
            assert view.stride(0) * 4 == cache.block_bytes
    number = 0
    for view in [*cache.keys, *cache.values]:
        for block in range(5):
            number += 1
            view[block] = number
    number = 0
    for view in [*cache.keys, *cache.values]:  # nobody wrote over anybody
        for block in range(5):
            number += 1
            assert (view[block] == number).all()
    cache.clear()
    assert not any(view.any() for view in [*cache.keys, *cache.values])


def test_groups_share_one_pool_whose_block_is_the_largest_groups():
    groups = [spec(0, 2), spec(1, block_size=2, head_dim=4, window=16)]
    sizes = [group_bytes(group, heads, 2) for group, heads in zip(groups, (1, 2), strict=True)]
    assert sizes == [2 * 2 * 1 * 4 * 8 * 2, 1 * 2 * 2 * 2 * 4 * 2]
    assert pool_block_bytes(groups, [1, 2], 2) == max(sizes)
    cache = KVCache(groups, num_kv_heads=[1, 2], num_blocks=3, dtype=torch.float16, device="cpu")
    assert cache.group_of_layer == [0, 1, 0]
    assert cache.keys[1].shape == (3, 2, 2, 4)
    assert cache.keys[0].stride(0) == cache.keys[1].stride(0) == max(sizes) // 2
    cache.values[2][1] = 7.0  # a block of group 0 ...
    assert not cache.keys[1][0].any()
    assert not cache.keys[1][2].any()  # ... touches its own block alone


@pytest.mark.parametrize(
    ("memory_bytes", "expected"),
    [(10_000, 10), (1_000_000, 4 * 7 + 1), (999, 0)],
)
def test_blocks_are_what_memory_holds_and_no_more_than_full_rows_use(memory_bytes, expected):
    """4 rows of 100 tokens in blocks of 16 use 28; the rest of a large memory stays free."""
    blocks = max_num_blocks(
        [spec(0, block_size=16)],
        memory_bytes=memory_bytes,
        block_bytes=1000,
        max_num_seqs=4,
        max_model_len=100,
        max_tokens_in_flight=64,
    )
    assert blocks == expected


def test_each_group_of_a_row_needs_its_own_blocks():
    groups = [spec(0, block_size=16), spec(1, block_size=8, window=32)]
    limits = {"memory_bytes": 10**9, "block_bytes": 1, "max_num_seqs": 2}
    blocks = max_num_blocks(groups, max_model_len=33, max_tokens_in_flight=100, **limits)
    assert blocks == 2 * (3 + 5) + 1
    # A long row holds what its window and its unsettled steps touch: 31 + 24 tokens, cut anywhere, are 8 blocks of 8.
    blocks = max_num_blocks(groups, max_model_len=1000, max_tokens_in_flight=24, **limits)
    assert blocks == 2 * (63 + 8) + 1


MIXED = {
    "2 full, 4 window": (["full"] * 2 + ["window"] * 4, [(1, 16)] * 6),
    "3 full, 7 window": (["full"] * 3 + ["window"] * 7, [(3, 8)] * 10),
    "6 full, 5 chunked": (["full"] * 6 + ["chunked"] * 5, [(2, 6)] * 11),
    "wide full, narrow window": (["full"] * 2 + ["window"] * 3, [(1, 32)] * 2 + [(2, 8)] * 3),
    "no whole fraction": (["full"] + ["window"] * 3, [(3, 10)] + [(2, 6)] * 3),
}


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_two_blocks_and_no_two_layers_of_a_group_share_bytes(case: str, dtype: torch.dtype):
    """H-13: every (group, block) lies within the pool block of that number, every layer's keys and values apart."""
    kinds = {
        "full": LayerKind(),
        "window": LayerKind(attention=AttentionKind.SLIDING_WINDOW, window=8),
        "chunked": LayerKind(attention=AttentionKind.CHUNKED, window=8),
    }
    names, shapes = MIXED[case]
    groups = split_layers(
        [kinds[name] for name in names],
        num_kv_heads=[heads for heads, _ in shapes],
        head_dims=[head_dim for _, head_dim in shapes],
        block_size=4,
    )
    cache = KVCache(
        groups,
        num_kv_heads=[group.num_kv_heads for group in groups],
        num_blocks=5,
        dtype=dtype,
        device="cpu",
    )
    pool = cache.keys[groups[0].layers[0]].data_ptr()
    for index, group in enumerate(groups):
        taken = set()
        for layer in group.layers:
            assert cache.group_of_layer[layer] == index
            for view in (cache.keys[layer], cache.values[layer]):
                assert view.shape[1:] == (group.num_kv_heads, group.block_size, group.head_dim)
                size = view[0].numel() * dtype.itemsize
                for block in range(5):
                    start = view[block].data_ptr() - pool
                    assert block * cache.block_bytes <= start
                    assert start + size <= (block + 1) * cache.block_bytes
                    where = set(range(start, start + size))
                    assert not taken & where
                    taken |= where
        assert len(taken) == 5 * group_bytes(group, group.num_kv_heads, dtype.itemsize)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(names)))
