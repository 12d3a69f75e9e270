"""One rank without a model: the real tables, a cache that remembers prefixes, and tokens from a plain function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.messages import SchedulerOutput
from ...scheduler.scheduler import Scheduler
from ...worker.request_states import RequestStates
from ...worker.state import WorkerState
from .prefix_memory import PrefixMemory

# (tables before the step's tokens are appended, plan) -> [num_reqs] int32, read where plan.samples is true.
Sample = Callable[[RequestStates, StepPlan], np.ndarray]


class FakeRank:
    """Executes a scheduler's steps. probes as in `PrefixMemory`.

    Raises (execute): ProtocolError for a step that does not fit the tables; Violation for a read of the wrong block.
    """

    def __init__(self, scheduler: Scheduler, sample: Sample, *, probes: int | None = None) -> None:
        config = scheduler.config
        self.state = WorkerState(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            groups=scheduler.groups,
            num_blocks=scheduler.pool.usable + 1,
            vocab_size=config.vocab_size,
            depth=config.depth,
        )
        self.memory = PrefixMemory(self.state, probes=probes)
        self._sample = sample

    def execute(self, step: SchedulerOutput) -> tuple[StepPlan, np.ndarray]:
        """Apply a step, compute it, and name its plan and tokens, -1 where a row did not sample."""
        plan = self.state.apply(step)
        if step.admissions is not None:
            self.memory.admit(step.admissions.rows)
        self.memory.run(plan)
        tokens = np.where(plan.samples, self._sample(self.state.requests, plan), -1)
        tokens = tokens.astype(np.int32)
        self.memory.append(plan, tokens)
        self.state.commit(plan, tokens)
        return plan, tokens
