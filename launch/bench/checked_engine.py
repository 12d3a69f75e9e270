"""A scheduler and one fake rank, joined by real frames, moved by hand, every rule checked after every move."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.deliveries import Deliveries
from ...scheduler.messages import (
    Extras,
    Mask,
    SchedulerOutput,
    decode_frame,
    encode_mask,
    encode_step,
)
from ...scheduler.scheduler import Scheduler
from .fake_rank import FakeRank
from .invariants import InFlight, check_pool, check_queues, check_tables, require

_EPOCH = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """One step as it went out, the plan that the rank made of it, and the requests' numbers in batch order."""

    step: SchedulerOutput
    frame: bytes
    plan: StepPlan
    numbers: np.ndarray

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
        self._num_frames = 0
        self._whole_every = whole_every
        self._num_checks = 0
        self._results: deque[tuple[np.ndarray, Extras | None]] = deque()
        self._unmasked: Issued | None = None  # the latest step while it waits for its mask
        self._in_flight: deque[InFlight] = deque()
        self._num_idle = 0  # calls of `issue` in a row that found nothing although nothing ran and someone waited

    def issue(self, token_budget: int | None = None) -> Issued | None:
        """Schedule a step and let the rank run it; None when there was none, or the one before waits for its mask."""
        scheduler = self.scheduler
        if self._unmasked is not None:
            return None
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
        self._num_frames += 1
        frame = encode_step(step, epoch=_EPOCH, sequence=self._num_frames)
        decoded = decode_frame(frame).body
        assert isinstance(decoded, SchedulerOutput)
        plan = self.rank.launch(decoded)
        self._compare_digests(frame)
        table, rows = scheduler.table, plan.index_mapping
        self._in_flight.append((plan, table.generation[rows]))
        issued = Issued(step=step, frame=frame, plan=plan, numbers=table.number[rows])
        budget = scheduler.config.max_num_batched_tokens if token_budget is None else token_budget
        require(
            issued.num_tokens <= budget, "tokens run, and the budget", issued.num_tokens, budget
        )
        require(bool(table.live[rows].all()), "a row that nobody holds runs")
        if len(decoded.masked_rows):  # last: who fails at it ends here
            self._unmasked = issued
            self._try_mask()
        else:
            self._keep(plan, self.rank.sample(plan))
        self.check()
        return issued

    def settle(self) -> Deliveries:
        """Hand the oldest step's tokens to the scheduler."""
        self._in_flight.popleft()
        deliveries = self.scheduler.settle(*self._results.popleft())
        if self._unmasked is not None:
            self._try_mask()
        self.check()
        return deliveries

    def _try_mask(self) -> None:
        """Let the rank sample the step that waits for its mask, if that can be made."""
        waiting, made = self._unmasked, self.scheduler.make_mask()
        assert waiting is not None, "no step waits for its mask"
        require(
            made is not None or self.scheduler.num_in_flight > 1,
            "a mask waits for no step and does not come",
        )
        if made is None:
            return
        rows, bits = made
        self._num_frames += 1
        frame = encode_mask(
            Mask(step_sequence=self._num_frames - 1, rows=rows, bits=bits),
            epoch=_EPOCH,
            sequence=self._num_frames,
        )
        mask = decode_frame(frame).body
        assert isinstance(mask, Mask)
        self._unmasked = None
        self._keep(waiting.plan, self.rank.sample(waiting.plan, waiting.step, mask))
        self._compare_digests(frame)

    def _keep(self, plan: StepPlan, tokens: np.ndarray) -> None:
        """Note what a step brings, while the rank's tables are still those of that step."""
        self._results.append((tokens, self.rank.extras(plan, tokens)))

    def _compare_digests(self, frame: bytes) -> None:
        ours, theirs = self.scheduler.digests.end(frame), self.rank.state.digests.end(frame)
        require(
            ours == theirs, "the digests of a step differ, here and at the worker", ours, theirs
        )

    def check(self) -> None:
        """Check everything now."""
        whole = self._num_checks % self._whole_every == 0
        self._num_checks += 1
        check_queues(self.scheduler)
        check_pool(self.scheduler, self._in_flight)
        if self._unmasked is None:  # else the rank has not counted its latest step
            check_tables(self.scheduler, self.rank.state, whole=whole)
