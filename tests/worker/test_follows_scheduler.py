"""The real scheduler's frames on the worker's tables: both sides hold the same after every step."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import Submit, make_submit_key
from rowcast.scheduler.messages import SchedulerOutput, decode_frame, encode_step
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.worker.steps import group, make_state
from rowcast.worker.backend import select_backend
from rowcast.worker.input_batch import InputBuilder

VOCAB_SIZE = 50
NUM_REQUESTS = 60


def submit(number: int, whim: random.Random) -> Submit:
    return Submit(
        number=number,
        submit_key=make_submit_key(bytes(16), number),
        request_id=f"request-{number}",
        prompt_token_ids=np.array(
            [whim.randrange(VOCAB_SIZE) for _ in range(whim.randint(1, 40))], np.int32
        ),
        seed=whim.randrange(2**63),
        params=SamplingParams(
            max_tokens=whim.randint(1, 24),
            temperature=whim.choice((0.0, 0.5)),
            top_k=whim.randrange(5),
            ignore_eos=whim.random() < 0.5,
        ),
    )


@pytest.mark.parametrize(
    ("block_sizes", "budget", "num_blocks"),
    [((16,), 64, 40), ((8,), 7, 20), ((16, 4), 24, 60), ((4,), 3, 17)],
)  # few blocks preempt, small budgets pause and chunk
def test_worker_tables_follow_the_scheduler(
    block_sizes: tuple[int, ...], budget: int, num_blocks: int
):
    """Each side derives batch, growth and lengths from its own tables; any difference is silent corruption later."""
    whim = random.Random(num_blocks)
    config = SchedulerConfig(
        vocab_size=VOCAB_SIZE, max_model_len=64, max_num_seqs=5, max_num_batched_tokens=budget,
        eos_token_ids=(3,),
    )  # fmt: skip
    scheduler = Scheduler(config, tuple(map(group, block_sizes)), num_blocks)
    state = make_state(*block_sizes, max_num_seqs=5, num_blocks=num_blocks, vocab_size=VOCAB_SIZE)
    builder = InputBuilder(
        state, select_backend("cpu", "cpu"), max_num_batched_tokens=budget, device="cpu"
    )
    number, sequence = 0, 0
    while number < NUM_REQUESTS or scheduler.num_unfinished:
        assert sequence < 5_000
        if number < NUM_REQUESTS and whim.random() < 0.2:
            scheduler.add("front", submit(number, whim))
            number += 1
        if whim.random() < 0.02 and (live := scheduler.live()):
            scheduler.abort(*whim.choice(live))
        step = scheduler.schedule()
        if step is None:
            continue
        sequence += 1
        decoded = decode_frame(encode_step(step, epoch=1, sequence=sequence)).body
        assert isinstance(decoded, SchedulerOutput)
        plan = state.apply(decoded)
        batch = builder.build(plan)
        assert batch.num_tokens <= budget
        theirs, ours = scheduler.table, state.requests
        live = np.flatnonzero(ours.live)
        assert np.flatnonzero(theirs.live).tolist() == live.tolist()
        for index, held in enumerate(scheduler.blocks.num_blocks):
            assert np.array_equal(held[live], state.block_tables.num_blocks[index][live])
        tokens = np.array(
            [whim.randrange(VOCAB_SIZE) if samples else -1 for samples in plan.samples], np.int32
        )
        state.commit(plan, tokens)
        assert np.array_equal(theirs.num_tokens[live], ours.num_tokens[live])
        assert np.array_equal(theirs.num_computed_tokens[live], ours.num_computed_tokens[live])
        scheduler.settle(tokens)
        for row in np.flatnonzero(theirs.live):
            length = ours.num_tokens[row]
            assert np.array_equal(theirs.token_ids[row, :length], ours.token_ids[row, :length])
    assert scheduler.num_preemptions > 0 or num_blocks > 30
    while (step := scheduler.schedule()) is not None:
        state.apply(step)
        scheduler.settle(np.empty(0, np.int32))
    assert not state.requests.live.any()
    assert not any(table.any() for table in state.block_tables.table)
