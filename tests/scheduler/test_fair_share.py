"""Fair share: a heavy user cannot starve a light one, idleness saves up nothing, and nobody is remembered."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from rowcast.scheduler.door import QueueFull
from rowcast.scheduler.fair_share import FairShare
from rowcast.scheduler.request import Request, RequestTable
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.fakes import Bench, PositionWorker, position_model


def fair(**config) -> Bench:
    return Bench(**({"scheduling_policy": "fair", "max_num_seqs": 1} | config))


def add(bench: Bench, user: str, prompt: int | list[int], count: int = 1, **params) -> list[int]:
    """Submit so many requests of a user; they bring one output each unless told otherwise."""
    return [
        bench.add(prompt, submit={"user": user}, **({"max_tokens": 1} | params))
        for _ in range(count)
    ]


def policy_of(bench: Bench) -> FairShare:
    policy = bench.scheduler.waiting
    assert isinstance(policy, FairShare)
    return policy


def users_served(bench: Bench, steps: int) -> str:
    """Whose request runs, step by step, with one row and one output each."""
    served = ""
    for _ in range(steps):
        ran = bench.step()
        assert ran is not None
        (number,) = ran
        served += bench.submits[number].user
    return served


# ---------------------------------------------------------------- who is next


@pytest.mark.parametrize(
    ("policy", "num_heavy", "tokens_before"),
    [("fair", 1000, 2 * 4), ("fcfs", 100, 100 * (8 + 3) - (4 * 8 + 4))],
)
def test_one_request_of_a_light_user_passes_a_thousand_of_a_heavy_one(
    policy, num_heavy, tokens_before
):
    """4 rows; prompts of 8 and 4 outputs, so that each request runs 8 + 3 tokens; the light one comes after 2 steps.
    In fair share it waits for the two steps until a row is free, in order of arrival for all that came before it."""
    bench = fair(
        scheduling_policy=policy, max_num_seqs=4, worker=PositionWorker, model=position_model
    )
    add(bench, "heavy", 8, num_heavy, max_tokens=4)
    bench.step()
    bench.step()
    assert bench.num_tokens_run == 4 * 8 + 4
    (light,) = add(bench, "light", 8, max_tokens=4)
    before = bench.num_tokens_run
    ran: dict[int, int] = {}
    while light not in ran:
        ran = bench.step() or {}
    assert bench.num_tokens_run - sum(ran.values()) - before == tokens_before


def test_users_who_come_together_get_rows_in_turn():
    """Charged as they run and not as they are admitted, the first user would get all four rows for their whole life."""
    bench = fair(max_num_seqs=4)
    add(bench, "a", 5, 10)
    add(bench, "b", 5, 10)
    assert bench.step().keys() == {0, 10, 1, 11}


def test_tokens_are_shared_and_not_requests():
    """A request of `a` costs 30 + 2, one of `b` 6 + 2: four of `b` for one of `a`, ties to the older request."""
    bench = fair()
    add(bench, "a", 30, 3)
    add(bench, "b", 6, 9)
    assert users_served(bench, 11) == "a" + "bbbb" + "a" + "bbbb" + "a"


def test_an_output_counts_twice_and_a_prompt_token_once():
    bench = fair(max_num_batched_tokens=4)
    add(bench, "a", 10, max_tokens=3)
    add(bench, "b", 1)
    bench.step()
    assert policy_of(bench).tokens_served("a") == 10  # charged whole, of which 4 are computed
    bench.step()
    bench.step()
    assert policy_of(bench).tokens_served("a") == 10 + 2
    bench.step()
    assert policy_of(bench).tokens_served("a") == 10 + 2 * 2


def test_a_cached_prompt_token_is_free():
    """33 tokens in blocks of 16: the second request computes the last one alone."""
    bench = fair(prefix_caching=True)
    prompt = list(range(33))
    add(bench, "a", prompt)
    add(bench, "b", prompt, max_tokens=2)
    bench.step()
    bench.step()
    assert policy_of(bench).tokens_served("b") == 33 - 32 + 2


def test_what_is_computed_again_after_a_preemption_is_free():
    """6 blocks: `b`, which was served more, loses its row and computes everything again; the pool's shortage is not its
    doing."""
    bench = fair(usable=6, max_num_seqs=2)
    add(bench, "a", 16, max_tokens=60)
    add(bench, "b", 32, max_tokens=20)
    while not bench.ends:
        bench.step()
    assert bench.scheduler.num_preemptions == 1
    resumed = policy_of(bench).tokens_served("b")
    outputs = len(bench.outputs[1])
    assert bench.step() == {1: 32 + outputs}
    assert policy_of(bench).tokens_served("b") == resumed + 2
    bench.run()
    bench.check_all_ended()


def test_what_an_aborted_prompt_left_uncomputed_is_given_back():
    bench = fair(max_num_batched_tokens=16)
    long, _ = add(bench, "a", 100, 2)
    bench.step()
    assert policy_of(bench).tokens_served("a") == 100
    bench.abort(long)
    assert policy_of(bench).tokens_served("a") == 16


# ---------------------------------------------------------------- who was idle


def test_a_user_who_was_idle_is_no_better_off_than_the_others():
    """`b` comes when `a` was served 10 * 12 tokens already, and does not get 120 tokens before `a` is next."""
    bench = fair()
    add(bench, "a", 10, 20)
    assert users_served(bench, 10) == "a" * 10
    add(bench, "b", 10, 20)
    assert users_served(bench, 10) == "ab" * 5


def test_a_user_of_whom_little_runs_has_saved_up_nothing():
    """`b` has one long request running while `a` waits and is served; when `b` sends more, they share.

    Both begin at 120. Each request costs 12, and that of `b` which runs 2 a step: a 132, b 136, a 144, b 152, a 156,
    b 168, a 168, and `a` again before the 170 of `b`.
    """
    bench = fair(max_num_seqs=2)
    add(bench, "b", 1, max_tokens=200)
    add(bench, "a", 10, 20)
    for _ in range(10):
        bench.step()
    assert policy_of(bench).tokens_served("b") < policy_of(bench).tokens_served("a") == 120
    add(bench, "b", 10, 20)
    served = ""
    for _ in range(8):
        (number,) = bench.step().keys() - {0}
        served += bench.submits[number].user
    assert served == "abababaa"


def test_what_was_used_while_nobody_waited_is_not_held_against_anyone():
    """`a` alone was served 30 * 10 tokens by one request after the other, and 8 + 2 * 30 by one that runs still. Then
    `b` sends twenty and `a` one: it waits for the 68 that `a` has got in what runs, seven of `b`, and not for 368."""
    bench = fair(max_num_seqs=2)
    add(bench, "a", 8, max_tokens=100)
    for _ in range(30):
        add(bench, "a", 8)
        bench.step()
    add(bench, "b", 8, 20)
    (late,) = add(bench, "a", 8)
    served = ""
    while late not in (ran := bench.step()):
        served += bench.submits[max(ran)].user
    assert served == "b" * 9  # two more for what the running one gets meanwhile


def test_a_full_queue_still_takes_a_user_of_whom_nothing_waits():
    """Else a heavy user keeps everyone out at the door, where no policy helps."""
    bench = fair(max_waiting=3)
    add(bench, "heavy", 5, 3)
    with pytest.raises(QueueFull, match="3 requests wait already, the queue holds 3"):
        add(bench, "heavy", 5)
    for user in ("x", "y", "z"):
        add(bench, user, 5)
        with pytest.raises(QueueFull):
            add(bench, user, 5)
    with pytest.raises(QueueFull, match="6 requests wait already"):
        add(bench, "w", 5)
    bench.run()
    bench.check_all_ended()


# ---------------------------------------------------------------- who gives way


def test_the_newest_request_of_the_most_served_user_gives_way():
    """Not the newest of all: that one is the light user's. 16 blocks; `heavy` runs two of 112 tokens in 7 blocks each,
    `light` one of 32 in two; then everyone needs one more."""
    bench = fair(usable=16, max_num_seqs=3, max_num_batched_tokens=500)
    first, second = add(bench, "heavy", 112, 2, max_tokens=20)
    (light,) = add(bench, "light", 32, max_tokens=20)
    bench.step()
    assert bench.free == 0
    assert bench.step() == {first: 1, light: 1}
    assert bench.waiting == [second]
    bench.run()
    bench.check_all_ended()


def test_the_prompt_of_the_least_served_user_takes_from_the_budget_first():
    bench = fair(max_num_seqs=3, max_num_batched_tokens=32, long_prefill_token_threshold=20)
    add(bench, "heavy", 100)
    bench.step()
    add(bench, "light", 60)
    assert bench.step() == {0: 20, 1: 12}
    assert bench.step() == {1: 20, 0: 12}


# ---------------------------------------------------------------- nobody is remembered


def test_no_ghost_is_left_of_users_whose_requests_are_over():
    """Ended, aborted while waiting, aborted in the prompt, aborted while decoding: nobody is remembered after it."""
    bench = fair(max_num_seqs=2, max_num_batched_tokens=16)
    add(bench, "ended", 4)
    (decoding,) = add(bench, "decoding", 4, max_tokens=50)
    bench.step()
    (prompt,) = add(bench, "prompt", 100)
    bench.step()
    (waiting,) = add(bench, "waiting", 4)
    assert policy_of(bench).num_users == 3
    for number in (decoding, prompt, waiting):
        bench.abort(number)
    assert policy_of(bench).num_users == 0
    assert len(bench.scheduler.waiting) == 0
    bench.run()
    bench.check_empty()
    # Their places are used again.
    add(bench, "next", 4)
    assert users_served(bench, 1) == "next"


def test_users_who_come_one_after_the_other_take_one_place():
    bench = fair(worker=PositionWorker, model=position_model)
    for user in range(100):
        add(bench, f"user-{user}", 2)
        bench.step()
    assert policy_of(bench).num_users == 0
    assert len(policy_of(bench)._served) == 16


# ---------------------------------------------------------------- against a plain model


class PlainFairShare:
    """The same order by plain loops over requests: what a person can audit."""

    def __init__(self) -> None:
        self.served: dict[str, int] = {}
        self.unfinished: dict[str, int] = {}
        self.waiting: list[Request] = []

    def enter(self, request: Request, running: list[tuple[Request, int]]) -> None:
        """running: the requests that hold a row, with the outputs that each has."""
        if not self.waiting:
            self.served = dict.fromkeys(self.served, 0)
            for other, num_outputs in running:
                self.served[other.user] += other.num_prompt_tokens + 2 * num_outputs
        self.served.setdefault(request.user, 0)
        self.unfinished[request.user] = self.unfinished.get(request.user, 0) + 1
        if self.waiting and not any(r.user == request.user for r in self.waiting):
            least = min(self.served[r.user] for r in self.waiting)
            self.served[request.user] = max(self.served[request.user], least)

    def leave(self, request: Request) -> None:
        self.unfinished[request.user] -= 1
        if not self.unfinished[request.user]:
            del self.served[request.user], self.unfinished[request.user]

    def head(self) -> Request | None:
        return min(self.waiting, key=lambda r: (self.served[r.user], r.arrival), default=None)


def requests(whim: random.Random) -> Iterator[Request]:
    arrival = 0
    while True:
        length = whim.randint(1, 9)
        yield Request(
            front="front",
            number=arrival,
            key=(b"", arrival),
            request_id=str(arrival),
            seed=0,
            params=SamplingParams(),
            num_prompt_tokens=length,
            end_len=100,
            tokens=np.zeros(length, np.int32),
            user=f"user-{whim.randrange(6)}",
            arrival=arrival,
        )
        arrival += 1


class OneOutputEach:
    """As much of a step's plan as the policy looks at: all rows given sample."""

    def __init__(self, rows: list[int]) -> None:
        self.index_mapping = np.array(rows, np.int32)
        self.samples = np.ones(len(rows), bool)


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_are_ordered_as_by_plain_loops(seed):
    """Two implementations, the same head after every move."""
    whim = random.Random(seed)
    stream, table = requests(whim), RequestTable(4, 100)
    ours, plain = FairShare(), PlainFairShare()
    running: dict[int, Request] = {}
    heads = 0
    for _ in range(2000):
        move = whim.random()
        free = [row for row in range(4) if row not in running]
        if move < 0.35 and len(ours) < 12:
            request = next(stream)
            outputs = [
                (r, int(table.num_tokens[row]) - r.num_prompt_tokens) for row, r in running.items()
            ]
            plain.enter(request, outputs)
            ours.enter(table, request)
            ours.add(request)
            plain.waiting.append(request)
        elif move < 0.6 and free and len(ours):
            request = ours.head()
            assert request is not None
            ours.remove(request)
            plain.waiting.remove(request)
            ours.admitted(request, 0)
            plain.served[request.user] += request.num_prompt_tokens
            request.row = free[0]
            table.occupy(free[0], request)
            table.num_computed_tokens[free[0]] = request.num_prompt_tokens
            running[free[0]] = request
        elif move < 0.85 and running:
            rows = whim.sample(sorted(running), whim.randint(1, len(running)))
            ours.served(table, OneOutputEach(rows))  # type: ignore[arg-type]
            table.num_tokens[rows] += 1
            for row in rows:
                plain.served[running[row].user] += 2
        elif running and whim.random() < 0.7:
            row = whim.choice(sorted(running))
            request = running.pop(row)
            ours.leave(table, request)
            plain.leave(request)
            table.vacate([row])
        elif len(ours):
            request = whim.choice(list(ours))
            ours.remove(request)
            plain.waiting.remove(request)
            ours.leave(table, request)
            plain.leave(request)
        assert ours.head() is plain.head()
        heads += ours.head() is not None
        assert {user: ours.tokens_served(user) for user in plain.served} == plain.served
        assert ours.num_users == len(plain.served)
    assert heads > 500
