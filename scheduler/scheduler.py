"""This step's batch: queues, rows, blocks and a token budget in; the change to broadcast out.

Owns every decision and the requests' coming and going. Sends nothing (`loop.py`), checks no request (`door.py`), orders
nobody (`policy.py`), hands out no block (`kv_memory.py`).

The rules of a step, each a named method:
- running requests come before waiting ones, and of the running those with one uncomputed token before prompts, so a
  long prompt never starves a decode; what is left of the token budget goes to prompts in the policy's order, at most
  long_prefill_token_threshold each, then to newcomers;
- a token budget below the number of running rows serves them in turn, one token each;
- a waiting request is admitted only if the blocks of its whole prompt and earlier outputs are free now, beyond what is
  promised to others, and never in a step that preempted someone; nobody overtakes the head of the queue;
- when blocks run out, those of requests that only wait for their last token go first, then the policy's victim is
  preempted: its row and blocks go back, and it waits with the tokens it has, to be computed again. It is not resumed
  before the steps that ran it have settled; their tokens are kept;
- a row whose token in flight is its last by length is freed in the next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from .agreement import StepPlan, TableDigest, plan_step, scheduled_tokens
from .askers import Askers, with_extras
from .budget import Share, share_budget
from .config import SchedulerConfig
from .deliveries import (
    NO_COLUMNS,
    NO_INT32,
    CachedColumns,
    Columns,
    Deliveries,
    Entry,
    Outbox,
    deliveries_of,
)
from .door import Door, QueueFull
from .extras import Extras
from .front_messages import FinishCode, Submit
from .grammars import Grammars
from .kv_groups import KVGroupSpec
from .kv_memory import KVMemory
from .masks import MaskedStep, Masks
from .messages import Admissions, SchedulerOutput
from .newcomers import admissions_of
from .policy import Policy, make_policy
from .prefix_cache import PrefixCache
from .records import Records, RowFacts, StepRecord, check_tokens
from .registry import Registry
from .request import Request, RequestStatus, RequestTable
from .seats import Seats
from .stops import StopRules


class Scheduler:
    """Decides step by step who runs and where their KV lives. num_blocks counts the null block 0.

    Call `schedule`, send what it returns, and hand each step's tokens to `settle`, in step order. After a step with
    masked rows call `make_mask` until it gives the mask, before the next `schedule`.
    grammars: compiles the forms that answers must have; None: a request that asks for one is refused.
    failed: the requests that ended by themselves, as (front, number, why); whoever tells the fronts empties it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        policy: Policy | None = None,
        *,
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.groups = groups
        self.memory = KVMemory(config, groups, num_blocks)
        self.pool, self.blocks = self.memory.pool, self.memory.blocks
        self.table = RequestTable(config.max_num_seqs, config.max_model_len)
        self.digests = TableDigest(
            self.table.columns,
            self.table.token_ids,
            self.blocks.num_blocks,
            self.blocks.block_ids,
            groups,
            depth=config.depth,
        )
        self.waiting = make_policy(config.scheduling_policy) if policy is None else policy
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.num_tokens_out = 0
        self._door = Door(config, groups, self.pool.usable)
        self._stops = StopRules(config.vocab_size, config.eos_token_ids)
        self._records = Records()
        self._askers = Askers(self.table, config.vocab_size)
        self._seats = Seats(self.table, self.waiting, self.memory, self._records)
        self._masks = Masks(grammars)
        self._registry = Registry()
        self._outbox = Outbox()
        self.failed: list[tuple[Hashable, int, str]] = []
        self._arrivals = 0
        self._turn = 0  # the row that is next when the budget serves rows in turn

    # ------------------------------------------------------------ requests come and go

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache, with a name for everything that has settled."""
        self._seats.publisher.flush()
        return self.memory.cache

    @property
    def num_running(self) -> int:
        """Count the requests that hold a row."""
        return self.table.num_live

    @property
    def num_in_flight(self) -> int:
        """Count the steps that were issued and have not settled."""
        return len(self._records)

    @property
    def num_preemptions(self) -> int:
        """Count every time a running request gave way."""
        return self._seats.num_preemptions

    @property
    def num_unfinished(self) -> int:
        return len(self._registry)

    @property
    def num_remembered(self) -> int:
        """Count everything that is kept of requests, ended and unacknowledged ones too; 0 when all is over."""
        return (
            self._registry.num_entries
            + self._seats.num_detached
            + len(self._outbox)
            + len(self._askers)
            + self.waiting.num_remembered
            + self.memory.num_holders
            + self._stops.num_watched
            + self._masks.num_remembered
            + len(self.failed)
        )

    @property
    def num_compiling(self) -> int:
        """Count the requests that are not queued yet, since their form is being compiled."""
        return self._masks.num_compiling

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
        has_form = request.params.structured_outputs is not None
        if has_form and self._masks.grammars is None:
            raise ValueError(
                f"request {submit.request_id}: structured_outputs need the model's tokenizer, and this engine has none"
            )
        if before is None and not (
            self.waiting.has_room(request.user, self.config.max_waiting)
            and self.num_compiling < self.config.max_waiting
        ):
            raise QueueFull(
                f"request {submit.request_id}: {len(self.waiting)} requests wait already, the queue holds "
                f"{self.config.max_waiting}; try again later"
            )
        if before is not None:
            self._give_up(before)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._registry.enter(request)
        self._stops.add(request.params)
        self.memory.prepare(request)
        self._seats.enter(request)
        if has_form:
            self._masks.compile(request)
        else:
            self._seats.queue(request)
        if len(request.tokens) > request.num_prompt_tokens:
            code = self._stops.finish_code(request, int(request.tokens[-1]), len(request.tokens))
            if code is not FinishCode.RUNNING:  # resubmitted with everything it was to get
                self._end_without_token(request, code)

    def _queue_compiled(self) -> None:
        """Queue the requests whose form is compiled now; one whose form cannot be ends alone."""
        for request, outcome in self._masks.take_compiled():
            if isinstance(outcome, str):
                self._fail(request, outcome)
            elif outcome.finished:  # resubmitted with everything it was to get
                self._end_without_token(request, FinishCode.STOP)
            else:
                self._masks.join(request, outcome)
                self._seats.queue(request)

    def abort(self, front: Hashable, number: int) -> bool:
        """End a request in whatever state it is. False if it is unknown or has ended: then nothing happens."""
        request = self._registry.find(front, number)
        if request is None:
            return False
        self._end_without_token(request, FinishCode.ABORT)
        return True

    def abort_front(self, front: Hashable) -> None:
        """End and forget everything of a front that is gone, and the front itself. Delivers nothing."""
        self._end(self._registry.of_front(front))
        index = self._registry.forget_front(front)
        if index is not None:
            self._outbox.forget(index)

    def forget(self, front: Hashable, numbers: Iterable[int]) -> None:
        """Drop the keys of ended requests that the front has acknowledged. Live and unknown numbers are ignored."""
        for number in numbers:
            self._registry.forget(front, int(number))

    def _give_up(self, owner: tuple[int, int]) -> None:
        """End and forget a request that its client has taken elsewhere."""
        front, number = self._registry.fronts[owner[0]], owner[1]
        request = self._registry.find(front, number)
        if request is not None:
            self._end([request])
        self._outbox.forget(*owner)
        self._registry.forget(front, number)

    def _end_without_token(self, request: Request, code: FinishCode) -> None:
        self._end([request])
        self._outbox.end(request, code)

    def _end(self, requests: Sequence[Request]) -> None:
        self._seats.end(requests)
        for request in requests:
            self._stops.remove(request.params)
            if request.params.structured_outputs is not None:
                self._masks.leave(request)
            self._registry.leave(request)

    def _fail(self, request: Request, why: str) -> None:
        """End a request that cannot go on, whoever else runs. Its key is forgotten: its client may try again."""
        front = self._registry.fronts[request.front_index]
        self._end([request])
        self._registry.forget(front, request.number)
        self.failed.append((front, request.number, why))

    # ------------------------------------------------------------ one step

    def schedule(self, token_budget: int | None = None) -> SchedulerOutput | None:
        """Decide the next step and apply it to the scheduler's own tables; None when there is nothing to say.

        token_budget: tokens this step may run at most; max_num_batched_tokens unless given.
        Returns: a step that may run no token and only free rows; the workers must still hear of it.
        """
        assert len(self._records) < self.config.depth, (
            f"{len(self._records)} steps are in flight, depth is {self.config.depth}"
        )
        assert self._masks.due is None, "the step before waits for its mask"
        if self._masks.any_compiled:
            self._queue_compiled()
        budget = self.config.max_num_batched_tokens if token_budget is None else token_budget
        if self._records:
            self._seats.free_rows_that_end()
        num_preemptions = self._seats.num_preemptions
        share, num_new_blocks = self._make_room(budget)
        admissions = None
        if share.left and self._seats.num_preemptions == num_preemptions and len(self.waiting):
            admissions, share = self._admit(share, num_new_blocks)
        previous = self._records.previous_plan(self.table)
        plan = plan_step(self.table, share.run_rows, share.run_counts, share.paused_rows, previous)
        growth = self.blocks.growth(plan)
        if not plan.num_reqs and not self._seats.any_freed:
            return None
        if share.next_turn is not None:
            self._turn = share.next_turn
        grown_block_ids = self.memory.grow(growth)
        step = SchedulerOutput(
            freed_rows=self._seats.take_freed(),
            admissions=admissions,
            run_rows=share.run_rows,
            run_counts=share.run_counts,
            paused_rows=share.paused_rows,
            grown_block_ids=grown_block_ids,
            masked_rows=self._masks.issue(plan, self.num_steps) if self._masks.any else NO_INT32,
            digest=self.digests.begin(plan),
        )
        self._issue(plan)
        return step

    def make_mask(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Make the mask that the latest step waits for; None while tokens that it follows have not settled.

        Returns: rows [n] int32, that step's masked_rows; bits [n, words] int32, as `messages.Mask` has them.
        """
        made = self._masks.make()
        if made is None:
            return None
        rows, bits, failed = made
        for request, why in failed:
            self._fail(request, why)
        return rows, bits

    def _make_room(self, budget: int) -> tuple[Share, int]:
        """Share the budget among running rows, and take blocks from others until those that run have theirs.

        Returns: the share, and how many blocks its rows take of the pool (`_num_new_blocks`).
        """
        while True:
            previous = self._records.previous_plan(self.table)
            share = share_budget(
                self.table, self.waiting, budget, self._turn, self._cap(), previous
            )
            num_new_blocks = self._num_new_blocks(share)
            if self.pool.can_allocate(num_new_blocks):
                return share, num_new_blocks
            if not self.memory.reclaim():
                self._seats.preempt(np.array([self.waiting.victim(self.table)]))

    def _cap(self) -> int:
        """Say how many tokens of one prompt a step runs at most: a lone request keeps nobody waiting."""
        cap = self.config.long_prefill_token_threshold
        return cap if cap and len(self._registry) > 1 else self.config.max_model_len

    def _num_new_blocks(self, share: Share) -> int:
        """Count the blocks that running rows need in this step; at most, where the pool has them in any case."""
        table, most = self.table, self.blocks.most_growth(self.table.num_live, share.run_counts)
        newcomers = self._seats.num_free * self.blocks.row_capacity if len(self.waiting) else 0
        promises = len(share.prompts) and len(self.waiting)
        if most + newcomers <= self.pool.num_free and not promises:
            return most
        if not len(share.prompts) and not len(share.paused_rows):  # then everyone computes all
            return self.blocks.num_missing(table.num_tokens)
        scheduled = scheduled_tokens(table, share.run_rows, share.run_counts, share.paused_rows)
        return self.blocks.num_missing(table.num_computed_tokens + scheduled)

    def _admit(self, share: Share, num_new_blocks: int) -> tuple[Admissions | None, Share]:
        """Admit from the head of the queue while rows, budget and blocks for the whole prompt last.

        num_new_blocks: what running rows take of the pool in this step.
        """
        self._seats.publisher.flush()  # so that a newcomer finds all there is
        left, admitted, hits, long_rows, long_counts = share.left, [], [], [], []
        promised = self.memory.promised(self.table, share)
        num_free = self.pool.num_free - num_new_blocks - promised
        while left and self._seats.num_free:
            request = self.waiting.head()
            if request is None or request.num_in_flight:
                break
            offer = self.memory.offer(request)
            if offer.num_blocks > num_free:
                break
            self._seats.seat(request, offer)
            num_cached = offer.hit.num_tokens
            if num_cached and not request.num_preemptions:
                self._outbox.found(request, min(num_cached, request.num_prompt_tokens))
            uncomputed = len(request.tokens) - num_cached
            count = min(left, self._cap(), uncomputed)
            if uncomputed > 1:
                long_rows.append(request.row)
                long_counts.append(count)
            left -= count
            num_free -= offer.num_blocks
            admitted.append(request)
            hits.append(offer.hit)
        if not admitted:
            return None, share
        return admissions_of(self.table, admitted, hits), Share(
            run_rows=np.concatenate((share.run_rows, np.array(long_rows, np.int32))),
            run_counts=np.concatenate((share.run_counts, np.array(long_counts, np.int32))),
            paused_rows=share.paused_rows,
            left=left,
        )

    def _issue(self, plan: StepPlan) -> None:
        """Count the step as done by the tables, and remember it until its tokens are back."""
        self.waiting.served(self.table, plan)
        table, batch = self.table, plan.batch
        self._records.add(plan, table)
        if table.asking:
            self._askers.issue(self.num_steps, plan)
        table.num_computed_tokens[batch.places] += batch.num_scheduled_tokens
        table.num_tokens[batch.places] += batch.samples
        self.num_steps += 1
        self.num_tokens_computed += batch.num_tokens

    # ------------------------------------------------------------ its tokens

    def settle(self, tokens: np.ndarray, extras: Extras | None = None) -> Deliveries:
        """Take the tokens of the oldest unsettled step: append, find who ended, give rows and blocks back.

        Shapes: tokens [num_reqs] int32 in that step's batch order, -1 where the row did not sample. extras: what it
            brought beside them, for those who asked.
        Rows are known by the record, never by the present table: a row that changed hands since keeps its own tokens.
        Returns: the tokens to deliver, after the ends that no step brings (`drain`).
        Raises: ProtocolError if the tokens or extras are not what that step can have brought; nothing has changed then.
        """
        check_tokens(tokens, self._records.oldest.plan, self.config.vocab_size)
        if extras is not None or self._askers:
            askings = self._askers.take(self.num_steps - len(self._records), extras, tokens)
            deliveries = self._settle(tokens)
            return with_extras(deliveries, askings, extras or {})
        return self._settle(tokens)

    def _settle(self, tokens: np.ndarray) -> Deliveries:
        record = self._records.settle()
        self.digests.sampled(tokens)
        masked, failed = None, ()
        if self._masks.in_flight:
            masked, failed = self._masks.settle(self.num_steps - len(self._records) - 1, tokens)
        cached = self._outbox.take_cached()
        plan, held = record.plan, record.held(self.table)
        if self.memory.caching:
            self._seats.publisher.publish_step(plan, held)
        columns = self._append(record, held, tokens, masked)
        if self.blocks.windows:
            running = record.held(
                self.table
            )  # without those that have ended since: all of theirs is back
            some = slice(None) if running is None else running
            self.memory.return_unseen(plan.batch.rows[some], plan.seq_lens[some])
        late = []
        if held is not None and self._seats.num_detached:
            late = self._settle_late(tokens, record, np.flatnonzero(~held))
        for request, why in failed:
            if request.status is not RequestStatus.FINISHED:
                self._fail(request, why)
        return self._deliver(columns, late, cached)

    def drain(self) -> Deliveries:
        """Take the ends that no step brings: aborts, and requests that came complete."""
        return self._deliver(NO_COLUMNS, [], {})

    def _append(
        self,
        record: StepRecord,
        held: np.ndarray | None,
        tokens: np.ndarray,
        masked: MaskedStep | None,
    ) -> Columns:
        """Append a token to each row that sampled and is held still, and end those that it ends."""
        table, batch = self.table, record.plan.batch
        lengths = record.plan.seq_lens  # before: whoever samples has computed all it had
        if held is None and batch.all_sample:
            rows, places = batch.rows, batch.places
            of_rows = record.occupants.columns(table, rows)
        else:
            keep = (batch.samples if held is None else batch.samples & held).nonzero()[0]
            rows, lengths, tokens = batch.rows[keep], lengths[keep], tokens[keep]
            places, of_rows = rows, RowFacts.of(table, rows)
        table.token_cells[of_rows.first_cells + lengths] = tokens
        lengths = lengths + 1
        table.num_settled_tokens[places] = lengths
        codes = np.zeros(len(tokens), np.int8)
        suspects = self._stops.suspect[tokens] | (lengths >= of_rows.end_len)
        if masked is not None:  # any of them may have completed its form
            suspects |= np.isin(rows, masked.rows)
        entries = suspects.nonzero()[0]
        if len(entries):
            looked_at = (column[entries].tolist() for column in (rows, tokens, lengths))
            ended = []
            for entry, row, token, length in zip(entries.tolist(), *looked_at, strict=True):
                request = table.occupant(row)
                codes[entry] = code = self._stops.finish_code(request, token, length)
                if code is not FinishCode.RUNNING:
                    ended.append(request)
            if ended:
                self._end(ended)
        return of_rows.front_index, of_rows.numbers, tokens, codes

    def _settle_late(
        self, tokens: np.ndarray, record: StepRecord, batch_indices: np.ndarray
    ) -> list[Entry]:
        """Append tokens whose request has left its row since; those whose request has ended are dropped."""
        entries, ended = [], []
        for batch_index, request in self._seats.settle_late(record, batch_indices):
            if not record.plan.samples[batch_index]:
                continue
            token = int(tokens[batch_index])
            code = self._stops.finish_code(request, token, len(request.tokens) + 1)
            if code is FinishCode.RUNNING:
                request.tokens = np.append(request.tokens, np.int32(token))
            else:
                ended.append(request)
            entries.append((request.front_index, request.number, token, code))
        if ended:
            self._end(ended)
        return entries

    def _deliver(
        self, columns: Columns, late: Sequence[Entry], cached: CachedColumns
    ) -> Deliveries:
        self.num_tokens_out += len(columns[0]) + len(late)
        entries = [*self._outbox.take_ends(), *late]
        return deliveries_of(dict(self._registry.fronts), entries, columns, cached)

    # ------------------------------------------------------------ the prefix cache

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget every cached prefix. False, and nothing changed, while any block is in use.

        preempt_running: take the blocks of all running requests first; they wait in their old order and keep what they
        have, tokens in flight too.
        """
        if preempt_running:
            if self.table.num_live:
                self._seats.preempt(np.flatnonzero(self.table.live))
            while self.memory.reclaim():
                pass
        return self.cache.reset()
