"""When blocks run out: who gives way, what he keeps, and how he comes back. block_size is 16 unless said."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.policy import FirstComeFirstServed
from rowcast.scheduler.request import Request
from rowcast.tests.scheduler.fakes import Bench, hash_model


def two_that_collide(**config) -> Bench:
    """Two prompts of 80 tokens in 10 blocks: the first decode of the elder needs an eleventh."""
    bench = Bench(usable=10, max_num_batched_tokens=200, **config)
    bench.add(80, max_tokens=16)
    bench.add(80, max_tokens=16)
    return bench


def test_the_newest_running_request_gives_way():
    """P-01's policy, P-04: counters at zero, outputs kept, no block owned."""
    bench = two_that_collide()
    assert bench.step() == {0: 80, 1: 80}
    assert bench.step() == {0: 1}
    assert (bench.running, bench.waiting, bench.free) == ([0], [1], 4)
    assert bench.scheduler.num_preemptions == 1
    (preempted,) = bench.scheduler.waiting
    assert preempted.num_preemptions == 1
    assert preempted.tokens.tolist()[80:] == bench.outputs[1]
    assert bench.last_step.freed_rows.tolist() == [1]


def test_the_preempted_resumes_with_its_outputs_and_ends_as_if_alone():
    """P-04, P-07, W02: one admission of prompt and outputs, whose prompt length is still the prompt's."""
    bench = two_that_collide()
    bench.step()
    while bench.waiting or not bench.scheduler.num_preemptions:
        bench.step()
    admissions = bench.last_step.admissions
    assert admissions.num_tokens.tolist() == [81]
    assert admissions.num_prompt_tokens.tolist() == [80]
    assert admissions.token_ids.tolist()[80:] == bench.outputs[1][:1]
    bench.run()
    assert bench.issued == {0: 80 + 15, 1: 80 + 81 + 14}
    assert [len(tokens) for tokens in bench.outputs.values()] == [16, 16]
    bench.check_all_ended()


class NewestFirst(FirstComeFirstServed):
    """A queue whose head is not whom the step preempted: in arrival order that one is next, and never fits."""

    def head(self) -> Request | None:
        return max(self, key=lambda request: request.arrival, default=None)


def test_no_admission_in_a_step_that_preempted():
    """P-06: even a request that would fit in the freed blocks waits for the next step."""
    bench = two_that_collide(policy=NewestFirst())
    bench.step()
    bench.add(4)
    assert bench.step() == {0: 1}
    assert bench.last_step.admissions is None
    assert bench.step() == {0: 1, 2: 4}


def test_a_preempted_request_keeps_its_place_in_the_queue():
    bench = two_that_collide()
    bench.step()
    bench.add(4, max_tokens=1)
    while not bench.ends:
        assert bench.step().get(2) is None, "a later request overtook the preempted one"
    assert bench.step() == {1: 81, 2: 4}


def test_a_victim_in_the_middle_of_its_prompt_computes_it_again_from_the_start():
    """63 and 80 tokens in 9 blocks: in step 3 both open their fifth block, and there are nine."""
    bench = Bench(usable=9, max_num_batched_tokens=64)
    bench.add(63, max_tokens=20)
    bench.add(80, max_tokens=16)
    assert bench.step() == {0: 63, 1: 1}
    assert bench.step() == {0: 1, 1: 63}
    assert bench.step() == {0: 1}
    assert (bench.waiting, bench.free) == ([1], 4)
    assert 1 not in bench.outputs
    bench.run()
    assert bench.issued[1] == 64 + 80 + 15
    bench.check_all_ended()


def test_a_request_that_fills_the_pool_ends_and_is_never_its_own_victim():
    """P-10: 40 + 9 tokens need KV for 48, which 3 blocks hold exactly; one more is refused at the door."""
    bench = Bench(usable=3)
    bench.add(40, max_tokens=9)
    bench.run(max_steps=20)
    assert bench.ends == {0: FinishCode.LENGTH}
    assert len(bench.outputs[0]) == 9
    assert bench.scheduler.num_preemptions == 0
    with pytest.raises(ValueError, match="holds 48"):
        bench.add(40, max_tokens=20)
    bench.check_all_ended()


def test_a_request_without_max_tokens_ends_where_the_pool_ends():
    """P-10: None asks for as many as fit, and 48 tokens of KV carry a 49th."""
    bench = Bench(usable=3)
    bench.add(40, max_tokens=None)
    bench.run(max_steps=20)
    assert len(bench.outputs[0]) == 9
    assert bench.ends == {0: FinishCode.LENGTH}
    bench.check_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [9, 48, 512])
