"""Which layers share a block table; no torch."""

from __future__ import annotations

import pytest
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.worker.layer_groups import layers_in_group, split_layers
from rowcast.worker.layer_kinds import LayerKind
from rowcast.worker.rope import Rope

FULL = LayerKind(rope=Rope(theta=1e6))
WINDOW = LayerKind(attention=AttentionKind.SLIDING_WINDOW, window=512)
CHUNK = LayerKind(attention=AttentionKind.CHUNKED, window=512)


def split(*layers: LayerKind, block_size: int = 16) -> tuple[KVGroupSpec, ...]:
    return split_layers(
        layers,
        num_kv_heads=[2] * len(layers),
        head_dims=[64] * len(layers),
        block_size=block_size,
    )


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([FULL] * 2, [(0, 1)]),
        ([FULL, WINDOW], [(0,), (1,)]),
        # As H-13 counts, from 1: windows {3, 5} and {4, 6}.
        ([FULL] * 2 + [WINDOW] * 4, [(0, 1), (2, 4), (3, 5)]),
        ([FULL] * 3 + [WINDOW] * 7, [(0, 1, 2), (3, 6, 9), (4, 7), (5, 8)]),
        ([FULL] * 6 + [WINDOW] * 5, [tuple(range(6)), tuple(range(6, 11))]),
        ([WINDOW] * 2, [(0, 1)]),
    ],
)
def test_layers_of_one_kind_are_dealt_to_groups_of_equal_count(layers, expected):
    """H-13."""
    groups = split(*layers)
    assert [group.layers for group in groups] == expected
    for group in groups:
        kind = layers[group.layers[0]]
        assert (group.kind, group.window) == (kind.attention, kind.window)
        assert (group.num_kv_heads, group.head_dim, group.block_size) == (2, 64, 16)


def test_gemmas_layers_are_six_groups_of_three():
    """Five layers of a window, then one that sees everything, three times; the full group comes first."""
    groups = split(*([WINDOW] * 5 + [FULL]) * 3)
    assert [group.layers for group in groups] == [
        (5, 11, 17),
        (0, 6, 12),
        (1, 7, 13),
        (2, 8, 14),
        (3, 9, 15),
        (4, 10, 16),
    ]
    assert [group.window for group in groups] == [0] + [512] * 5


def test_layers_that_turn_differently_see_the_same():
    """A RoPE base changes what is stored, not where."""
    (group,) = split(FULL, LayerKind(rope=Rope(theta=500.0)))
    assert group.layers == (0, 1)


def test_a_chunk_is_not_a_window_of_the_same_length():
    assert [group.layers for group in split(WINDOW, CHUNK, WINDOW, CHUNK)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([4], 4),
        ([3, 15], 3),
        ([4, 22], 4),  # Gemma-3-1b: 1 + 6 groups, 2 places of 28 empty
        ([10, 52], 10),  # Gemma-3-27b: 1 + 6 groups, 8 of 70 empty
        ([12, 36], 12),  # Llama-4
        ([6, 5], 6),
        ([12, 13], 13),
        ([1, 30], 5),  # 31 groups of one layer would cost more than 4 places of 35
        ([2, 3], 2),  # 6 places either way: the full layers' blocks are all used
        ([1] * 9, 1),  # nine kinds cannot be fewer groups
    ],
)
def test_a_group_has_room_for_a_count_that_leaves_little_unused(counts, expected):
    assert layers_in_group(counts) == expected


@pytest.mark.parametrize(
    ("head_dims", "block_sizes"),
    [
        ([64, 64, 64], [16, 16]),
        ([128, 64, 64], [16, 32]),
        ([64, 128, 128], [32, 16]),
        ([64, 48, 48], [16, 16]),  # no whole fraction: a part of the window's blocks stays empty
    ],
)
def test_narrower_layers_take_larger_blocks_where_bytes_come_out_equal(head_dims, block_sizes):
    groups = split_layers(
        [FULL, WINDOW, WINDOW], num_kv_heads=[2, 2, 2], head_dims=head_dims, block_size=16
    )
    assert [group.block_size for group in groups] == [*block_sizes, block_sizes[1]]


def test_layers_with_different_kv_heads_are_different_kinds():
    groups = split_layers([FULL] * 4, num_kv_heads=[8, 4, 8, 4], head_dims=[64] * 4, block_size=16)
    assert [(group.layers, group.num_kv_heads, group.block_size) for group in groups] == [
        ((0, 2), 8, 16),
        ((1, 3), 4, 32),
    ]
