"""Whole path of the worker: rowcast's tokens against transformers' own generate, on tiny random models."""

from __future__ import annotations

from pathlib import Path

import pytest
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_llama,
    make_runner,
    random_prompts,
    transformers_tokens,
)
from rowcast.tests.worker.rank_pool import RankPool, generate_on_rank

MAX_TOKENS = 16


def heads(num_kv_heads: int, group: int, head_dim: int, **more) -> dict:
    num_heads = num_kv_heads * group
    return {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * 8,
        **more,
    }


# Every KV-head count, group size and head_dim once; beside them what else a config may say.
MODELS = {
    "3x1x48": heads(3, 1, 48),
    "5x2x64-tied": heads(5, 2, 64, tie_word_embeddings=True),
    "7x3x80-odd-mlp": heads(7, 3, 80, intermediate_size=97),
    "3x4x64-attention-bias": heads(3, 4, 64, attention_bias=True),
    "5x5x48-mlp-bias": heads(5, 5, 48, mlp_bias=True),
    "7x6x64-wide-mlp": heads(7, 6, 64, intermediate_size=512),
    "3x7x80-both-biases": heads(3, 7, 80, attention_bias=True, mlp_bias=True),
    "5x8x48-theta": heads(5, 8, 48, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "1x4x64-shared-kv": heads(1, 4, 64, attention_bias=True, tie_word_embeddings=True),
    "2x3x48-shared-kv": heads(2, 3, 48),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers_on_one_two_and_three_ranks(
    name: str, tmp_path: Path, rank_pool: RankPool
):
    folder = make_llama(tmp_path, seed=len(name), **MODELS[name])
    prompts = random_prompts(8, vocab_size=199)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    case = ({"max_num_batched_tokens": 64}, prompts, greedy(MAX_TOKENS))
    assert generate(make_runner(folder, **case[0]), *case[1:]) == expected
    most = MODELS[name]["num_attention_heads"]
    for world_size in (2, 3):
        assert world_size <= most
        for rank, tokens in enumerate(
            rank_pool.run(world_size, generate_on_rank, str(folder), [case])
        ):
            assert tokens == [expected], f"rank {rank} of {world_size}"


def test_sixteen_query_heads_share_two_kv_heads_on_four_ranks(tmp_path: Path, rank_pool: RankPool):
    """T02: fewer KV heads than ranks once meant less than one head a rank."""
    folder = make_llama(tmp_path, **heads(2, 8, 64))
    prompts = random_prompts(4, vocab_size=199)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    case = ({}, prompts, greedy(MAX_TOKENS))
    assert rank_pool.run(4, generate_on_rank, str(folder), [case]) == [[expected]] * 4


def test_token_budget_and_block_size_change_no_token(tmp_path: Path, rank_pool: RankPool):
    """Chunks that end inside a block, prompts that wait their turn, decode and prefill in one step."""
    folder = make_llama(tmp_path, **heads(3, 3, 48))
    prompts = random_prompts(12, vocab_size=199)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    cases = [
        ({"max_num_batched_tokens": budget, "block_size": block_size}, prompts, greedy(MAX_TOKENS))
        for budget in (7, 16, 48)
        for block_size in (8, 16)
    ]
    for options, _, params in cases:
        assert generate(make_runner(folder, **options), prompts, params) == expected, options
    for tokens in rank_pool.run(2, generate_on_rank, str(folder), cases):
        assert tokens == [expected] * len(cases)


def test_any_chunk_size_gives_the_tokens_of_whole_prompts(tmp_path: Path):
    """C-06: 34 prompts, 30 tokens each; a chunk that attends one key too few, or writes one slot off, shows later."""
    folder = make_llama(tmp_path, **heads(3, 3, 48))
    prompts = random_prompts(34, vocab_size=199, longest=20)
    whole = generate(make_runner(folder, max_num_seqs=34), prompts, greedy(30))
    for budget in (1, 7, 16, 17, 48):
        runner = make_runner(folder, max_num_seqs=34, max_num_batched_tokens=budget)
        assert generate(runner, prompts, greedy(30)) == whole, budget


def test_a_pool_too_small_for_all_preempts_and_changes_no_token(tmp_path: Path):
    folder = make_llama(tmp_path, **heads(2, 2, 48))
    prompts = random_prompts(8, vocab_size=199, longest=30)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    runner = make_runner(folder, block_size=8)
    assert generate(runner, prompts, greedy(MAX_TOKENS), num_blocks=10) == expected


def test_seeded_tokens_do_not_depend_on_ranks_chunks_or_neighbours(
    tmp_path: Path, rank_pool: RankPool
):
    """SA-04: noise keyed by anything but seed, position and id would differ in one of these."""
    folder = make_llama(tmp_path, **heads(3, 2, 48), vocab_size=401)
    prompts = random_prompts(6, vocab_size=401)
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    params = [
        SamplingParams(temperature=1.0, **common),
        SamplingParams(temperature=0.8, top_k=20, **common),
        SamplingParams(temperature=1.2, top_p=0.9, **common),
        SamplingParams(temperature=2.0, top_k=300, top_p=0.99, **common),
        SamplingParams(temperature=2.0, top_p=0.999, **common),
        SamplingParams(temperature=0, **common),
    ]
    expected = generate(make_runner(folder), prompts, params)
    runner = make_runner(folder, max_num_batched_tokens=7, block_size=8)
    assert generate(runner, prompts, params) == expected
    for number, prompt in enumerate(prompts):
        alone = generate(runner, [prompt], params[number], seeds=[number])
        assert alone == [expected[number]]
    for world_size in (2, 3):
        tokens = rank_pool.run(world_size, generate_on_rank, str(folder), [({}, prompts, params)])
        assert tokens == [[expected]] * world_size
    assert generate(runner, prompts, params, seeds=range(100, 106))[0] != expected[0]


def test_interpreted_triton_kernels_give_the_tokens_of_the_cpu_twins(tmp_path: Path):
    folder = make_llama(tmp_path, **heads(2, 3, 48))
    prompts = [[5, 17, 100, 3, 44, 9, 12, 7, 31, 2, 198], [1], [40, 41, 42]]
    options = {"max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 32}
    twins = generate(make_runner(folder, kernel_backend="cpu", **options), prompts, greedy(5))
    triton = generate(make_runner(folder, kernel_backend="triton", **options), prompts, greedy(5))
    assert triton == twins
    assert twins == transformers_tokens(folder, prompts, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_runs_through_the_interpreted_kernels(tmp_path: Path, dtype: str):
    """What a GPU computes in: a step in which the decoder mixes dtypes would fail there first."""
    folder = make_llama(tmp_path, **heads(2, 2, 48, attention_bias=True))
    options = {"max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 32}
    narrow = make_runner(folder, kernel_backend="triton", dtype=dtype, **options)
    assert narrow.block_bytes * 2 == make_runner(folder, **options).block_bytes
    prompts = [[5, 17, 100, 3, 44], [1]]
    tokens = generate(narrow, prompts, greedy(1))
    assert tokens == generate(make_runner(folder, **options), prompts, greedy(1))
