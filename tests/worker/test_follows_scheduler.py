"""The real scheduler's frames on the worker's tables: both sides hold the same after every step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import Submit, make_submit_key
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec, first_needed_block
from rowcast.scheduler.messages import SchedulerOutput, decode_frame, encode_step
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.worker.steps import group
from rowcast.worker.backend import select_backend
from rowcast.worker.input_batch import InputBuilder
from rowcast.worker.state import WorkerState

VOCAB_SIZE = 50
NUM_REQUESTS = 60


def submit(number: int, whim: random.Random) -> Submit:
    """A third of the prompts begin alike, so that some rows start with cached blocks."""
    common = [7] * 34 if whim.random() < 0.33 else []
    return Submit(
        number=number,
        submit_key=make_submit_key(bytes(16), number),
        request_id=f"request-{number}",
        prompt_token_ids=np.array(
            common + [whim.randrange(VOCAB_SIZE) for _ in range(whim.randint(1, 40 - len(common)))],
            np.int32,
        ),
        seed=whim.randrange(2**63),
        params=SamplingParams(
            max_tokens=whim.randint(1, 24),
            temperature=whim.choice((0.0, 0.5)),
            top_k=whim.randrange(5),
            ignore_eos=whim.random() < 0.5,
        ),
    )


def windowed(block_size: int, window: int, kind: AttentionKind) -> KVGroupSpec:
    return replace(group(block_size), kind=kind, window=window)


SLIDING, CHUNKED = AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED


@pytest.mark.parametrize("late", [False, True], ids=["tokens at once", "tokens when they settle"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "budget", "num_blocks"),
    [
        ((group(16),), 64, 40),
        ((group(8),), 7, 20),
        ((group(16), group(4)), 24, 60),
        ((group(4),), 3, 17),
        ((group(4), windowed(4, 10, SLIDING), windowed(4, 10, SLIDING)), 24, 60),
        ((group(8), windowed(4, 16, CHUNKED), windowed(2, 5, SLIDING)), 16, 70),
    ],
    ids=["plain", "pauses", "two sizes", "preempts", "windows", "windows of three sizes"],
)  # few blocks preempt, small budgets pause and chunk
def test_worker_tables_follow_the_scheduler(
    groups: tuple[KVGroupSpec, ...], budget: int, num_blocks: int, depth: int, late: bool
):
    """Each side derives batch, growth and lengths from its own tables; any difference is silent corruption later.

    late: the worker's host sees a step's tokens only after it has launched the steps that were issued since.
    """
    whim = random.Random(num_blocks)
    config = SchedulerConfig(
        vocab_size=VOCAB_SIZE, max_model_len=64, max_num_seqs=5, max_num_batched_tokens=budget,
        eos_token_ids=(3,), depth=depth,
    )  # fmt: skip
    scheduler = Scheduler(config, groups, num_blocks)
    state = WorkerState(
        max_num_seqs=5, max_model_len=64, groups=groups, num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE, depth=depth,
    )  # fmt: skip
    builder = InputBuilder(
        state, select_backend("cpu", "cpu"), max_num_batched_tokens=budget, device="cpu"
    )
    number, sequence = 0, 0
    unsettled: deque[np.ndarray] = deque()
    while number < NUM_REQUESTS or scheduler.num_unfinished or unsettled:
        assert sequence < 5_000
        if number < NUM_REQUESTS and whim.random() < 0.2:
            scheduler.add("front", submit(number, whim))
            number += 1
        if whim.random() < 0.02 and (live := scheduler.live()):
            scheduler.abort(*whim.choice(live))
        step = scheduler.schedule() if len(unsettled) < depth else None
        if step is not None:
            sequence += 1
            frame = encode_step(step, epoch=1, sequence=sequence)
            unsettled.append(carry_out(frame, scheduler, state, builder, whim, late))
            compare(scheduler, state)
        if len(unsettled) == depth or (unsettled and (step is None or whim.random() < 0.3)):
            tokens = unsettled.popleft()
            if late:
                state.take_tokens(tokens)
            scheduler.settle(tokens)
    assert scheduler.num_preemptions > 0 or num_blocks > 17
    assert scheduler.cache.stats.hits > 0
    while (step := scheduler.schedule()) is not None:
        state.apply(step)
        scheduler.settle(np.empty(0, np.int32))
    assert not state.requests.columns.words.any()
    assert not state.requests.token_ids.any()
    assert not any(table.any() for table in state.block_tables.table)


def carry_out(
    frame: bytes,
    scheduler: Scheduler,
    state: WorkerState,
    builder: InputBuilder,
    whim: random.Random,
    late: bool,
) -> np.ndarray:
    """The worker's part of a step; its tokens."""
    decoded = decode_frame(frame).body
    assert isinstance(decoded, SchedulerOutput)
    plan = state.apply(decoded)
    assert len(decoded.digest) == 8, "the rank compared its digest with the scheduler's"
    assert state.digests.end(frame) == scheduler.digests.end(frame)
    assert builder.build(plan).num_tokens <= scheduler.config.max_num_batched_tokens
    tokens = np.array(
        [whim.randrange(VOCAB_SIZE) if samples else -1 for samples in plan.samples], np.int32
    )
    if late:
        state.advance(plan)
    else:
        state.commit(plan, tokens)
    return tokens


def compare(scheduler: Scheduler, state: WorkerState) -> None:
    """Both sides hold the same rows; the scheduler does not know the last tokens yet."""
    theirs, ours = scheduler.table, state.requests
    assert np.array_equal(theirs.columns.words, ours.columns.words)
    for row in np.flatnonzero(theirs.live):
        known = theirs.num_settled_tokens[row]
        assert theirs.occupant(row).request_id == ours.request_ids[row]
        assert np.array_equal(theirs.token_ids[row, :known], ours.token_ids[row, :known])
    for index, spec in enumerate(scheduler.groups):
        held = scheduler.blocks.num_blocks[index]
        assert np.array_equal(held, state.block_tables.num_blocks[index])
        for row in np.flatnonzero(theirs.live):
            first = first_needed_block(spec, int(theirs.num_computed_tokens[row]))
            seen = slice(first, held[row])
            assert np.array_equal(
                scheduler.blocks.block_ids[index][row, seen],
                state.block_tables.table[index][row, seen],
            )
            assert state.block_tables.table[index][row, seen].all(), "a block that is read is null"
