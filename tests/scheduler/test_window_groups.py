"""KV groups that see no further than a window, in one pool with those that see all."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fakes import Bench, group


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 32_000, count).tolist()


def bench_of(*groups, **config) -> Bench:
    return Bench(groups=groups, **({"prefix_caching": True, "vocab_size": 32_000} | config))


def tables(bench: Bench, number: int) -> list[list[int]]:
    """What the request's row holds, by group, null blocks too."""
    (row,) = (r.row for r in bench.scheduler.table.requests if r is not None and r.number == number)
    blocks = bench.scheduler.blocks
    return [
        ids[row, : held[row]].tolist()
        for ids, held in zip(blocks.block_ids, blocks.num_blocks, strict=True)
    ]


COMMON = tokens(0, 48)


def test_tables_of_a_full_and_two_window_groups():
    """H-01, its ids but for one thing: at 55 settled tokens the windows have let their first block go already."""
    bench = bench_of(group(16), group(16, window=32), group(16, window=32), usable=20)
    bench.add(COMMON + tokens(1, 7))
    bench.issue()
    assert tables(bench, 0) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert bench.free == 20 - 12
    bench.settle()
    assert tables(bench, 0) == [[1, 2, 3, 4], [0, 6, 7, 8], [0, 10, 11, 12]]
    bench.add(COMMON + tokens(2, 5))
    assert bench.issue() == {0: 1, 1: 5}
    admissions = bench.last_step.admissions
    assert admissions.num_cached_tokens.tolist() == [48]
    assert [ids.tolist() for ids in admissions.block_ids] == [[1, 2, 3], [0, 6, 7], [0, 10, 11]]
    assert tables(bench, 1) == [[1, 2, 3, 13], [0, 6, 7, 14], [0, 10, 11, 15]]
    assert bench.scheduler.pool.ref_counts[[1, 2, 3, 6, 7, 10, 11]].tolist() == [2] * 7
    assert bench.free == 20 - 12 - 3 + 2
    bench.settle()
    bench.run()
    bench.check_all_ended()


def test_a_window_block_goes_when_the_step_that_reads_it_has_settled():
    """B12, H-04: window 128, block 32. With 158 settled and position 158 in flight, block 0 is still being read."""
    bench = bench_of(group(32, window=128), depth=2)
    bench.add(158, max_tokens=9)
    bench.issue()
    bench.issue()  # position 158, whose window begins at 31: the optimistic count is 159
    assert bench.scheduler.table.num_computed_tokens[0] == 159
    assert tables(bench, 0)[0][0] > 0
    bench.settle()  # 158 have settled: (158 - 127) // 32 = 0 may go
    assert tables(bench, 0)[0][0] > 0
    bench.issue()
    free = bench.free
    bench.settle()  # 159: 32 // 32 = 1
    assert tables(bench, 0)[0][0] == 0
    assert len(tables(bench, 0)[0]) == 5
    assert bench.free == free + 1
    bench.run()
    bench.check_all_ended()


def test_a_window_group_takes_what_was_predicted():
    """H-07: block 2, window 8. Each step of 4 tokens takes two blocks, and returns what its settling hides."""
    bench = bench_of(group(2, window=8), max_num_batched_tokens=4, prefix_caching=False)
    bench.add(16, max_tokens=1)
    taken, held = [], []
    for _ in range(4):
        assert bench.issue() == {0: 4}
        taken.append(len(bench.last_step.grown_block_ids[0]))
        held.append(9_999 - bench.free)
        bench.settle()
    assert taken == [2, 2, 2, 2]
    # settled 0, 4, 8, 12: first needed max(0, settled - 7) // 2 = 0, 0, 0, 2, of 2, 4, 6, 8
    assert held == [2, 4, 6, 6]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_prompt_much_longer_than_the_pool_runs_through_a_window(kind, depth):
    """H-09's arithmetic at the door: 32 tokens a step and a window of 32 need few blocks, however long the prompt."""
    most = {1: 5, 2: 7}[depth]  # ceil((32 - 1 + 32 * depth - 1) / 16) + 1
    bench = bench_of(group(16, **{kind: 32}), usable=most, max_num_batched_tokens=32, depth=depth)
    bench.add(400, max_tokens=20)
    bench.run()
    assert bench.ends == {0: FinishCode.LENGTH}
    assert bench.scheduler.num_preemptions == 0
    bench.check_all_ended()
    small = bench_of(
        group(16, **{kind: 32}), usable=most - 1, max_num_batched_tokens=32, depth=depth
    )
    with pytest.raises(ValueError, match="the whole KV pool holds"):
        small.add(400, max_tokens=20)


