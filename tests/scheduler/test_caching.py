"""What the scheduler finds in the prefix cache and keeps there. block_size is 16 unless said.

The cache itself is tested in test_prefix_cache.py; here every number comes through schedule and settle, and the fake
worker's cache faults at any read of a block that holds another prefix.
"""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fakes import Bench, group, scripted

EOS = 3


def caching(**config) -> Bench:
    return Bench(**({"prefix_caching": True, "vocab_size": 32_000} | config))


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 32_000, count).tolist()


COMMON = tokens(0, 48)


def table(bench: Bench, number: int) -> list[int]:
    """What the request's row holds in group 0."""
    (row,) = (r.row for r in bench.scheduler.table.requests if r is not None and r.number == number)
    return bench.scheduler.blocks.block_ids[0][
        row, : bench.scheduler.blocks.num_blocks[0][row]
    ].tolist()


def refs(bench: Bench, *ids: int) -> list[int]:
    return bench.scheduler.pool.ref_counts[list(ids)].tolist()


def named(bench: Bench, *ids: int) -> list[bool]:
    return [name is not None for name in bench.scheduler.cache.names_of(np.array(ids))]


def serve(bench: Bench, prompt: list[int], **options) -> tuple[int, int]:
    """Run one request to its end; (tokens cached, tokens that its first step ran)."""
    number = bench.add(prompt, **({"max_tokens": 1} | options))
    ran = bench.step()
    assert ran is not None
    bench.run()
    return bench.cached.get(number, 0), ran[number]


# ---------------------------------------------------------------- the life of shared blocks


def test_shared_blocks_from_the_first_owner_to_the_stranger_who_takes_them():
    """PC-01, its ids and order: 48 common tokens and a tail of one's own, twice, then a prompt of the whole pool."""
    bench = caching(usable=10)
    bench.add(COMMON + tokens(1, 7))
    assert bench.step() == {0: 55}
    assert table(bench, 0) == [1, 2, 3, 4]
    assert named(bench, 1, 2, 3, 4) == [True, True, True, False]
    bench.add(COMMON + tokens(2, 5))
    assert bench.step() == {0: 1, 1: 5}
    assert table(bench, 1) == [1, 2, 3, 5]
    assert refs(bench, 1, 2, 3, 4, 5) == [2, 2, 2, 1, 1]
    assert bench.free == 5
    bench.abort(0)
    bench.abort(1)
    assert bench.scheduler.pool.free_ids().tolist() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    bench.add(COMMON + tokens(3, 6))
    assert bench.step() == {2: 6}
    assert (table(bench, 2), bench.free) == ([1, 2, 3, 5], 6)
    bench.abort(2)
    bench.add(tokens(4, 160), max_tokens=1)
    assert bench.issue() == {3: 160}
    assert table(bench, 3) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert bench.free == 0
    bench.run()
    assert bench.cached == {1: 48, 2: 48}


def test_a_decode_publishes_its_block_when_the_last_token_of_it_has_settled():
    """PC-02: 55 tokens computed and 4 more leave the fourth block open; at 78 it is known and the fifth is not."""
    bench = caching(usable=10)
    bench.add(COMMON + tokens(1, 7), max_tokens=40)
    for _ in range(1 + 4):
        bench.step()
    assert table(bench, 0) == [1, 2, 3, 4]
    assert not any(named(bench, 4))
    for _ in range(19):
        bench.step()
    assert table(bench, 0) == [1, 2, 3, 4, 5]
    assert named(bench, 3, 4, 5) == [True, True, False]
    continued = bench.submits[0].prompt_token_ids.tolist() + bench.outputs[0]
    bench.add(continued[:70], max_tokens=1)
    assert bench.step() == {0: 1, 1: 70 - 64}
    bench.run()
    bench.check_all_ended()


def test_a_prompt_served_again_and_its_variants():
    """B01, PC-04, PC-09: the last token is always computed, in a block of one's own; the chain goes on behind it."""
    bench = caching(usable=20)
    prompt = COMMON[:32]
    assert serve(bench, prompt) == (0, 32)
    assert serve(bench, prompt) == (16, 16)
    assert serve(bench, prompt[:16]) == (0, 16)
    assert serve(bench, [*prompt, 7]) == (32, 1)
    assert serve(bench, prompt + tokens(9, 16)) == (32, 16)
    assert serve(bench, prompt[:15]) == (0, 15)
    assert serve(bench, [*prompt[:31], 7]) == (16, 16)
    bench.check_all_ended()


