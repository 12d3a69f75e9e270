"""A scheduler and one fake rank, joined by real frames, moved by hand, every rule checked after every move."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.deliveries import Deliveries
from ...scheduler.messages import SchedulerOutput, decode_frame, encode_step
from ...scheduler.scheduler import Scheduler
from .fake_rank import FakeRank
from .invariants import InFlight, check_pool, check_queues, check_tables, require

_EPOCH = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """One step as it went out, and the plan that the rank made of it."""

    step: SchedulerOutput
    frame: bytes
    plan: StepPlan

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_scheduled_tokens.sum())


class CheckedEngine:
    """Steps a scheduler and its rank; `check` runs by itself after every move.

    The rank runs a step when it is issued; the scheduler hears of its tokens when the step is settled.
    whole_every: every how many checks the token ids of all rows are compared whole, not only the latest.
    Raises (every method): Violation for a rule that does not hold.
    """

    def __init__(self, scheduler: Scheduler, rank: FakeRank, *, whole_every: int = 1) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.num_steps = 0
        self._whole_every = whole_every
        self._num_checks = 0
        self._results: deque[np.ndarray] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._num_idle = 0  # calls of `issue` in a row that found nothing although nothing ran and someone waited

    def issue(self, token_budget: int | None = None) -> Issued | None:
        """Schedule a step and let the rank run it; None when there was none."""
        scheduler = self.scheduler
        idle = not scheduler.num_running and not scheduler.num_in_flight and len(scheduler.waiting)
        step = scheduler.schedule(token_budget)
        if step is None:
            self._num_idle = self._num_idle + 1 if idle else 0
            require(
                self._num_idle <= 1 or token_budget == 0,
                "nothing runs, nothing is in flight, and nothing of what waits is scheduled",
                *(request.request_id for request in scheduler.waiting),
            )
            self.check()
            return None
        self._num_idle = 0
        self.num_steps += 1
        frame = encode_step(step, epoch=_EPOCH, sequence=self.num_steps)
        decoded = decode_frame(frame).body
        assert isinstance(decoded, SchedulerOutput)
        plan, tokens = self.rank.execute(decoded)
        ours, theirs = scheduler.digests.end(frame), self.rank.state.digests.end(frame)
        require(
            ours == theirs, "the digests of a step differ, here and at the worker", ours, theirs
        )
        self._results.append(tokens)
        self._in_flight.append((plan, scheduler.table.generation[plan.index_mapping]))
        issued = Issued(step=step, frame=frame, plan=plan)
        budget = scheduler.config.max_num_batched_tokens if token_budget is None else token_budget
        require(
            issued.num_tokens <= budget, "tokens run, and the budget", issued.num_tokens, budget
        )
        require(
            bool(scheduler.table.live[plan.index_mapping].all()), "a row that nobody holds runs"
        )
        self.check()
        return issued

    def settle(self) -> Deliveries:
        """Hand the oldest step's tokens to the scheduler."""
        self._in_flight.popleft()
        deliveries = self.scheduler.settle(self._results.popleft())
        self.check()
        return deliveries

    def check(self) -> None:
        """Check everything now."""
        whole = self._num_checks % self._whole_every == 0
        self._num_checks += 1
        check_queues(self.scheduler)
        check_pool(self.scheduler, self._in_flight)
        check_tables(self.scheduler, self.rank.state, whole=whole)
