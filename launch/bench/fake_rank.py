"""One rank without a model: the real tables, a cache that remembers prefixes, and tokens from a plain function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...scheduler.agreement import StepPlan, asked_of_step
from ...scheduler.messages import Extras, Mask, SchedulerOutput
from ...scheduler.scheduler import Scheduler
from ...worker.request_states import RequestStates
from ...worker.state import WorkerState
from ...worker.step_checks import check_mask
from .fake_logprobs import fake_extras
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
        plan = self.launch(step)
        return plan, self.sample(plan)

    def launch(self, step: SchedulerOutput) -> StepPlan:
        """Apply a step and compute it, up to its sampling."""
        plan = self.state.apply(step)
        if step.admissions is not None:
            self.memory.admit(step.admissions.rows)
        self.memory.run(plan)
        return plan

    def sample(
        self, plan: StepPlan, step: SchedulerOutput | None = None, mask: Mask | None = None
    ) -> np.ndarray:
        """Name a computed step's tokens; of a masked row the next id that its mask allows. The mask is checked."""
        tokens = np.where(plan.samples, self._sample(self.state.requests, plan), -1)
        tokens = tokens.astype(np.int32)
        if step is not None and mask is not None:
            check_mask(mask, step.masked_rows, self.state.vocab_size)
            masked = np.flatnonzero(np.isin(plan.index_mapping, mask.rows))
            tokens[masked] = list(map(next_allowed, tokens[masked].tolist(), mask.bits))
        self.memory.append(plan, tokens)
        self.state.commit(plan, tokens)
        return tokens

    def extras(self, plan: StepPlan, tokens: np.ndarray) -> Extras | None:
        """The log-probabilities that the latest step was asked for. Call it before another one is applied."""
        requests = self.state.requests
        asked = None
        if requests.asking:
            asked = asked_of_step(
                requests.asking, requests.token_ids, requests.num_prompt_tokens, plan
            )
        return fake_extras(asked, tokens, plan.seq_lens, self.state.vocab_size)


def next_allowed(token: int, bits: np.ndarray) -> int:
    """The first id from `token` on, round the end, that a mask allows; bits [num_words] int32."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])