def test_the_recomputed_tail_is_not_written_into_the_shared_block():
    """B01: recomputed in place, it is written while others read it."""
    bench = caching(usable=20)
    bench.add(COMMON[:32], max_tokens=9)
    bench.step()
    bench.add(COMMON[:32], max_tokens=9)
    bench.step()
    assert (table(bench, 0)[:2], table(bench, 1)[0]) == ([1, 2], 1)
    assert table(bench, 1)[1] not in table(bench, 0)
    bench.run()
    bench.check_all_ended()


def test_the_order_in_which_blocks_are_evicted():
    """PC-03: 87 and 48 tokens of 160; the elder's go first, the deepest of it before the start."""
    bench = caching(usable=10)
    bench.add(tokens(1, 87))
    bench.add(tokens(2, 48))
    bench.issue()
    bench.settle()
    assert bench.free == 1
    bench.abort(0)
    assert bench.scheduler.pool.free_ids().tolist() == [6, 10, 5, 4, 3, 2, 1]
    bench.abort(1)
    assert bench.scheduler.pool.free_ids().tolist() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    bench.add(tokens(1, 87)[:35])
    assert bench.step() == {2: 3}
    assert (table(bench, 2), bench.free) == ([1, 2, 6], 7)


def test_caching_off_means_off():
    """PC-08: block 4, 4 blocks. The same ten tokens again take blocks of their own, and nothing is counted."""
    bench = Bench(usable=4, block_size=4, vocab_size=32_000)
    bench.add(COMMON[:10], max_tokens=1)
    bench.run()
    bench.add(COMMON[:16], max_tokens=1)
    assert bench.issue() == {1: 16}
    bench.add(tokens(1, 4), max_tokens=1)
    bench.settle()
    bench.run()
    stats = bench.scheduler.cache.stats
    assert (stats.requests, stats.queries, stats.hits) == (0, 0, 0)
    assert bench.cached == {}
    bench.check_all_ended()


# ---------------------------------------------------------------- who finds what when


def test_two_equal_prompts_of_one_step_share_nothing():
    """B03 (a), PC-14: a block that this step only computes holds nothing yet that a read could find."""
    bench = caching(max_num_batched_tokens=1000)
    for _ in range(2):
        bench.add(COMMON + COMMON + [9, 9, 9, 9], max_tokens=2)
    assert bench.step() == {0: 100, 1: 100}
    for number in (2, 3, 4):
        bench.add(COMMON + COMMON + [9, 9, 9, 9], max_tokens=2)
        assert bench.step()[number] == 4
    bench.run()
    bench.check_all_ended()


@pytest.mark.parametrize(("depth", "found"), [(1, 16), (2, 0)])
def test_a_hit_ends_where_settled_progress_ends(depth, found):
    """B03 (b): 20 of the first prompt's 32 tokens were computed: 16 are found, and before they settled none."""
    bench = caching(max_num_batched_tokens=20, long_prefill_token_threshold=20, depth=depth)
    for _ in range(2):
        bench.add(COMMON[:32], max_tokens=4)
    assert bench.issue() == {0: 20}
    if depth == 1:
        bench.settle()
    assert bench.issue() == {0: 12, 1: 8}
    assert bench.last_step.admissions.num_cached_tokens.tolist() == [found]
    bench.settle()
    bench.run()
    bench.check_all_ended()


def test_a_preempted_request_comes_back_to_its_own_blocks():
    """B02: 64 tokens stored and one output; the token count was once taken before the hit was known.

    9 blocks, two prompts of 64: both want a fifth block in step 2, and one is free.
    """
    bench = caching(usable=9, max_num_batched_tokens=200)
    bench.add(tokens(1, 64), max_tokens=2)
    bench.add(tokens(2, 64), max_tokens=3)
    assert bench.step() == {0: 64, 1: 64}
    held = table(bench, 1)
    assert bench.step() == {0: 1}
    assert bench.scheduler.num_preemptions == 1
    assert bench.step() == {1: 1}
    admissions = bench.last_step.admissions
    assert (admissions.num_tokens.tolist(), admissions.num_cached_tokens.tolist()) == ([65], [64])
    assert table(bench, 1)[:4] == held
    assert len(set(table(bench, 1))) == 5
    assert len(bench.last_step.run_rows) == 0  # one uncomputed token: the default
    bench.run()
    assert bench.cached == {}  # nothing of the prompt was found when it first came
    stats = bench.scheduler.cache.resumed_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 65, 64)
    bench.check_all_ended()


