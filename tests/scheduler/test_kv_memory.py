"""What an admission takes and what is promised: counted before anything is taken, and never less than what comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.budget import Share
from rowcast.scheduler.kv_memory import Offer
from rowcast.tests.scheduler.fakes import Bench, group


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 32_000, count).tolist()


def bench_of(*groups, **config) -> Bench:
    return Bench(groups=groups, **({"prefix_caching": True, "vocab_size": 32_000} | config))


def offer(bench: Bench) -> Offer:
    """What the head of the queue would get now."""
    request = bench.scheduler.waiting.head()
    assert request is not None
    return bench.scheduler.memory.offer(request)


@pytest.mark.parametrize(("options", "needed"), [({}, 20), ({"window": 10}, 15)])
def test_idle_hits_leave_the_free_list_and_null_blocks_do_not(options, needed):
    """H-06: 40 tokens at block size 2, 10 of 20 blocks found and idle; with a window of 10 half of those are null."""
    bench = bench_of(group(2, **options))
    prompt = tokens(1, 40)
    bench.add(prompt[:21], max_tokens=1)
    bench.run()
    bench.add(prompt, max_tokens=1)
    found = offer(bench)
    assert (found.hit.num_tokens, found.num_blocks) == (20, needed)
    free = bench.free
    bench.issue()
    assert free - bench.free == needed
    bench.settle()
    bench.run()
    bench.check_all_ended()


def test_hits_that_others_hold_cost_nothing():
    """H-06: one idle hit and one new block are two; with the hit in use it is the new block alone."""
    bench = bench_of(group(2))
    bench.add([11, 12, 13], max_tokens=1)
    bench.run()
    bench.add([11, 12, 14, 15], max_tokens=1)
    assert offer(bench).num_blocks == 2
    bench.issue()
    bench.add([11, 12, 16, 17], max_tokens=1)
    assert offer(bench).num_blocks == 1
    bench.settle()
    bench.run()
    bench.check_all_ended()


def test_what_is_promised_shrinks_with_every_chunk():
    """7 blocks of a full group, and of a window of 32 with 32 tokens in flight no more than 5 at once."""
    bench = bench_of(
        group(16), group(16, window=32), max_num_batched_tokens=32, prefix_caching=False
    )
    scheduler = bench.scheduler
    bench.add(7 * 16, max_tokens=4)
    promised, own, table = [], [], scheduler.table
    for _ in range(4):
        bench.issue()
        prompts = np.flatnonzero(table.num_tokens - table.num_computed_tokens > 1)
        promised.append(scheduler.memory.promised(table, Share(prompts=prompts)))
        bench.settle()
        own.append(np.count_nonzero(scheduler.blocks.block_ids[1][0]))
    # settled 32, 64, 96, 112: the window needs blocks from 0, 2, 4, 5 on, and so keeps two each time
    assert own == [2 - 0, 4 - 2, 6 - 4, 7 - 5]
    # full: 5, 3, 1, 0 are missing. Window: as many, but never more than 5 less the 2, 4, 4, 3 that it holds then
    assert promised == [5 + 3, 3 + 1, 1 + 1, 0]
    bench.run()
    bench.check_all_ended()


kinds = st.one_of(
    st.builds(group, st.sampled_from([2, 3, 4, 8])),
    st.builds(lambda size, window: group(size, window=window), st.sampled_from([2, 4]), st.integers(1, 30)),
    st.builds(lambda size, chunk: group(size, chunk=chunk), st.sampled_from([2, 4]), st.integers(1, 30)),
)  # fmt: skip


@given(
    groups=st.lists(kinds, min_size=1, max_size=3),
    length=st.integers(1, 120),
    shared=st.integers(0, 119),
    budget=st.integers(1, 60),
    depth=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_prompt_never_takes_more_than_its_offer(groups, length, shared, budget, depth):
    """H-07: what was counted too low is missing in the middle of the prompt, and someone is preempted for it."""
    bench = bench_of(*groups, max_num_batched_tokens=budget, depth=depth, max_model_len=128)
    prompt = tokens(1, length)
    bench.add([*prompt[:shared], 5], max_tokens=1)
    bench.run()
    bench.add(prompt, max_tokens=1)
    expected, free, most = offer(bench).num_blocks, bench.free, 0
    while bench.scheduler.num_unfinished:
        while bench.scheduler.num_in_flight < depth and bench.issue() is not None:
            most = max(most, free - bench.free)
        bench.settle()
    assert most <= expected
    if all(spec.window == 0 for spec in groups):
        assert most == expected
    bench.run()
    bench.check_all_ended()
