"""What the warm-up steps run: every kernel once, within whatever limits an engine has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.worker.config import WorkerConfig
from rowcast.worker.state import WorkerState
from rowcast.worker.warm_up import warm_up_steps

GROUP = KVGroupSpec(block_size=16, num_kv_heads=1, head_dim=8, layers=(0,))


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "token_counts"),
    [
        (
            64,
            8,
            32,
            [2, 1, 0, 12, 6, 0],
        ),  # prefill, decode, free; with one row, then one of each kind
        (1, 8, 32, [1, 1, 0]),
        (3, 8, 32, [2, 1, 0]),
        (64, 8, 2, [1, 0, 6, 0]),  # a prompt of one token leaves no room to decode
    ],
)
def test_the_steps_run_tokens_within_the_limits(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, token_counts: list[int]
) -> None:
    """Keeps out an engine that warms up nothing (a budget of one token did) and compiles while it serves."""
    config = WorkerConfig(
        model_dir="unused",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    state = WorkerState(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        groups=(GROUP,),
        num_blocks=100,
        vocab_size=10,
    )
    seen = []
    for step in warm_up_steps(config, (GROUP,), 100):
        plan = state.apply(step)
        seen.append(int(plan.num_scheduled_tokens.sum()))
        state.commit(plan, np.where(plan.samples, 1, -1).astype(np.int32))
    assert seen == token_counts
    assert not state.requests.live.any()


def test_groups_of_several_kinds_and_block_sizes_are_warmed_up_together() -> None:
    """Each group gets blocks of its own: two that wrote into one block would compile, and compute nonsense."""
    groups = (
        GROUP,
        replace(GROUP, block_size=2, kind=AttentionKind.SLIDING_WINDOW, window=3),
        replace(GROUP, block_size=2, kind=AttentionKind.SLIDING_WINDOW, window=3),
        replace(GROUP, block_size=1, kind=AttentionKind.CHUNKED, window=2),
    )
    config = WorkerConfig(
        model_dir="unused", max_model_len=32, max_num_seqs=8, max_num_batched_tokens=64
    )
    state = WorkerState(
        max_num_seqs=8, max_model_len=32, groups=groups, num_blocks=60, vocab_size=10
    )
    most_rows = 0
    for step in warm_up_steps(config, groups, 60):
        plan = state.apply(step)
        held = [
            int(block)
            for counts, table in zip(
                state.block_tables.num_blocks, state.block_tables.table, strict=True
            )
            for row in np.flatnonzero(state.requests.live)
            for block in table[row, : counts[row]]
        ]
        assert len(set(held)) == len(held)
        assert all(0 < block < 60 for block in held)
        most_rows = max(most_rows, plan.num_reqs)
        state.commit(plan, np.where(plan.samples, 1, -1).astype(np.int32))
    assert most_rows == 6  # one row of each kind of sampling
    assert not state.requests.live.any()