def test_a_hit_is_pinned_by_the_admission_and_a_refused_one_leaves_no_trace():
    """B11, PC-07: the block just matched was evicted for the same request; one that waits kept what it had matched.

    5 blocks: X holds blocks 1 and 2 and has ended; a neighbour holds two, later one. X and 32 tokens more need 2 + 2.
    """
    bench = caching(usable=5)
    serve(bench, COMMON[:32])
    neighbour = bench.add(tokens(1, 17), max_tokens=9)
    bench.step()
    free, counts = bench.scheduler.pool.free_ids().tolist(), bench.scheduler.pool.ref_counts.copy()
    assert free[-2:] == [2, 1]
    late = bench.add(COMMON[:32] + tokens(2, 32), max_tokens=1)
    assert bench.step() == {neighbour: 1}
    assert bench.scheduler.pool.free_ids().tolist() == free
    assert (bench.scheduler.pool.ref_counts == counts).all()
    bench.abort(neighbour)
    assert bench.step() == {late: 32}
    assert bench.cached == {late: 32}
    bench.run()
    bench.check_all_ended()


def test_statistics_count_admissions_not_attempts():
    """PC-17: a refused attempt counts nothing; a resume counts apart."""
    bench = caching(usable=5)
    serve(bench, COMMON[:32])
    stats = bench.scheduler.cache.stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 32, 0)
    bench.add(tokens(1, 33), max_tokens=9)
    bench.step()
    bench.add(COMMON, max_tokens=1)
    for _ in range(3):
        bench.step()
        assert (stats.requests, stats.queries, stats.hits) == (2, 65, 0)
    bench.abort(1)
    bench.step()
    assert (stats.requests, stats.queries, stats.hits) == (3, 65 + 48, 32)
    assert bench.scheduler.cache.resumed_stats.requests == 0


def test_what_was_in_flight_past_the_end_is_not_found():
    """PC-16: block 1, prompt of 4 and 2 outputs: 5 tokens were computed, the sixth is known and has no KV."""
    bench = caching(block_size=1, depth=2)
    first = bench.add([11, 12, 13, 14], max_tokens=2)
    bench.run()
    again = [11, 12, 13, 14, *bench.outputs[first]]
    assert serve(bench, [*again, 15]) == (5, 2)
    bench.check_all_ended()


def test_what_ran_past_a_stop_is_not_found():
    """A row that stopped has run once more: what that step computed belongs to no one."""
    bench = caching(
        block_size=1,
        depth=2,
        model=scripted({0: [50, EOS, 60], 1: []}, {0: 4, 1: 8}),
        eos_token_ids=(EOS,),
    )
    bench.add([11, 12, 13, 14], max_tokens=5)
    bench.run()
    assert bench.outputs == {0: [50, EOS]}
    bench.add([11, 12, 13, 14, 50, EOS, 60, 70], max_tokens=1, seed=1)
    assert bench.step() == {1: 8 - 5}
    bench.run()
    bench.check_empty()


def test_salts_keep_prompts_apart():
    """PC-12, B06: "" means none; a salt that was dropped on the way isolates nothing."""
    bench = caching()
    found = [
        serve(bench, COMMON[:33], submit={"cache_salt": salt})[0]
        for salt in ("a", "b", "a", None, "", "b")
    ]
    assert found == [0, 0, 32, 0, 32, 32]
    bench.check_all_ended()


def test_cached_tokens_are_told_once_and_of_the_prompt_alone():
    """A request that comes with outputs may find those cached too: they are no part of its prompt."""
    bench = caching()
    first = bench.add(COMMON, max_tokens=30)
    bench.run()
    bench.add(COMMON, outputs=bench.outputs[first][:20], max_tokens=30, seed=first)
    assert bench.step() == {1: 68 - 64}
    assert bench.cached == {1: 48}
    bench.run()
    assert bench.outputs[1] == bench.outputs[first][20:]