def test_results_survive_preemption(depth, budget):
    """P-09: 32 blocks for 34 requests; a token lost, doubled or read from another's block changes all that follow."""
    bench = Bench(
        usable=32, max_num_batched_tokens=budget, max_num_seqs=34, depth=depth, eos_token_ids=(3,)
    )
    for number in range(34):
        bench.add(5 + 3 * number % 40, max_tokens=30, seed=number % 5)
    bench.run()
    if budget > 9:
        assert bench.scheduler.num_preemptions > 0
    bench.check_all_ended()


def test_the_late_token_of_a_preempted_request_is_kept():
    """P-01, A-06: preempted with its first token in flight; it resumes after that token came, with it, once.

    79 tokens fill 5 blocks with one place free: step 2 runs {r0: 1, r1: 80} and step 3 needs r0's sixth block.
    """
    bench = Bench(usable=10, max_num_batched_tokens=100, depth=2)
    bench.add(79, max_tokens=3)
    bench.issue()
    bench.add(80, max_tokens=16)
    assert bench.issue() == {0: 1, 1: 80}
    bench.settle()
    assert bench.issue() == {0: 1}
    assert (bench.running, bench.waiting, bench.free) == ([0], [1], 4)
    assert bench.outputs.get(1) is None
    delivered = dict(bench.settle())
    first = hash_model(1, bench.submits[1].prompt_token_ids)
    assert delivered[1] == first
    bench.run()
    assert bench.outputs[1][0] == first
    assert len(bench.outputs[1]) == 16
    assert bench.issued[1] == 80 + 81 + 14
    bench.check_all_ended()


def test_a_preempted_request_waits_for_its_steps_in_flight_and_is_not_overtaken():
    """A-06: resumed at once, the position whose token is in flight would be sampled twice.

    S-15 steps over a blocked head; ours keeps everyone behind it, since what it waits for is one step away. S22: a step
    with one blocked request, and one that ended and whose row must be told.
    """
    bench = Bench(usable=10, max_num_batched_tokens=200, depth=3)
    bench.add(80, max_tokens=2)
    bench.add(79, max_tokens=16)
    bench.issue()  # {0: 80, 1: 79}, 10 blocks
    assert bench.issue() == {0: 1}
    bench.add(4)
    assert bench.waiting == [1, 2]
    assert (
        bench.issue() == {}
    )  # r0's last token is in flight: freed. All blocks are free, r1 has a step in flight.
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.free == 10
    assert bench.waiting == [1, 2]
    bench.settle()
    assert bench.issue() == {1: 80, 2: 4}
    bench.run()
    bench.check_all_ended()


def test_a_late_token_can_end_a_preempted_request():
    """The token in flight is a stop: the request leaves the queue that it was put back into."""
    bench = Bench(usable=10, max_num_batched_tokens=100, depth=2)
    bench.add(79, max_tokens=3)
    bench.issue()
    prompt = list(range(80))
    bench.add(prompt, stop_token_ids=(hash_model(1, np.array(prompt)),))
    bench.issue()
    bench.settle()
    bench.issue()
    assert bench.waiting == [1]
    bench.settle()
    assert bench.ends[1] is FinishCode.STOP
    assert bench.waiting == []
    bench.run()
    bench.check_all_ended()


def test_a_victim_that_the_step_had_placed_already_is_not_in_it():
    """S04: A (priority 5) comes first in the step, then B (priority 0) finds no block: the plan must lose A again.

    A has 31 computed tokens in 2 blocks, B 48 in 3; both want one, and none of 5 blocks is free.
    """
    bench = Bench(usable=5, max_num_batched_tokens=100, scheduling_policy="priority")
    a = bench.add(30, submit={"priority": 5})
    bench.step()
    b = bench.add(48, submit={"priority": 0})
    assert bench.step() == {a: 1, b: 48}
    assert bench.free == 0
    assert bench.issue(token_budget=8) == {b: 1}
    assert bench.last_step.freed_rows.tolist() == [0]
    assert bench.last_step.admissions is None
    assert (bench.waiting, bench.free) == ([a], 1)
    (preempted,) = bench.scheduler.waiting
    assert (preempted.row, preempted.num_in_flight) == (-1, 0)
    bench.settle()
    bench.run()
    bench.check_all_ended()
