"""Priorities: the smaller the more urgent, among equals by arrival; who is least urgent gives way."""

from __future__ import annotations

import pytest
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fakes import Bench


def bench_of(priorities: list[int], arrivals: list[int] | None = None, **config) -> Bench:
    """One request a priority, of one prompt token and one output, submitted in the order of `arrivals`."""
    bench = Bench(**({"scheduling_policy": "priority"} | config))
    by_arrival = sorted(
        range(len(priorities)), key=(arrivals or range(len(priorities))).__getitem__
    )
    for number in by_arrival:
        bench.add(1, number=number, max_tokens=1, submit={"priority": priorities[number]})
    return bench


def order_of_service(bench: Bench) -> list[int]:
    """Whoever runs, step by step."""
    served = []
    while (ran := bench.step()) is not None:
        served.extend(ran)
    bench.check_all_ended()
    return served


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
        ([1, 1, 1, 1], [4, 1, 3, 2], [1, 3, 2, 0]),
        ([5, 1, 8, 3, 2, 7, 4, 6], None, [1, 4, 3, 6, 0, 7, 5, 2]),  # priorities 1, 2, ... 8
    ],
)
def test_the_most_urgent_is_next_and_among_equals_the_first(priorities, arrivals, order):
    """S-14, S21 (b): equal priorities go by submission, and nothing compares two requests with each other."""
    assert order_of_service(bench_of(priorities, arrivals, max_num_seqs=1)) == order


def test_two_rows_go_to_the_two_most_urgent():
    """S-14: and the others wait in their order."""
    bench = bench_of([3, 1, 2, 0], max_num_seqs=2)
    assert bench.step().keys() == {3, 1}
    assert bench.waiting == [2, 0]


def test_a_waiting_request_displaces_no_running_one_and_is_next():
    """S21 (a): two of priority 10 run; one of 0 waits for the first row that is free, before a third of 10."""
    bench = Bench(scheduling_policy="priority", max_num_seqs=2)
    for max_tokens in (3, 9):
        bench.add(4, max_tokens=max_tokens, submit={"priority": 10})
    bench.step()
    bench.add(4, max_tokens=9, submit={"priority": 10})
    bench.add(4, max_tokens=9, submit={"priority": 0})
    assert bench.waiting == [3, 2]
    assert bench.step() == {0: 1, 1: 1}
    assert bench.step() == {0: 1, 1: 1}
    assert bench.step() == {1: 1, 3: 4}
    assert bench.scheduler.num_preemptions == 0


def test_the_least_urgent_gives_way_though_it_came_first():
    """P-02: 5 blocks; `lo` of 32 tokens decodes, `hi` of 32 comes; when `hi` needs its third block, `lo` goes."""
    bench = Bench(
        usable=5, max_num_batched_tokens=200, max_num_seqs=3, scheduling_policy="priority"
    )
    lo = bench.add(32, submit={"priority": 5})
    bench.step()
    hi = bench.add(32, submit={"priority": 0})
    assert bench.step() == {lo: 1, hi: 32}
    assert bench.free == 0
    assert bench.step() == {hi: 1}
    assert (bench.running, bench.waiting) == ([hi], [lo])
    bench.run()
    assert list(bench.ends) == [hi, lo]
    bench.check_all_ended()


def test_of_equals_the_newest_gives_way_and_each_only_once():
    """S21 (c): `hi` pushes both others out, the newer first; they come back in order of arrival, and nobody goes round
    in circles."""
    bench = Bench(usable=6, max_num_seqs=3, scheduling_policy="priority")
    first = bench.add(16, max_tokens=40, submit={"priority": 5})
    second = bench.add(16, max_tokens=40, submit={"priority": 5})
    bench.step()
    hi = bench.add(16, max_tokens=70, submit={"priority": 0})
    left: list[int] = []
    while len(bench.ends) < 3:
        before = bench.running
        bench.step()
        left += [n for n in before if n not in bench.running and n not in bench.ends]
    assert left == [second, first]
    assert list(bench.ends) == [hi, first, second]
    bench.run()
    bench.check_all_ended()


def test_the_urgent_prompt_takes_from_the_budget_first():
    """Both prompts run in chunks; the tokens of a step go to the urgent one, though it came later."""
    bench = Bench(
        max_num_batched_tokens=32, long_prefill_token_threshold=20, scheduling_policy="priority"
    )
    bench.add(80, submit={"priority": 1})
    assert bench.step() == {0: 32}  # alone: no cap
    bench.add(40, submit={"priority": 0})
    assert bench.step() == {0: 20, 1: 12}
    assert bench.step() == {1: 20, 0: 12}


def test_an_abort_leaves_nothing_of_a_waiting_request():
    bench = bench_of([3, 1, 2], max_num_seqs=1)
    for number in (2, 0, 1):
        assert bench.abort(number)
    assert bench.waiting == []
    assert bench.step() is None
    bench.drain()
    assert set(bench.ends.values()) == {FinishCode.ABORT}
    bench.check_empty()
