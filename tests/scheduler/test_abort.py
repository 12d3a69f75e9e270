"""Abort in every state: everything comes back once, and the neighbours do not notice."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fakes import FRONT, Bench


def long_prompt() -> Bench:
    """S10: 8 blocks, 16 tokens a step, a prompt of 64."""
    bench = Bench(usable=8, max_num_batched_tokens=16)
    bench.add(64, max_tokens=4)
    return bench


def test_cancelling_while_queued():
    """S-02: one after another of ten; a later step never runs them."""
    bench = Bench()
    for _ in range(10):
        bench.add(10)
    for number in range(10):
        assert bench.abort(number)
        assert not bench.scheduler.is_live(FRONT, number)
        assert len(bench.waiting) == bench.scheduler.num_unfinished == 9 - number
    assert bench.issue() is None
    assert bench.drain() == [(number, -1) for number in range(10)]
    bench.check_empty()


def test_abort_before_the_first_step_is_not_told_to_workers():
    """S10 (a), O-07: a request that never had a row or a block raised when they were given back. It gave no token."""
    bench = long_prompt()
    bench.abort(0)
    assert bench.issue() is None
    bench.drain()
    assert (bench.ends, bench.outputs) == ({0: FinishCode.ABORT}, {})
    assert bench.free == 8
    bench.check_empty()


def test_abort_between_chunks_frees_the_row_in_the_next_message():
    """S10 (b), O-07: 32 of 64 tokens computed, 2 blocks held; afterwards there is nothing to say, and no spinning."""
    bench = long_prompt()
    bench.step()
    bench.step()
    assert bench.free == 8 - 2
    bench.abort(0)
    assert bench.free == 8
    assert bench.step() == {}
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.issue() is None
    assert bench.outputs == {}
    bench.check_empty()


def test_what_came_before_an_abort_is_kept():
    """O-07: after one token and two more it has three, and the reason is the abort."""
    bench = Bench()
    bench.add(5, max_tokens=9)
    for _ in range(3):
        bench.step()
    bench.abort(0)
    bench.run()
    assert (bench.ends, len(bench.outputs[0])) == ({0: FinishCode.ABORT}, 3)
    bench.check_empty()


def test_abort_after_preemption_frees_nothing_twice():
    """S10 (c): the row went with the preemption, the queue entry goes now."""
    bench = Bench(usable=8, max_num_batched_tokens=16)
    elder = bench.add(63, max_tokens=20)
    bench.add(64, max_tokens=4)
    while not bench.scheduler.num_preemptions:  # the elder opens its fifth block, then R its fourth
        bench.step()
    assert (bench.running, bench.waiting, bench.free) == ([elder], [1], 8 - 5)
    assert bench.last_step.freed_rows.tolist() == [1]
    bench.abort(1)
    assert (bench.waiting, bench.free) == ([], 8 - 5)
    bench.step()
    assert bench.last_step.freed_rows.tolist() == []
    bench.abort(elder)
    assert bench.free == 8
    assert bench.step() == {}
    assert bench.issue() is None
    assert bench.ends == {elder: FinishCode.ABORT, 1: FinishCode.ABORT}
    bench.check_empty()


def test_unknown_and_ended_numbers_are_ignored():
    """S10 (d): an id that nobody has, or no longer, was a KeyError for everyone."""
    bench = long_prompt()
    assert not bench.abort(7)
    assert not bench.scheduler.abort(b"nobody", 0)
    bench.run()
    assert not bench.abort(0)
    assert bench.drain() == []
    assert bench.ends == {0: FinishCode.LENGTH}
    bench.check_all_ended()


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_abort_between_plan_and_result(max_tokens):
    """S09, A-11: the neighbour's token is delivered, one's own is dropped; ends once, also if it was the last token."""
    bench = Bench()
    bench.add(5, max_tokens=max_tokens)
    bench.add(5, max_tokens=5)
    bench.issue()
    assert bench.abort(0)
    assert not bench.abort(0)
    assert bench.settle() == [(0, -1), (1, bench.outputs[1][0])]
    assert bench.ends == {0: FinishCode.ABORT}
    assert not bench.abort(0)
    freed = []
    while bench.step() is not None:
        freed += bench.last_step.freed_rows.tolist()
    assert freed == [0, 1]
    assert len(bench.outputs[1]) == 5
    bench.check_empty()


def test_abort_at_depth_2_drops_what_is_in_flight():
    """S08 (c): two steps run it; after the abort nothing of it is delivered."""
    bench = Bench(depth=2)
    bench.add(5, max_tokens=9)
    bench.add(5, max_tokens=9)
    bench.issue()
    bench.issue()
    bench.abort(0)
    assert bench.drain() == [(0, -1)]
    bench.run()
    assert 0 not in bench.outputs
    assert len(bench.outputs[1]) == 9
    bench.check_empty()


def test_abort_of_a_request_whose_last_token_is_in_flight():
    """A-11 at depth 2: row and blocks are back already; reason abort, not length."""
    bench = Bench(depth=2)
    bench.add(5, max_tokens=1)
    bench.issue()
    bench.issue()
    assert bench.running == []
    assert bench.abort(0)
    bench.settle()
    bench.settle()
    assert bench.ends == {0: FinishCode.ABORT}
    assert bench.outputs == {}
    bench.check_empty()


def test_abort_of_a_preempted_request_with_a_token_in_flight():
    """Off its row, in the queue, and a token on its way: three places to clean."""
    bench = Bench(usable=10, max_num_batched_tokens=100, depth=2)
    bench.add(79, max_tokens=3)
    bench.issue()
    bench.add(80)
    bench.issue()
    bench.settle()
    bench.issue()
    assert bench.waiting == [1]
    bench.abort(1)
    bench.run()
    assert 1 not in bench.outputs
    assert bench.ends[1] is FinishCode.ABORT
    bench.check_empty()


def test_a_front_that_is_gone_takes_its_requests_along():
    """A client that vanishes: nothing of it is delivered, nothing stays; the other front's requests go on."""
    bench = Bench(depth=2)
    bench.add(5, max_tokens=1)
    bench.run()
    for number in (1, 2, 3):
        bench.add(5, max_tokens=9, front=b"other" if number == 2 else FRONT)
    bench.issue()
    bench.abort(3)
    bench.scheduler.abort_front(FRONT)
    bench.scheduler.abort_front(b"never heard of")
    bench.run()
    assert sorted(bench.outputs) == [0, 2]
    bench.scheduler.forget(b"other", [2])
    assert bench.scheduler.num_remembered == 0
    assert bench.free == 9_999


def test_random_aborts_leave_nothing():
    """S10 as a stream: aborted at any moment at depth 2, with preemptions."""
    rng = np.random.default_rng(5)
    bench = Bench(depth=2, usable=30, block_size=4, max_num_batched_tokens=20)
    for _ in range(300):
        if len(bench.waiting) < 2:
            bench.add(int(rng.integers(1, 40)), max_tokens=int(rng.integers(1, 30)))
        while bench.scheduler.num_in_flight < 2 and bench.issue() is not None:
            pass
        if rng.random() < 0.3:
            bench.abort(int(rng.integers(len(bench.submits))))
        if bench.scheduler.num_in_flight:
            bench.settle()
    bench.run()
    assert bench.scheduler.num_preemptions > 5
    assert list(bench.ends.values()).count(FinishCode.ABORT) > 5
    bench.check_all_ended()
