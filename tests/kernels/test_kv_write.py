"""Keys and values into their slots."""

from __future__ import annotations

import mmap

import pytest
import torch

NAN = float("nan")


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


def caches(num_blocks, num_kv_heads, block_size, head_dim, fill):
    """K and V of the second of two layers that share the pool's blocks; the pool, a block before and one behind them.

    So a write to block -1 shows, instead of spoiling the heap.
    """
    pool = torch.full((num_blocks + 2, 2, 2, num_kv_heads, block_size, head_dim), fill)
    return pool[1:-1, 1, 0], pool[1:-1, 1, 1], pool


def keys_values(num_tokens, num_kv_heads, head_dim, seed=0):
    """K and V as parts of one fused projection: packed heads, a gap from token to token."""
    generator = torch.Generator().manual_seed(seed)
    width = num_kv_heads * head_dim
    fused = torch.randn(num_tokens, 3 * width + 1, generator=generator)
    return tuple(
        fused[:, start : start + width].unflatten(1, (num_kv_heads, head_dim))
        for start in (width, 2 * width)
    )


def test_slot_207_is_block_12_offset_15(kernel):
    key, value = keys_values(1, 3, 8)
    key_cache, value_cache, pool = caches(13, 3, 16, 8, NAN)
    kernel("kv_write")(key, value, key_cache, value_cache, i64(207))
    assert torch.equal(key_cache[12, :, 15], key[0])
    assert torch.equal(value_cache[12, :, 15], value[0])
    assert (~pool.isnan()).sum() == 2 * 3 * 8


def test_slot_minus_one_leaves_the_last_slot_alone(kernel):
    """W06: -1 // block_size is the last block when taken for an index (vLLM 43810, SGLang 32477)."""
    marker = 3.25
    key, value = keys_values(8, 2, 8)
    key_cache, value_cache, pool = caches(4, 2, 4, 8, marker)
    kernel("kv_write")(key, value, key_cache, value_cache, i64(4, 5, 6, -1, -1, -1, -1, -1))
    for token, slot_id in enumerate((4, 5, 6)):
        assert torch.equal(key_cache[slot_id // 4, :, slot_id % 4], key[token])
        assert torch.equal(value_cache[slot_id // 4, :, slot_id % 4], value[token])
    assert (key_cache[3, :, 3] == marker).all()
    assert (pool != marker).sum() == 3 * 2 * 2 * 8


def test_exactly_the_given_slots_change_in_a_cache_of_nan(kernel):
    """K-06: 8 tokens to slots 16 to 21 and twice to none; a write beside them is another request's KV."""
    key, value = keys_values(8, 2, 8)
    key_cache, value_cache, pool = caches(4, 2, 8, 8, NAN)
    kernel("kv_write")(key, value, key_cache, value_cache, i64(*range(16, 22), -1, -1))
    for cache in (key_cache, value_cache):
        written = ~cache.isnan().all(dim=-1).all(dim=1)  # [num_blocks, block_size]
        assert written.flatten().nonzero().flatten().tolist() == list(range(16, 22))
    assert pool[:, 0].isnan().all()


def test_two_groups_of_one_pool_never_overlap(kernel):
    """K-06: group A has 2 heads of 8 and blocks of 4 tokens, B 1 head of 8 and blocks of 8, one pool block each."""
    pool = torch.full((6, 2 * 2 * 4 * 8), NAN)
    group_a = pool.view(6, 2, 2, 4, 8)
    group_b = pool.view(6, 2, 1, 8, 8)
    key_a, value_a = keys_values(8, 2, 8, seed=1)
    key_b, value_b = keys_values(16, 1, 8, seed=2)
    kernel("kv_write")(
        key_a,
        value_a,
        group_a[:, 0],
        group_a[:, 1],
        i64(*(1 * 4 + offset for offset in range(4)), *(4 * 4 + offset for offset in range(4))),
    )
    before = pool.clone()
    kernel("kv_write")(
        key_b,
        value_b,
        group_b[:, 0],
        group_b[:, 1],
        i64(*(2 * 8 + offset for offset in range(8)), *(3 * 8 + offset for offset in range(8))),
    )
    assert torch.equal(pool[[1, 4]], before[[1, 4]])
    assert torch.equal(group_b[3, 1, 0], value_b[8:, 0])
    assert pool[[0, 5]].isnan().all()


@pytest.mark.parametrize("head_dim", [41, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_dim_need_not_be_a_power_of_two(kernel, reference, head_dim):
    """K07: the padded lanes of a write land on the next slot's first numbers."""
    key, value = keys_values(5, 3, head_dim)
    got, wanted = (caches(4, 3, 7, head_dim, NAN) for _ in range(2))
    slots = i64(27, 0, -1, 13, 14)
    kernel("kv_write")(key, value, got[0], got[1], slots)
    reference("kv_write")(key, value, wanted[0], wanted[1], slots)
    assert torch.equal(got[2].nan_to_num(nan=1e9), wanted[2].nan_to_num(nan=1e9))


def test_no_tokens_write_nothing(kernel):
    key_cache, value_cache, pool = caches(2, 1, 4, 8, NAN)
    kernel("kv_write")(torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), key_cache, value_cache, i64())
    assert pool.isnan().all()


def test_offsets_pass_two_to_the_31(kernel):
    """Block 3 begins 3 * 2**30 numbers into the pool; address space that nobody touches costs no memory."""
    block_numbers = 2**30
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(
        -1, 4 * 4 * block_numbers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    )
    flat = torch.frombuffer(memory, dtype=torch.float32)
    key_cache, value_cache = (
        flat.as_strided((4, 2, 4, 8), (block_numbers, 32, 8, 1), start) for start in (0, 64)
    )
    key, value = keys_values(2, 2, 8)
    kernel("kv_write")(key, value, key_cache, value_cache, i64(3 * 4 + 1, 1 * 4 + 2))
    assert torch.equal(key_cache[3, :, 1], key[0])
    assert torch.equal(value_cache[3, :, 1], value[0])
    assert torch.equal(value_cache[1, :, 2], value[1])


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("key", torch.zeros(1, 2, 4), "key"),
        ("value", torch.zeros(2, 1, 8), "value"),
        ("key", torch.zeros(1, 8, 2).transpose(1, 2), "packed behind"),
        ("value_cache", torch.zeros(4, 2, 3, 8), "caches? "),
        ("slot_mapping", torch.zeros(1, dtype=torch.int32), "slot_mapping must be"),
        ("slot_mapping", i64(1, 2), "as slot_mapping and key_cache say"),
        ("key", torch.zeros(1, 2, 8, dtype=torch.float64), "key must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "key": torch.zeros(1, 2, 8),
        "value": torch.zeros(1, 2, 8),
        "key_cache": torch.zeros(4, 2, 4, 8),
        "value_cache": torch.zeros(4, 2, 4, 8),
        "slot_mapping": i64(1),
    }
    with pytest.raises(ValueError, match=told):
        kernel("kv_write")(**(arguments | {name: wrong}))