def test_groups_of_different_block_sizes():
    """H-10: full 32, window 32 in blocks of 16. 112 tokens hold 4 and 7 blocks; hits are multiples of 32."""
    bench = bench_of(group(32), group(16, window=32))
    prompt = tokens(1, 113)
    bench.add(prompt[:112], max_tokens=2)
    bench.issue()
    assert [len(ids) for ids in tables(bench, 0)] == [4, 7]
    bench.settle()
    for length in (113, 97):
        number = bench.add(prompt[:length], max_tokens=1)
        bench.issue()
        assert bench.last_step.admissions.num_cached_tokens.tolist() == [96]
        assert [len(ids) for ids in bench.last_step.admissions.block_ids] == [3, 6]
        bench.settle()
        assert bench.cached[number] == 96
    bench.run()
    bench.check_all_ended()


FULL, TWO, FOUR = {}, {"window": 32}, {"window": 64}


@pytest.mark.parametrize(
    "mix",
    [
        (FULL, TWO),
        (TWO, FOUR),
        (FULL, TWO, TWO),
        (FULL, TWO, FOUR),
        (FULL, FULL, TWO),
        (FULL, TWO, FULL, FOUR),
        (FULL, {"chunk": 64}, {"chunk": 48}),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_mixes_of_groups_hit_alike(mix, depth):
    """H-11, H-12: 48 shared tokens and 7 or 5 of one's own: 48 cached, whatever the groups, and no block twice."""
    bench = bench_of(*(group(16, **options) for options in mix), usable=60, depth=depth)
    first = bench.add(COMMON + tokens(1, 7), max_tokens=20)
    bench.issue()
    bench.settle()
    second = bench.add(COMMON + tokens(2, 5), max_tokens=20)
    bench.run()
    assert bench.cached == {second: 48}
    assert bench.issued == {first: 55 + 19, second: 5 + 19}
    third = bench.add(COMMON + tokens(3, 5), max_tokens=20)  # of idle blocks now
    bench.run()
    assert bench.cached[third] == 48
    bench.check_all_ended()


def test_a_hit_of_idle_window_blocks_counts_once_at_admission():
    """H-06: idle hits leave the free list, but a window gives them back: counted as both, a request never fits.

    Window 32, 16 tokens a step: at most ceil((31 + 16 - 1) / 16) + 1 = 4 blocks at once, and the pool has 4.
    """
    bench = bench_of(group(16, window=32), usable=4, max_num_batched_tokens=16)
    prompt = tokens(1, 200)
    bench.add(prompt[:64], max_tokens=1)
    bench.run()
    number = bench.add(prompt, max_tokens=1)
    bench.run()
    assert bench.cached == {number: 64}
    bench.check_all_ended()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_full_and_window_groups_under_pressure(policy):
    """Preemptions, resumes and hits with three groups: every read of a block that is not one's own faults."""
    bench = bench_of(
        group(4), group(4, window=10), group(8, chunk=16), usable=50, depth=2, vocab_size=101,
        max_num_batched_tokens=20, long_prefill_token_threshold=9, eos_token_ids=(3,),
        scheduling_policy=policy,
    )  # fmt: skip
    for number in range(30):
        prompt = [(7 * place) % 101 for place in range(3 + number * 5 % 23)]
        options = {"priority": {"priority": number % 3}, "fair": {"user": "abc"[number % 3]}}
        bench.add(prompt, max_tokens=1 + number * 3 % 17, submit=options.get(policy, {}))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert len(bench.cached) > 5
    bench.check_all_ended()
