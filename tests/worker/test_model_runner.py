"""The runner's own duties: the order of start, what warm-up leaves behind, and options that cannot run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rowcast.scheduler.messages import ProtocolError, SchedulerOutput
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_llama,
    make_runner,
    random_prompts,
)
from rowcast.tests.worker.steps import i32
from rowcast.worker.config import WorkerConfig
from rowcast.worker.model_runner import ModelRunner
from rowcast.worker.parallel import TensorParallelGroup


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def test_warm_up_leaves_no_trace(folder: Path, kernel_backend: str):
    """Rows, tokens, blocks or cached keys left over from warm-up would be another state than the other ranks'."""
    options = {"kernel_backend": kernel_backend, "max_num_seqs": 18, "max_model_len": 32}
    runner = make_runner(folder, warm_up=True, **options)
    state = runner.state
    assert not state.requests.live.any()
    assert not state.requests.token_ids.any()
    assert not state.requests.num_computed_tokens.any()
    assert not any(counts.any() for counts in state.block_tables.num_blocks)
    assert runner._cache is not None
    assert not any(view.any() for view in (*runner._cache.keys, *runner._cache.values))
    prompts = random_prompts(2, vocab_size=199, longest=5)
    cold = make_runner(folder, **options)
    assert generate(runner, prompts, greedy(3)) == generate(cold, prompts, greedy(3))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_model_len": 2},
        {"max_model_len": 1},
        {"max_num_batched_tokens": 1},
        {"block_size": 1, "kv_cache_memory": 8192},
    ],
    ids=str,
)
def test_warm_up_fits_the_smallest_settings(folder: Path, options):
    make_runner(folder, warm_up=True, **options)


def test_a_step_that_only_frees_or_says_nothing_returns_no_tokens(folder: Path):
    runner = make_runner(folder)
    assert runner.execute(SchedulerOutput(grown_block_ids=(i32(),)), b"").tokens.shape == (0,)


def test_rows_that_do_not_sample_report_no_token_and_skip_the_head(folder: Path):
    runner = make_runner(folder, max_num_batched_tokens=4)
    logits_rows = []
    original = runner._decoder.logits

    def counting(hidden, logits_indices):
        logits_rows.append(len(logits_indices))
        return original(hidden, logits_indices)

    runner._decoder.logits = counting
    generate(runner, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], greedy(2))
    assert logits_rows == [
        1,
        1,
    ]  # two chunks of 4 score nothing; the last prompt token and one output do


def test_a_bad_step_changes_nothing_and_the_runner_goes_on(folder: Path):
    runner = make_runner(folder)
    with pytest.raises(ProtocolError):
        runner.execute(SchedulerOutput(freed_rows=i32(3), grown_block_ids=(i32(),)), b"")
    assert generate(runner, [[1, 2, 3]], greedy(2)) == generate(
        make_runner(folder), [[1, 2, 3]], greedy(2)
    )


def test_blocks_follow_the_memory_and_the_rows(folder: Path):
    config = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 100}
    runner = make_runner(folder, **config)
    # 2 layers * (K and V) * 2 heads * 16 tokens * head_dim 16 * 4 bytes
    assert runner.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert runner.max_num_blocks == 4 * 7 + 1
    small = make_runner(folder, kv_cache_memory=10 * runner.block_bytes + 5, **config)
    assert small.max_num_blocks == 10


def test_sampled_rows_use_their_own_parameters(folder: Path):
    """A row's temperature must come from its table row, not from its place in the batch."""
    runner = make_runner(folder)
    prompt = [5, 6, 7]
    hot = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    mixed = generate(runner, [prompt] * 3, [hot, greedy(8), hot], seeds=[1, 2, 3])
    assert mixed[1] == generate(runner, [prompt], greedy(8))[0]
    assert mixed[0] != mixed[2]
    assert mixed[2] == generate(runner, [prompt], hot, seeds=[3])[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_model_len": 257}, "max_model_len must be at most the model's 256 positions"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 needs a GPU"),
        ({"kernel_backend": "cpu", "device": "cuda"}, "cuda"),
        ({"world_size": 5, "rank": 1}, "was given the group of rank 0 of 1"),
    ],
    ids=str,
)
def test_options_that_cannot_run_get_a_sentence(folder: Path, options, named):
    with pytest.raises(ValueError, match=named):
        ModelRunner(
            WorkerConfig(model_dir=str(folder), **{"max_model_len": 64, "device": "cpu", **options})
        )


def test_more_ranks_than_query_heads_are_refused(folder: Path):
    class Fifth(TensorParallelGroup):
        def __init__(self) -> None:
            self.rank, self.world_size = 4, 5

    config = WorkerConfig(
        model_dir=str(folder), max_model_len=64, device="cpu", rank=4, world_size=5
    )
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be in \[1, 4\], got 5"):
        ModelRunner(config, Fifth())


def test_close_gives_everything_up(folder: Path):
    runner = make_runner(folder)
    runner.close()
    with pytest.raises(AssertionError, match="call allocate first"):
        runner.execute(SchedulerOutput(grown_block_ids=(np.empty(0, np.int32),)), b"")