@pytest.mark.parametrize("when", ["before", "after"])
def test_cached_tokens_of_an_aborted_request_do_not_follow_its_end(when):
    """The front has forgotten the number by then, or given it another meaning."""
    bench = caching(depth=2)
    serve(bench, COMMON)
    number = bench.add(COMMON, max_tokens=9)
    bench.issue()
    if when == "after":
        bench.settle()
    bench.abort(number)
    bench.drain()
    bench.run()
    assert bench.ends[number] is FinishCode.ABORT
    assert bench.cached == ({number: 32} if when == "after" else {})
    bench.check_empty()


# ---------------------------------------------------------------- blocks of a request whose last token is in flight


def test_blocks_of_a_last_token_in_flight_are_kept_until_it_settles():
    """A-03: short's row goes with the second step, its 3 blocks when the first settles (9,993 -> 9,996), published."""
    bench = caching(depth=2)
    short, long = tokens(1, 33), tokens(2, 33)
    bench.add(short, max_tokens=1)
    bench.add(long, max_tokens=100)
    assert bench.issue() == {0: 33, 1: 33}
    assert bench.free == 9_999 - 6
    assert bench.issue() == {1: 1}
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.free == 9_999 - 6
    bench.settle()
    assert bench.free == 9_999 - 3
    assert bench.ends == {0: FinishCode.LENGTH}
    bench.add(short, max_tokens=1)
    bench.issue()
    assert bench.last_step.admissions.num_cached_tokens.tolist() == [32]
    bench.run()
    bench.abort(1)
    bench.drain()
    bench.run()
    bench.check_empty()


def test_they_are_taken_back_before_anyone_is_preempted():
    """6 blocks, all taken; the elder opens a fourth while the other's three only wait to be published."""
    bench = caching(depth=2, usable=6)
    bench.add(tokens(1, 48), max_tokens=5)
    bench.add(tokens(2, 33), max_tokens=1)
    assert bench.issue() == {0: 48, 1: 33}
    assert bench.free == 0
    assert bench.issue() == {0: 1}
    assert (bench.scheduler.num_preemptions, bench.free) == (0, 3 - 1)
    bench.run()
    assert len(bench.outputs[1]) == 1
    assert bench.scheduler.num_preemptions == 0
    bench.check_all_ended()


def test_an_abort_gives_them_back_at_once():
    bench = caching(depth=2)
    bench.add(tokens(1, 33), max_tokens=1)
    bench.issue()
    assert bench.issue() == {}
    assert bench.free == 9_999 - 3
    bench.abort(0)
    assert bench.free == 9_999
    bench.run()
    bench.check_empty()


# ---------------------------------------------------------------- reset


def test_reset_is_refused_while_blocks_are_in_use():
    """PC-18: two requests hold 5 blocks; after their end the cache is emptied and the same prompt finds nothing."""
    bench = caching()
    bench.add(COMMON, max_tokens=4)
    bench.add(tokens(1, 20), max_tokens=4)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    assert all(named(bench, 1, 2, 3))
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.cache.num_cached == 0
    assert serve(bench, COMMON) == (0, 48)
    assert bench.scheduler.reset_prefix_cache(preempt_running=True)  # nobody runs
    assert serve(bench, COMMON) == (0, 48)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reset_by_force_queues_everyone_again_in_order(depth):
    """P-11, S06: ten running requests wait in their old order; tokens in flight are kept, and no output changes."""
    bench = caching(depth=depth)
    for number in range(10):
        bench.add(COMMON[: 20 + number], max_tokens=9)
    for _ in range(3):
        bench.issue()
        if depth == 1 or bench.scheduler.num_in_flight == 2:
            bench.settle()
    assert not bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.reset_prefix_cache(preempt_running=True)
    assert (bench.waiting, bench.running) == (list(range(10)), [])
    assert (bench.free, bench.scheduler.cache.num_cached) == (9_999, 0)
    bench.run()
    assert bench.scheduler.num_preemptions == 10
    bench.check_all_ended()


# ---------------------------------------------------------------- more than one group


def test_hits_of_a_smaller_block_size_count_in_the_larger():
    """Groups of 32 and 48: base 16, alignment 96. A prompt of 100 hits 96, one of 90 nothing (B13)."""
    bench = caching(groups=(group(32), group(48)))
    prompt = tokens(1, 200)
    serve(bench, prompt)
    assert serve(bench, prompt[:100]) == (96, 4)
    assert serve(bench, prompt[:90]) == (0, 90)
    assert serve(bench, prompt[:193]) == (192, 1)
    bench.check_all_ended()
