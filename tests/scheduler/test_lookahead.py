"""Depth 2: the step after next is issued before the last tokens are back. Depth 1 gives the same tokens."""

from __future__ import annotations

import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fakes import Bench, scripted

EOS = 3


def test_the_next_step_does_not_wait_for_the_last_tokens():
    bench = Bench(depth=2)
    bench.add(10, max_tokens=3)
    assert bench.issue() == {0: 10}
    assert bench.issue() == {0: 1}
    assert bench.scheduler.num_in_flight == 2
    with pytest.raises(AssertionError, match="2 steps are in flight, depth is 2"):
        bench.issue()


@pytest.mark.parametrize(("max_tokens", "total"), [(1, 20), (2, 22), (3, 24), (5, 28)])
def test_no_work_past_max_tokens(max_tokens, total):
    """A-01, S08 (a): prompt + max_tokens - 1 tokens run of each, however early the steps were issued."""
    bench = Bench(depth=2)
    bench.add(10, max_tokens=max_tokens)
    bench.issue()
    bench.add(10, max_tokens=max_tokens)
    bench.run()
    assert bench.num_tokens_run == total
    assert [len(tokens) for tokens in bench.outputs.values()] == [max_tokens, max_tokens]
    bench.check_all_ended()


def test_a_row_whose_last_token_is_in_flight_is_freed_not_run():
    """A-03, with DESIGN.md's order: the next step carries the free, and the token comes all the same."""
    bench = Bench(depth=2)
    bench.add(33, max_tokens=1)
    bench.add(33, max_tokens=100)
    assert bench.issue() == {0: 33, 1: 33}
    assert bench.free == 9_999 - 6
    assert bench.issue() == {1: 1}
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.free == 9_999 - 3
    bench.settle()
    assert bench.ends == {0: FinishCode.LENGTH}
    assert len(bench.outputs[0]) == 1


def test_row_and_blocks_are_reused_in_the_message_that_frees_them():
    """Workers run steps in order, so nobody reads what the newcomer overwrites."""
    bench = Bench(depth=2, max_num_seqs=1, usable=3)
    bench.add(33, max_tokens=1)
    bench.add(40, max_tokens=2)
    bench.issue()
    assert bench.issue() == {1: 40}
    assert bench.last_step.freed_rows.tolist() == bench.last_step.admissions.rows.tolist() == [0]
    bench.run()
    bench.check_all_ended()


def test_a_token_past_a_stop_is_dropped():
    """S08 (b): the model says x, EOS, z; z was already being computed and nobody sees it."""
    bench = Bench(depth=2, model=scripted({0: [50, EOS, 60]}, {0: 4}), eos_token_ids=(EOS,))
    bench.add(4, max_tokens=5)
    bench.run()
    assert bench.outputs == {0: [50, EOS]}
    assert bench.ends == {0: FinishCode.STOP}
    assert bench.num_tokens_run == 4 + 2
    bench.check_empty()


def test_a_row_that_changed_hands_keeps_the_tokens_apart():
    """A result is settled against the record of its step: the present table names another request by then."""
    model = scripted({0: [50, EOS, 60], 1: [70, 71]}, {0: 4, 1: 4})
    bench = Bench(depth=2, max_num_seqs=1, model=model, eos_token_ids=(EOS,))
    bench.add(4, max_tokens=16)
    bench.add(4, max_tokens=2)
    assert bench.issue() == {0: 4}
    assert bench.issue() == {0: 1}
    bench.settle()
    assert bench.issue() == {0: 1}
    bench.settle()  # EOS: request 0 ends with a step in flight
    assert bench.issue() == {1: 4}
    assert (
        bench.settle() == []
    )  # what request 0 sampled past its end, in the row that is request 1's now
    bench.run()
    assert bench.outputs == {0: [50, EOS], 1: [70, 71]}
    bench.check_empty()


def test_preemption_with_a_token_in_flight_gives_the_tokens_of_depth_1():
    """S06: block 4, 4 blocks, two prompts of 7; a half-fix loses the token in flight or samples it twice."""
    for depth in (1, 2):
        bench = Bench(depth=depth, usable=4, block_size=4)
        bench.add(7, max_tokens=6)
        bench.add(7, max_tokens=6)
        bench.run()
        assert bench.scheduler.num_preemptions == 1
        assert bench.issued[0] == 7 + 5
        bench.check_all_ended()


def test_the_synchronous_reference_of_a_preemption():
    """S06's step table at depth 1: B is preempted in step 3, resumes with 9 tokens in step 7 and ends in step 10."""
    bench = Bench(usable=4, block_size=4)
    bench.add(7, max_tokens=6)
    bench.add(7, max_tokens=6)
    ran = [bench.step() for _ in range(10)]
    assert ran == [{0: 7, 1: 7}, {0: 1, 1: 1}] + [{0: 1}] * 4 + [{1: 9}] + [{1: 1}] * 3
    assert bench.ends == {0: FinishCode.LENGTH, 1: FinishCode.LENGTH}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_do_not_depend_on_depth(depth):
    """A-09: few blocks, small budget, stops: whatever the depth, each gets what it gets alone."""
    bench = Bench(
        depth=depth, usable=24, block_size=4, max_num_batched_tokens=13, eos_token_ids=(EOS,)
    )
    for number in range(25):
        bench.add(1 + number * 5 % 23, max_tokens=1 + number * 3 % 17, stop_token_ids=(number % 9,))
    bench.run()
    bench.check_all_ended()


def test_cancelling_one_a_step_with_two_in_flight():
    """A-02: the k-th cancelled has k outputs; what its steps in flight bring is dropped."""
    bench = Bench(depth=2)
    for _ in range(10):
        bench.add(10, max_tokens=20)
    bench.issue()
    for count, number in enumerate([0, 8, 3, 1, 6, 4, 2, 5, 7, 9]):
        bench.issue()
        bench.abort(number)
        bench.drain()
        assert len(bench.outputs.get(number, [])) == count
        bench.settle()
        assert bench.ends[number] is FinishCode.ABORT
    bench.run()
    bench.check_empty()
