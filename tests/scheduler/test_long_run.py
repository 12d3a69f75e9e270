"""What an engine still is after ten thousand requests, after preemptions, and wherever a request happened to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import FinishCode, Submit, make_submit_key
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.scheduler.fakes import (
    FRONT,
    Bench,
    PositionWorker,
    group,
    hash_model,
    position_model,
)

NUM_REQUESTS = 10_000


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc/self/statm: memory is not told here")
    return int(statm.read_text().split()[1]) * 4096


def test_ten_thousand_requests_leave_nothing():
    """L03: a third end at once, a third are two of one submit, a third are aborted; the second half costs no memory."""
    config = SchedulerConfig(
        vocab_size=101, max_model_len=64, max_num_seqs=64, max_num_batched_tokens=2048
    )
    scheduler = Scheduler(config, (group(16), group(16, window=20)), 400)
    rank = PositionWorker(scheduler, position_model)
    random = np.random.default_rng(3)
    count, results, ended, to_abort = 0, [], [], []
    middle = 0
    while count < NUM_REQUESTS or scheduler.num_unfinished or results:
        while count < NUM_REQUESTS and len(scheduler.waiting) < 16:
            kind = count % 3
            scheduler.add(
                FRONT,
                Submit(
                    number=count,
                    submit_key=make_submit_key(bytes(16), count - (kind == 2)),
                    n_index=int(kind == 2),
                    request_id=f"r{count}",
                    prompt_token_ids=random.integers(0, 101, int(random.integers(1, 50)), np.int32),
                    seed=count,
                    params=SamplingParams(
                        temperature=0, max_tokens=1 if kind == 0 else int(random.integers(2, 14))
                    ),
                    user=f"user-{count % 500}",
                    cache_salt=f"salt-{count % 7}",
                ),
            )
            if kind == 1 and random.random() < 0.9:
                to_abort.append(count)
            count += 1
        for number in to_abort[: int(random.integers(0, 4))]:
            scheduler.abort(FRONT, number)
            to_abort.remove(number)
        step = scheduler.schedule() if scheduler.num_in_flight < config.depth else None
        if step is not None:
            results.append(rank.execute(step)[1])
        if results and (step is None or scheduler.num_in_flight == config.depth):
            told = scheduler.settle(results.pop(0))
        else:
            told = scheduler.drain()
        ended += told.numbers[told.finish_codes != 0].tolist()
        scheduler.forget(FRONT, told.numbers[told.finish_codes != 0].tolist())
        if count >= NUM_REQUESTS // 2 and not middle:
            middle = resident_bytes()
    assert sorted(ended) == list(range(NUM_REQUESTS))
    assert scheduler.num_remembered == len(scheduler.waiting) == scheduler.num_running == 0
    assert scheduler.pool.num_free == scheduler.pool.usable
    assert scheduler.cache.num_cached <= scheduler.pool.usable
    assert not rank.state.requests.live.any()
    assert not any(counts.any() for counts in rank.state.block_tables.num_blocks)
    assert resident_bytes() - middle < 20 * 2**20


def test_after_preemptions_the_steps_are_those_of_before():
    """L06: 12 steps after the last preemption all decode again, one token each, in steps that say next to nothing."""
    bench = Bench(block_size=4, usable=40, max_num_seqs=8, depth=2, prefix_caching=True)
    for _ in range(4):
        bench.add(16, max_tokens=100, ignore_eos=True)  # four of 29 blocks: too many
    tall = [bench.add(8, max_tokens=32, ignore_eos=True) for _ in range(4)]
    steps: list[tuple[int, int, bool]] = []  # tokens, bytes of the frame, whether somebody came

    def turn() -> None:
        while bench.scheduler.num_in_flight < 2 and (ran := bench.issue()) is not None:
            came = bench.last_step.admissions is not None
            steps.append((sum(ran.values()), len(bench.last_frame), came))
        if bench.scheduler.num_in_flight:
            bench.settle()

    while bench.scheduler.num_preemptions < 3:
        turn()
    for number in (0, 1, 2, 3):
        if number not in bench.ends:
            bench.abort(number)
    for _ in range(12):
        turn()
    preempted = bench.scheduler.num_preemptions
    left = [number for number in tall if number not in bench.ends]
    assert left, "the test measures nothing: all have ended"
    steps.clear()
    for _ in range(4):
        turn()
    assert bench.scheduler.num_preemptions == preempted
    assert [tokens for tokens, _, _ in steps] == [len(left)] * 4
    assert max(size for _, size, _ in steps) <= 40 + 4 * len(left)
    assert not any(came for _, _, came in steps)
    bench.run()


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({}, 0),
        ({"max_num_batched_tokens": 4}, 0),  # the prompt in chunks
        ({"depth": 2, "max_num_seqs": 3}, 5),  # other mates, another row
        ({"depth": 2, "usable": 7}, 2),  # preempted
        ({"depth": 3, "usable": 7, "prefix_caching": True}, 2),
    ],
)
def test_noise_is_drawn_once_for_each_seed_and_position(config, others):
    """W11: the sampler is asked for (seed, position) 9, 10, ... once each, wherever and however the request runs."""
    asked: list[tuple[int, int]] = []

    def model(seed: int, tokens: np.ndarray) -> int:
        asked.append((seed, len(tokens)))
        return hash_model(seed, tokens)

    bench = Bench(**({"block_size": 4, "model": model} | config))
    for number in range(others):
        bench.add(5 + number, seed=100 + number, max_tokens=12)
    bench.add(9, seed=1234, max_tokens=8)
    bench.run()
    if "usable" in config:
        assert bench.scheduler.num_preemptions > 0
    positions = [position for seed, position in asked if seed == 1234]
    assert positions == list(range(9, 9 + 8))
    assert bench.ends[others] is FinishCode.LENGTH
    asked.clear()
    bench.check_all_ended()
