"""This step's batch: queues, rows, blocks and a token budget in; the change to broadcast out.

Owns every decision and the unsettled steps. Sends nothing (`loop.py`), checks no request (`door.py`), orders nobody
(`policy.py`).

The rules of a step, each a named method:
- running requests come before waiting ones, and of the running those with one uncomputed token before prompts, so a
  long prompt never starves a decode; what is left of the token budget goes to prompts in the policy's order, then to
  newcomers;
- a token budget below the number of running rows serves them in turn, one token each;
- a waiting request is admitted only if the blocks of its whole prompt and earlier outputs are free now, and never in a
  step that preempted someone; nobody overtakes the head of the queue;
- when blocks run out the policy's victim is preempted: its row and blocks go back, and it waits with the tokens it has,
  to be computed again. It is not resumed before the steps that ran it have settled; their tokens are kept;
- a row whose token in flight is its last by length is freed in the next step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .agreement import StepPlan, derive_growth, plan_step
from .block_pool import BlockPool
from .budget import Share, share_budget
from .config import SchedulerConfig
from .deliveries import Deliveries
from .door import Door, QueueFull
from .front_messages import FinishCode, Submit
from .kv_groups import KVGroupSpec, blocks_needed
from .messages import Admissions, ProtocolError, SchedulerOutput
from .newcomers import admissions_of
from .policy import FirstComeFirstServed, Policy
from .registry import Registry
from .request import Request, RequestStatus, RequestTable
from .row_blocks import RowBlocks
from .stops import StopRules


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """An issued step that has not settled. generations [num_reqs] int64 name who held each row of the plan then."""

    plan: StepPlan
    generations: np.ndarray


class Scheduler:
    """Decides step by step who runs and where their KV lives. num_blocks counts the null block 0.

    Call `schedule`, send what it returns, and hand each step's tokens to `settle`, in step order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        policy: Policy | None = None,
    ) -> None:
        self.config = config
        self.groups = groups
        self.pool = BlockPool(num_blocks)
        self.table = RequestTable(config.max_num_seqs, config.max_model_len)
        self.blocks = RowBlocks(
            groups, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len
        )
        self.waiting = FirstComeFirstServed() if policy is None else policy
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_tokens_computed = 0
        self.num_tokens_out = 0
        self._door = Door(config, groups, self.pool.usable)
        self._stops = StopRules(config.vocab_size, config.eos_token_ids)
        self._free_rows = list(range(config.max_num_seqs))  # a heap: the lowest row first
        self._freed_rows: list[int] = []  # that the workers were not told of yet
        self._records: deque[StepRecord] = deque()
        self._registry = Registry()
        self._detached: dict[int, Request] = {}  # by generation: off its row with steps in flight
        self._ends: list[tuple[int, int, FinishCode]] = []  # ends that no step brings
        self._arrivals = 0
        self._generations = 0
        self._turn = 0  # the row that is next when the budget serves rows in turn

    # ------------------------------------------------------------ requests come and go

    @property
    def num_running(self) -> int:
        """Count the requests that hold a row."""
        return self.table.num_live

    @property
    def num_in_flight(self) -> int:
        """Count the steps that were issued and have not settled."""
        return len(self._records)

    @property
    def num_unfinished(self) -> int:
        return len(self._registry)

    @property
    def num_remembered(self) -> int:
        """Count everything that is kept of requests, ended and unacknowledged ones too; 0 when all is over."""
        return (
            self._registry.num_entries
            + len(self._detached)
            + len(self._ends)
            + self._stops.num_watched
        )

    def is_live(self, front: Hashable, number: int) -> bool:
        """Tell whether this is an unfinished request."""
        return self._registry.find(front, number) is not None

    def live(self) -> list[tuple[Hashable, int]]:
        """List every unfinished request as (front, number), in order of submission."""
        return [(request.front, request.number) for request in self._registry]

    def add(self, front: Hashable, submit: Submit) -> None:
        """Queue a request. The same submit key again, by the same front and number, is the same request: ignored.

        A key that comes back under another number is a client that resubmits through another front: the request goes
        on there, from the tokens that the client holds, and the old entry ends without a word.
        Raises: QueueFull if too many wait; ValueError naming the limit or the clash for anything that cannot be served.
        """
        owner = (self._registry.front_index(front), submit.number)
        before = self._registry.owner((submit.submit_key, submit.n_index))
        if before == owner:
            return
        request = self._door.check(front, submit)
        request.front_index = owner[0]
        self._registry.check_new(request)
        if before is None and len(self.waiting) >= self.config.max_waiting:
            raise QueueFull(
                f"request {submit.request_id}: {len(self.waiting)} requests wait already, the queue holds "
                f"{self.config.max_waiting}; try again later"
            )
        if before is not None:
            self._give_up(before)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._registry.enter(request)
        self._stops.add(request.params)
        self.waiting.add(request)
        if len(request.tokens) > request.num_prompt_tokens:
            code = self._stops.finish_code(request, int(request.tokens[-1]), len(request.tokens))
            if code is not FinishCode.RUNNING:  # resubmitted with everything it was to get
                self._end_without_token(request, code)

    def abort(self, front: Hashable, number: int) -> bool:
        """End a request in whatever state it is. False if it is unknown or has ended: then nothing happens."""
        request = self._registry.find(front, number)
        if request is None:
            return False
        self._end_without_token(request, FinishCode.ABORT)
        return True

    def abort_front(self, front: Hashable) -> None:
        """End and forget everything of a front that is gone. Delivers nothing."""
        for request in self._registry.of_front(front):
            self._end(request)
        index = self._registry.front_index(front)
        self._ends = [end for end in self._ends if end[0] != index]
        self._registry.forget_front(front)

    def forget(self, front: Hashable, numbers: Iterable[int]) -> None:
        """Drop the keys of ended requests that the front has acknowledged. Live and unknown numbers are ignored."""
        for number in numbers:
            self._registry.forget(front, int(number))

    def _give_up(self, owner: tuple[int, int]) -> None:
        """End and forget a request that its client has taken elsewhere."""
        front, number = self._registry.fronts[owner[0]], owner[1]
        request = self._registry.find(front, number)
        if request is not None:
            self._end(request)
        self._ends = [end for end in self._ends if end[:2] != owner]
        self._registry.forget(front, number)

    def _end_without_token(self, request: Request, code: FinishCode) -> None:
        self._end(request)
        self._ends.append((request.front_index, request.number, code))

    def _end(self, request: Request) -> None:
        """Take everything back from a request, whatever its state; tokens still in flight will be dropped."""
        if request.status is RequestStatus.RUNNING:
            self._release_row(request.row)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self._detached.pop(request.generation, None)
        request.status = RequestStatus.FINISHED
        self._stops.remove(request.params)
        self._registry.leave(request)

    def _release_row(self, row: int) -> None:
        self.table.occupant(row).row = -1
        self.pool.free(self.blocks.release(row))
        self.table.vacate(row)
        heapq.heappush(self._free_rows, row)
        self._freed_rows.append(row)

    def _detach(self, row: int, status: RequestStatus) -> Request:
        """Give a row back before the steps that ran it have settled; their tokens still belong to its request."""
        request = self.table.occupant(row)
        generation = request.generation
        request.num_in_flight = sum(
            bool((r.generations == generation).any()) for r in self._records
        )
        if request.num_in_flight:
            self._detached[generation] = request
        self._release_row(row)
        request.status = status
        return request

    # ------------------------------------------------------------ one step

    def schedule(self, token_budget: int | None = None) -> SchedulerOutput | None:
        """Decide the next step and apply it to the scheduler's own tables; None when there is nothing to say.

        token_budget: tokens this step may run at most; max_num_batched_tokens unless given.
        Returns: a step that may run no token and only free rows; the workers must still hear of it.
        """
        assert len(self._records) < self.config.depth, (
            f"{len(self._records)} steps are in flight, depth is {self.config.depth}"
        )
        budget = self.config.max_num_batched_tokens if token_budget is None else token_budget
        if self._records:
            self._free_rows_that_end()
        num_preemptions = self.num_preemptions
        while True:
            share = share_budget(self.table, self.waiting, budget, self._turn)
            plan = plan_step(self.table, share.run_rows, share.run_counts, share.paused_rows)
            growth = self._growth(plan)
            num_new_blocks = sum(int(counts.sum()) for _, counts in growth)
            if self.pool.can_allocate(num_new_blocks):
                break
            self._preempt(self.waiting.victim(self.table))
        admissions = None
        if share.left and self.num_preemptions == num_preemptions:
            admissions, share = self._admit(share, self.pool.num_free - num_new_blocks)
            if admissions is not None:
                plan = plan_step(self.table, share.run_rows, share.run_counts, share.paused_rows)
                growth = self._growth(plan)
        if not plan.num_reqs and not self._freed_rows:
            return None
        if share.next_turn is not None:
            self._turn = share.next_turn
        step = SchedulerOutput(
            freed_rows=np.array(sorted(self._freed_rows), np.int32),
            admissions=admissions,
            run_rows=share.run_rows,
            run_counts=share.run_counts,
            paused_rows=share.paused_rows,
            grown_block_ids=self._grow(growth),
        )
        self._freed_rows.clear()
        self._issue(plan)
        return step

    def _free_rows_that_end(self) -> None:
        """Give back rows whose token in flight is their last by length; that token is delivered when it comes."""
        for row in np.flatnonzero(self.table.num_tokens >= self.table.end_len).tolist():
            self._detach(row, RequestStatus.ENDING)

    def _growth(self, plan: StepPlan) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            derive_growth(plan, held, spec.block_size)
            for held, spec in zip(self.blocks.num_blocks, self.groups, strict=True)
        ]

    def _grow(self, growth: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
        """Take the new blocks from the pool, group by group, in row order, as the workers will read them."""
        grown = []
        for group, (rows, counts) in enumerate(growth):
            ids = self.pool.allocate(int(counts.sum()))
            self.blocks.grow(group, rows, counts, ids)
            grown.append(ids)
        return tuple(grown)

    def _preempt(self, row: int) -> None:
        """Take row and blocks from a running request and queue it again with the tokens it has."""
        request = self._detach(row, RequestStatus.WAITING)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def _admit(self, share: Share, num_free: int) -> tuple[Admissions | None, Share]:
        """Admit from the head of the queue while rows, budget and blocks for the whole prompt last."""
        left, admitted, long_rows, long_counts = share.left, [], [], []
        while left and self._free_rows:
            request = self.waiting.head()
            if request is None or request.num_in_flight:
                break
            length = len(request.tokens)
            needed = sum(blocks_needed(length, spec.block_size) for spec in self.groups)
            if needed > num_free:
                break
            self.waiting.remove(request)
            self._generations += 1
            request.generation = self._generations
            request.row = heapq.heappop(self._free_rows)
            request.status = RequestStatus.RUNNING
            self.table.occupy(request.row, request)
            count = min(left, length)
            if length > 1:
                long_rows.append(request.row)
                long_counts.append(count)
            left -= count
            num_free -= needed
            admitted.append(request)
        if not admitted:
            return None, share
        return admissions_of(admitted, len(self.groups)), Share(
            run_rows=np.concatenate((share.run_rows, np.array(long_rows, np.int32))),
            run_counts=np.concatenate((share.run_counts, np.array(long_counts, np.int32))),
            paused_rows=share.paused_rows,
            left=left,
        )

    def _issue(self, plan: StepPlan) -> None:
        """Count the step as done by the tables, and remember it until its tokens are back."""
        table, rows = self.table, plan.index_mapping
        table.num_computed_tokens[rows] += plan.num_scheduled_tokens
        table.num_tokens[rows] += plan.samples
        self._records.append(StepRecord(plan=plan, generations=table.generation[rows]))
        self.num_steps += 1
        self.num_tokens_computed += int(plan.num_scheduled_tokens.sum())

    # ------------------------------------------------------------ its tokens

    def settle(self, tokens: np.ndarray) -> Deliveries:
        """Take the tokens of the oldest unsettled step: append, find who ended, give rows and blocks back.

        Shapes: tokens [num_reqs] int32 in that step's batch order, -1 where the row did not sample.
        Rows are known by the record, never by the present table: a row that changed hands since keeps its own tokens.
        Returns: the tokens to deliver, after the ends that no step brings (`drain`).
        Raises: ProtocolError if the tokens are not what that step can have sampled; nothing has changed then.
        """
        assert self._records, "no step is in flight"
        record = self._records[0]
        plan, generations = record.plan, record.generations
        self._check_tokens(tokens, plan)
        self._records.popleft()
        rows = plan.index_mapping
        held = self.table.generation[rows] == generations
        keep = held & plan.samples
        if not keep.all():
            rows, kept_tokens = rows[keep], tokens[keep]
        else:
            kept_tokens = tokens
        entries = self._append(rows, kept_tokens)
        late = [] if held.all() else self._settle_late(tokens, record, np.flatnonzero(~held))
        return self._deliveries(entries, late)

    def drain(self) -> Deliveries:
        """Take the ends that no step brings: aborts, and requests that came complete."""
        empty = np.empty(0, np.int32)
        return self._deliveries((empty, empty.astype(np.int64), empty, empty.astype(np.int8)), [])

    def _check_tokens(self, tokens: np.ndarray, plan: StepPlan) -> None:
        if len(tokens) != plan.num_reqs:
            raise ProtocolError(
                f"the result carries {len(tokens)} tokens, its step ran {plan.num_reqs} requests"
            )
        sampled = tokens[plan.samples]
        if len(sampled) and not (
            int(sampled.min()) >= 0 and int(sampled.max()) < self.config.vocab_size
        ):
            outside = sampled[(sampled < 0) | (sampled >= self.config.vocab_size)][0]
            raise ProtocolError(
                f"the result carries token {outside}, expected one in [0, {self.config.vocab_size})"
            )
        if len(sampled) < plan.num_reqs and (tokens[~plan.samples] != -1).any():
            raise ProtocolError("the result carries a token for a row that did not sample")

    def _append(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """Append one token to each row and end those that it ends; returns the four delivery columns."""
        table = self.table
        places = table.num_settled_tokens[rows]
        table.token_ids[rows, places] = tokens
        lengths = places + 1
        table.num_settled_tokens[rows] = lengths
        codes = np.zeros(len(rows), np.int8)
        front_index, numbers = table.front_index[rows], table.number[rows]
        suspects = self._stops.suspect[tokens] | (lengths >= table.end_len[rows])
        for entry in np.flatnonzero(suspects).tolist():
            request = table.occupant(rows[entry])
            codes[entry] = self._stops.finish_code(request, int(tokens[entry]), int(lengths[entry]))
            if codes[entry]:
                self._end(request)
        return front_index, numbers, tokens, codes

    def _settle_late(
        self, tokens: np.ndarray, record: StepRecord, batch_indices: np.ndarray
    ) -> list[tuple[int, int, int, FinishCode]]:
        """Append tokens whose request has left its row since; those whose request has ended are dropped."""
        entries = []
        for batch_index in batch_indices.tolist():
            request = self._detached.get(int(record.generations[batch_index]))
            if request is None:
                continue
            request.num_in_flight -= 1
            if not request.num_in_flight:
                del self._detached[request.generation]
            if not record.plan.samples[batch_index]:
                continue
            token = int(tokens[batch_index])
            request.tokens = np.append(request.tokens, np.int32(token))
            code = self._stops.finish_code(request, token, len(request.tokens))
            if code is not FinishCode.RUNNING:
                self._end(request)
            entries.append((request.front_index, request.number, token, code))
        return entries

    def _deliveries(
        self,
        entries: tuple[np.ndarray, ...],
        late: Sequence[tuple[int, int, int, FinishCode]],
    ) -> Deliveries:
        extra = [(front, number, -1, code) for front, number, code in self._ends]
        self._ends = []
        self.num_tokens_out += len(entries[0]) + len(late)
        extra.extend(late)
        if extra:
            columns = zip(*extra, strict=True)
            entries = tuple(
                np.concatenate((np.array(values, column.dtype), column))
                for values, column in zip(columns, entries, strict=True)
            )
        front_index, numbers, tokens, finish_codes = entries
        return Deliveries(
            fronts=tuple(self._registry.fronts),
            front_index=front_index,
            numbers=numbers,
            tokens=tokens,
            finish_codes=finish_codes,
        )
