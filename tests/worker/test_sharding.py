"""Who owns which heads, columns and rows; no torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from rowcast.worker.architectures import ARCHITECTURES
from rowcast.worker.expert_config import ExpertConfig
from rowcast.worker.kv_cache import group_bytes
from rowcast.worker.layer_groups import group_specs
from rowcast.worker.layer_kinds import LayerKind
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.rope import Rope
from rowcast.worker.sharding import (
    attention_parameters,
    check_tensor_parallel_size,
    column_parameters,
    expert_column_parameters,
    heads_of_rank,
    level,
    row_parameters,
    shard_of_rank,
)

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=(LayerKind(rope=Rope(theta=100000.0)),) * 30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    attention_scale=64**-0.5,
    tie_word_embeddings=True,
    torch_dtype="float32",
    eos_token_ids=(2,),
)


def test_three_kv_heads_on_two_ranks_are_two_and_one():
    first, second = (heads_of_rank(9, 3, rank, 2) for rank in range(2))
    assert (first.q_heads, first.kv_heads) == (range(0, 6), range(0, 2))
    assert (second.q_heads, second.kv_heads) == (range(6, 9), range(2, 3))


def test_two_kv_heads_on_four_ranks_are_shared():
    """T02: rank r has query heads 4r .. 4r + 3 and KV head r // 2, and 256 bytes a token and layer."""
    config = replace(SMOLLM2, num_heads=16, num_kv_heads=2)
    (group,) = group_specs(replace(config, layers=config.layers[:1]), block_size=1)
    for rank in range(4):
        heads = heads_of_rank(16, 2, rank, 4)
        assert heads.q_heads == range(4 * rank, 4 * rank + 4)
        assert heads.kv_heads == range(rank // 2, rank // 2 + 1)
        assert group_bytes(group, len(heads.kv_heads), itemsize=2) == 2 * 1 * 64 * 2


@pytest.mark.parametrize(
    ("world_size", "q_heads"),
    [
        (1, [range(0, 4)]),
        (2, [range(0, 2), range(2, 4)]),
        (3, [range(0, 2), range(2, 3), range(3, 4)]),
        (4, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]),
    ],
)
def test_one_kv_head_is_held_by_every_rank(world_size, q_heads):
    """Gemma-3-270m: 4 query heads, 1 KV head."""
    shards = [heads_of_rank(4, 1, rank, world_size) for rank in range(world_size)]
    assert [shard.q_heads for shard in shards] == q_heads
    assert [shard.kv_heads for shard in shards] == [range(0, 1)] * world_size


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_every_query_head_has_one_owner_who_holds_its_kv_head(num_kv_heads, group):
    """T01, as DESIGN.md section 5 has it: any rank count up to the query heads works, divisible or not.

    Its own numbers, 40 query heads and 10 KV heads, are 10 in groups of 4.
    """
    num_heads = num_kv_heads * group
    for world_size in range(1, num_heads + 1):
        owned = []
        for rank in range(world_size):
            heads = heads_of_rank(num_heads, num_kv_heads, rank, world_size)
            assert len(heads.q_heads) >= 1
            assert len(heads.q_heads) == heads.group * len(heads.kv_heads)
            if world_size > num_kv_heads:
                assert heads.kv_heads.start == rank * num_kv_heads // world_size
            for place, q_head in enumerate(heads.q_heads):  # as the kernel pairs them
                assert heads.kv_heads[place // heads.group] == q_head // group
            owned += heads.q_heads
        assert owned == list(range(num_heads))


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_hold_equal_bytes_to_within_one_vocabulary_row(world_size, tied):
    config = replace(SMOLLM2, tie_word_embeddings=tied, mlp_bias=True)
    shards = [shard_of_rank(config, rank, world_size) for rank in range(world_size)]
    for parts, size in (
        ([shard.mlp_columns for shard in shards], config.intermediate_size),
        ([shard.vocab_rows for shard in shards], config.vocab_size),
    ):
        assert parts[0].start == 0
        assert parts[-1].stop == size
        assert all(a.stop == b.start and len(a) >= 1 for a, b in pairwise(parts))
    held = [
        config.num_layers
        * (
            attention_parameters(config, shard.heads)
            + column_parameters(config) * len(shard.mlp_columns)
        )
        + row_parameters(config) * len(shard.vocab_rows)
        for shard in shards
    ]
    assert max(held) - min(held) <= row_parameters(config)


def mixture(**changes) -> ModelConfig:
    """SmolLM2's size with 12 experts of 520 columns in 20 of its 30 layers."""
    rules = ARCHITECTURES["Qwen3MoeForCausalLM"].experts
    assert rules is not None
    experts = ExpertConfig(
        **{
            "num_experts": 12,
            "experts_per_token": 3,
            "width": 520,
            "normalize": False,
            "layers": (True, False, True) * 10,
            "rules": rules,
            **changes,
        }
    )
    return replace(SMOLLM2, experts=experts)


@pytest.mark.parametrize("world_size", range(1, 10))
def test_experts_columns_are_dealt_among_all_ranks_and_level_what_heads_leave_uneven(world_size):
    """Every rank has a part of every expert, so that no rank waits for the one whose experts are asked for."""
    config = mixture()
    assert config.experts is not None
    shards = [shard_of_rank(config, rank, world_size) for rank in range(world_size)]
    parts = [shard.expert_columns for shard in shards]
    assert parts[0].start == 0
    assert parts[-1].stop == 520
    assert all(a.stop == b.start and len(a) >= 1 for a, b in pairwise(parts))
    held = [
        30 * attention_parameters(config, shard.heads)
        + 10 * column_parameters(config) * len(shard.mlp_columns)
        + 20 * expert_column_parameters(config, config.experts) * len(shard.expert_columns)
        + row_parameters(config) * len(shard.vocab_rows)
        for shard in shards
    ]
    assert max(held) - min(held) <= row_parameters(config)


def test_a_column_of_every_expert_counts():
    """12 experts' gate, up and down of 576."""
    config = mixture()
    assert config.experts is not None
    assert expert_column_parameters(config, config.experts) == 12 * 3 * 576
    assert shard_of_rank(SMOLLM2, 0, 2).expert_columns == range(0)


def test_a_rank_count_without_a_column_of_each_expert_is_refused():
    told = r"in \[1, 4\], got 5: each rank needs at least one of the model's 4 columns of an expert"
    with pytest.raises(ValueError, match=told):
        check_tensor_parallel_size(mixture(width=4), 5)


def test_the_rank_with_fewer_heads_takes_more_columns():
    """9 query and 3 KV heads on 2 ranks: 589,824 against 294,912 numbers a layer; a column is 1,728."""
    first, second = (shard_of_rank(SMOLLM2, rank, 2) for rank in range(2))
    # (294,912 / 1,728) / 2 = 85.3 columns more or less than half of 1,536, in bundles of 8
    assert (len(first.mlp_columns), len(second.mlp_columns)) == (680, 856)
    assert len(first.vocab_rows) + len(second.vocab_rows) == 49152


@pytest.mark.parametrize(
    ("held", "unit", "count", "expected"),
    [
        ([10, 4], 2, 5, [1, 4]),
        ([0, 0, 0], 5, 7, [3, 2, 2]),
        ([100, 0], 1, 10, [1, 9]),  # never level: everything but one unit goes to the poor rank
        ([0], 3, 9, [9]),
        ([5, 5], 1, 2, [1, 1]),
    ],
)
def test_level_deals_units_until_the_ranks_hold_the_same(held, unit, count, expected):
    assert level(held, unit, count) == expected


@pytest.mark.parametrize("size", [0, -1, 10])
def test_a_rank_count_without_a_query_head_each_is_refused(size):
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be in \[1, 9\], got"):
        check_tensor_parallel_size(SMOLLM2, size)


@pytest.mark.parametrize("size", range(1, 10))
def test_every_rank_count_up_to_the_query_heads_is_accepted(size):
    check_tensor_parallel_size(SMOLLM2, size)
