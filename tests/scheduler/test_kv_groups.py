"""What the groups of a model need of the pool: plain arithmetic, the same for scheduler and workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.kv_groups import (
    KVGroupSpec,
    base_block_size,
    blocks_needed,
    describe_groups,
    first_needed_block,
    hit_alignment,
    most_blocks,
)
from rowcast.tests.scheduler.cached_rows import spec


def test_which_window_blocks_may_go():
    """H-04: block 2, window 4; computed 0 or 4 -> none, 5 or 6 -> 1, 7 -> 2, 11 -> 4."""
    computed = np.array([0, 4, 5, 6, 7, 11], np.int32)
    first = first_needed_block(spec(2, window=4), computed)
    assert first.tolist() == [0, 0, 1, 1, 2, 4]
    assert first.dtype == np.int32


def test_only_settled_progress_frees_a_block():
    """B12's numbers: window 128, block 32; the step for position 158 still reads position 31, in block 0."""
    window = spec(32, window=128)
    assert first_needed_block(window, 158) == 0
    assert first_needed_block(window, 159) == 1


def test_a_full_group_needs_everything():
    assert first_needed_block(spec(16), 1000) == 0
    assert first_needed_block(spec(16), np.array([0, 1000])).tolist() == [0, 0]


def test_a_chunk_needs_nothing_of_the_chunk_before():
    """Chunk 8 over blocks of 4 and of 3: a block that reaches into the chunk stays."""
    computed = np.array([0, 7, 8, 15, 16], np.int32)
    assert first_needed_block(spec(4, chunk=8), computed).tolist() == [0, 0, 2, 2, 4]
    assert first_needed_block(spec(3, chunk=8), computed).tolist() == [0, 0, 2, 2, 5]


@settings(deadline=None)
@given(
    block_size=st.integers(1, 9),
    window=st.integers(1, 40),
    chunked=st.booleans(),
    position=st.integers(0, 200),
)
def test_the_first_needed_block_is_that_of_the_leftmost_key_seen(
    block_size, window, chunked, position
):
    """Against the masks' own definition: key > pos - window, or the same chunk; later tokens see no further left."""
    group = spec(block_size, chunk=window) if chunked else spec(block_size, window=window)
    seen = [
        key
        for key in range(position + 1)
        if (key // window == position // window if chunked else key > position - window)
    ]
    assert first_needed_block(group, position) == seen[0] // block_size


def test_capacity():
    """H-09: max_model_len 16,384, 1,024 tokens in flight, block 16; requests that 1,536 / 387 / 3,459 blocks serve."""
    full = most_blocks(spec(16), 16_384, 1024)
    window = most_blocks(spec(16, window=1024), 16_384, 1024)
    assert (full, window) == (1024, 129)
    assert (1536 / full, 387 / window, 3459 / (full + window)) == (1.5, 3, 3)


def test_a_short_row_holds_no_more_than_its_tokens_need():
    tokens = np.array([0, 1, 16, 17, 2048, 16_384], np.int32)
    most = most_blocks(spec(16, window=1024), tokens, 1024)
    assert most.tolist() == [0, 1, 1, 2, 128, 129]
    assert most.dtype == np.int32
    assert most_blocks(spec(16), tokens, 1024).tolist() == [0, 1, 1, 2, 128, 1024]


def test_the_estimate_equals_the_take():
    """H-07: block 2, window 8, on to 4, 8, 12, 16 tokens: two new blocks each time, never more held than foretold."""
    group = spec(2, window=8)
    table: list[int] = []
    for tokens in (4, 8, 12, 16):
        table += [1] * (blocks_needed(tokens, 2) - len(table))
        assert len(table) == tokens // 2
        assert sum(table) <= most_blocks(group, tokens, 4)
        gone = first_needed_block(group, tokens)
        table[:gone] = [0] * gone
    assert table == [0, 0, 0, 0, 1, 1, 1, 1]


@settings(deadline=None)
@given(
    block_size=st.integers(1, 9),
    window=st.integers(1, 30),
    chunked=st.booleans(),
    in_flight=st.integers(1, 30),
    num_tokens=st.integers(1, 120),
)
def test_no_row_ever_holds_more_than_the_most(block_size, window, chunked, in_flight, num_tokens):
    """Admission counts on it. For a sliding window on a long way it is not too much either."""
    group = spec(block_size, chunk=window) if chunked else spec(block_size, window=window)
    held = [
        blocks_needed(min(settled + in_flight, num_tokens), block_size)
        - first_needed_block(group, settled)
        for settled in range(num_tokens)
    ]
    most = most_blocks(group, num_tokens, in_flight)
    assert max(held) <= most
    if not chunked and num_tokens >= window + in_flight + 2 * block_size:
        assert max(held) == most


@pytest.mark.parametrize(
    ("sizes", "base", "alignment"),
    [((16,), 16, 16), ((32, 16), 16, 32), ((32, 48), 16, 96), ((4, 6, 9), 1, 36)],
)
def test_links_and_hits_end_where_blocks_end(sizes, base, alignment):
    groups = [spec(size) for size in sizes]
    assert base_block_size(groups) == base
    assert hit_alignment(groups) == alignment


def test_the_start_says_what_the_emptiest_group_leaves_unused():
    """Two layers beside three leave a third; layers half as wide in blocks twice as long leave nothing."""

    def group(layers: int, *, head_dim: int = 64, block_size: int = 16) -> KVGroupSpec:
        return KVGroupSpec(
            block_size=block_size, num_kv_heads=2, head_dim=head_dim, layers=tuple(range(layers))
        )

    assert describe_groups([group(3)]) == "1 KV group"
    for other, words in (
        (group(2), "2 KV groups, up to 33% of a block unused"),
        (group(3, head_dim=32, block_size=32), "2 KV groups, 0% of a block unused"),
    ):
        assert describe_groups([group(3), other]) == words
