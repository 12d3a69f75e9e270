"""How full the KV pool gets, and what Gemma's windows save: counts, so they are facts and not timings."""

from __future__ import annotations

import json

import pytest
from rowcast.launch.bench.kv_memory import (
    bench_kv_memory,
    gemma_groups,
    measure_long_request,
    table,
)
from rowcast.scheduler.kv_groups import AttentionKind


@pytest.fixture(scope="module")
def figures() -> dict:
    return bench_kv_memory(steps=200)


def test_98_percent_of_a_saturated_pool_is_in_use(figures: dict):
    saturated = figures["saturated"]
    assert saturated["refused_steps"] == 200
    assert saturated["pool_in_use"]["mean"] >= 0.98
    assert saturated["pool_in_use"]["min"] <= saturated["pool_in_use"]["mean"] <= 1


def test_a_request_wastes_less_than_a_block_a_group(figures: dict):
    waste = figures["saturated"]["waste_blocks_per_request_and_group"]
    assert 0 <= waste["mean"] <= waste["max"] < 1


def test_gemma_at_8192_tokens_needs_a_third_of_full_attention_at_most(figures: dict):
    """512 blocks of the full group; position 8192 sees 7681 to 8192, so 32 of each of five window groups."""
    gemma = figures["gemma_3_270m"]
    assert gemma["blocks"] == 512 + 5 * 32
    assert gemma["all_full_blocks"] == 6 * 512
    assert gemma["share"] <= 1 / 3


def test_the_groups_are_gemmas():
    groups = gemma_groups(16)
    assert [spec.kind for spec in groups] == [AttentionKind.FULL] + [
        AttentionKind.SLIDING_WINDOW
    ] * 5
    assert [spec.window for spec in groups] == [0] + [512] * 5


def test_blocks_that_no_token_sees_are_back_before_the_prefill_ends():
    """4,096 tokens in steps of 2,048: at most two steps' blocks and a window of each sliding group at once."""
    held = measure_long_request(gemma_groups(16), num_tokens=4_096, num_blocks=2_000)
    assert held["settled"] == 256 + 5 * 32
    assert held["most"] <= 256 + 5 * (32 + 128 + 1)


def test_the_figures_are_json_and_a_table(figures: dict):
    assert json.loads(json.dumps(figures)) == figures
    text = table(figures)
    assert "of the pool in use" in text
    assert "672 blocks, 21.9% of the 3072" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        (
            {"num_blocks": 48},
            "pool_blocks must be at least 49, so that a request of 768 tokens fits",
        ),
        (
            {"num_blocks": 20_000},
            "pool_blocks must be at most 13158 with block_size 16, so that the pool gets full",
        ),
        ({"block_size": 4096}, "pool_blocks must be at most 731 with block_size 4096"),
    ],
)
def test_what_measures_nothing_is_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        bench_kv_memory(**options)
