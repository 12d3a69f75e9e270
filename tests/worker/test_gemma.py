"""Gemma 3, the whole path of the worker: rowcast's tokens against transformers' own generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import rowcast
from rowcast.scheduler.kv_groups import most_blocks
from rowcast.tests.worker.gemma import make_gemma
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_runner,
    random_prompts,
    transformers_tokens,
)
from rowcast.tests.worker.rank_pool import RankPool, generate_on_rank

MAX_TOKENS = 16
SLIDING, FULL = "sliding_attention", "full_attention"


def heads(num_heads: int, num_kv_heads: int, head_dim: int, **more) -> dict:
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": num_heads * 12,
        **more,
    }


# Every one has layers that see a window far shorter than the prompts; beside it what else a config may say, and
# the rank counts that it is tried on beside one.
MODELS = {
    "4-over-1": (heads(4, 1, 32), (2, 3, 4)),
    "6-over-3-window-5": (heads(6, 3, 48, sliding_window=5, num_hidden_layers=4), (2, 4)),
    "5-over-5-biases": (heads(5, 5, 16, attention_bias=True, sliding_window=13), (3,)),
    "full-first": (heads(4, 2, 48, layer_types=[FULL, SLIDING, FULL, SLIDING, SLIDING]), (3,)),
    "window-of-two": (
        heads(4, 1, 64, sliding_window=2, num_hidden_layers=6, intermediate_size=97),
        (),
    ),
    "untied-thetas": (
        heads(
            4,
            1,
            80,
            tie_word_embeddings=False,
            rope_parameters={
                FULL: {"rope_type": "default", "rope_theta": 700.0},
                SLIDING: {"rope_type": "default", "rope_theta": 30.0},
            },
        ),
        (2,),
    ),
    "sliding-alone": (heads(4, 1, 256, sliding_window_pattern=9, sliding_window=16), ()),
}


def prompts_of(seed: int) -> list[list[int]]:
    """Several windows long, but for one that a window holds."""
    return [*random_prompts(5, vocab_size=199, seed=seed, longest=80), [5, 6]]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers_on_one_to_four_ranks(
    name: str, tmp_path: Path, rank_pool: RankPool
):
    sizes, world_sizes = MODELS[name]
    folder = make_gemma(tmp_path, seed=len(name), **sizes)
    prompts = prompts_of(len(name))
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    assert min(len(set(tokens)) for tokens in expected) > 1  # not one token over and over
    case = ({"max_num_batched_tokens": 64, "block_size": 8}, prompts, greedy(MAX_TOKENS))
    assert generate(make_runner(folder, **case[0]), *case[1:]) == expected
    for world_size in world_sizes:
        for rank, tokens in enumerate(
            rank_pool.run(world_size, generate_on_rank, str(folder), [case])
        ):
            assert tokens == [expected], f"rank {rank} of {world_size}"


def test_token_budget_block_size_small_pool_and_prefix_hits_change_no_token(tmp_path: Path):
    """Chunks that end inside a window and inside a block, rows that lost their blocks, tables that begin with holes."""
    folder = make_gemma(tmp_path)
    prompts = prompts_of(3)
    expected = transformers_tokens(folder, prompts, MAX_TOKENS)
    for options in (
        {"max_num_batched_tokens": 7, "block_size": 16},
        {"max_num_batched_tokens": 33, "block_size": 4},
        {"max_num_batched_tokens": 16, "block_size": 3},
    ):
        runner = make_runner(folder, max_num_seqs=4, **options)
        groups = runner.group_specs
        assert len(groups) == 5  # one full layer, four of a window
        # Each prompt twice, the second time out of the prefix cache where it has it.
        tokens = generate(runner, prompts * 2, greedy(MAX_TOKENS))
        assert tokens == expected * 2, options
        in_flight = runner.config.depth * options["max_num_batched_tokens"]
        one_row = sum(most_blocks(group, 80 + MAX_TOKENS, in_flight) for group in groups)
        tokens = generate(runner, prompts * 2, greedy(MAX_TOKENS), num_blocks=1 + one_row)
        assert tokens == expected * 2, options


@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_the_largest_pool_serves_rows_that_are_full(tmp_path: Path, max_num_batched_tokens: int):
    """max_num_blocks and the scheduler's door count alike: by a block less the longest request would be refused."""
    folder = make_gemma(tmp_path)
    runner = make_runner(
        folder,
        max_num_seqs=2,
        max_model_len=96,
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    assert runner.max_num_blocks < 500  # what rows can use, not what the memory holds
    prompts = [[7, 3] * 40, [5] * 81]
    expected = [transformers_tokens(folder, [prompt], 15)[0] for prompt in prompts]
    assert generate(runner, prompts, greedy(15)) == expected
    of_a_row = (runner.max_num_blocks - 1) // 2
    assert generate(runner, prompts[1:], greedy(15), num_blocks=1 + of_a_row) == expected[1:]
    with pytest.raises(ValueError, match="need KV for 95 tokens, the whole pool holds 92"):
        generate(runner, prompts[1:], greedy(15), num_blocks=of_a_row)


def test_interpreted_triton_kernels_give_the_tokens_of_the_cpu_twins(tmp_path: Path):
    folder = make_gemma(tmp_path, num_hidden_layers=3, sliding_window=5)
    prompts = [[5, 17, 100, 3, 44, 9, 12, 7, 31, 2, 198], [1], [40, 41, 42]]
    options = {"max_num_batched_tokens": 8, "block_size": 4, "max_model_len": 32}
    triton = generate(make_runner(folder, kernel_backend="triton", **options), prompts, greedy(5))
    assert triton == transformers_tokens(folder, prompts, 5)
    assert triton == generate(make_runner(folder, **options), prompts, greedy(5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_runs_through_the_interpreted_kernels(tmp_path: Path, dtype: str):
    """What a GPU computes in: norms in float32 beside 16-bit weights must hand 16 bits on."""
    folder = make_gemma(tmp_path, num_hidden_layers=3)
    options = {"max_num_batched_tokens": 8, "block_size": 8, "max_model_len": 32}
    narrow = make_runner(folder, kernel_backend="triton", dtype=dtype, **options)
    prompts = [[5, 17, 100, 3, 44], [1]]
    tokens = generate(narrow, prompts, greedy(1))
    assert tokens == generate(make_runner(folder, **options), prompts, greedy(1))


def test_gemma_3_270m_says_what_transformers_says(gemma_dir: Path):
    """Prompts inside a window of 512, beyond one, and beyond two and a half."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    license_text = (Path(rowcast.__file__).parent / "LICENSE").read_text()
    book = AutoTokenizer.from_pretrained(gemma_dir).encode(license_text)
    prompts = [book[:length] for length in (20, 600, 1500)]
    assert len(prompts[-1]) == 1500
    model = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:  # alone: padded to the longest they would be twice as many tokens
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
            )
        expected.append(out[0, len(prompt) :].tolist())
    del model
    runner = make_runner(gemma_dir, max_model_len=1600, max_num_batched_tokens=512, num_threads=1)
    groups = runner.group_specs
    assert [len(group.layers) for group in groups] == [3] * 6
    assert [group.window for group in groups] == [0] + [512] * 5
    assert generate(runner, prompts, greedy(16)) == expected
