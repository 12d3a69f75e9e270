"""A scheduler with a worker that computes nothing, so that a test takes milliseconds and every token is known.

The worker's tables, the frames and their checks are the real ones; only the model is fake: an integer function of the
tokens that it reads, through the block tables, from a fake KV cache. Whoever reads a block that is not his gets another
token than he gets alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from rowcast.scheduler.agreement import StepPlan, query_start_loc
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.deliveries import Deliveries
from rowcast.scheduler.front_messages import FinishCode, Submit, make_submit_key
from rowcast.scheduler.kv_groups import KVGroupSpec, blocks_needed
from rowcast.scheduler.messages import SchedulerOutput, decode_frame, encode_step
from rowcast.scheduler.policy import Policy
from rowcast.scheduler.request import RequestStatus
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.worker.state import WorkerState

VOCAB_SIZE = 101
FRONT = b"front"

Model = Callable[[int, np.ndarray], int]  # (seed, tokens so far) -> next token


def group(block_size: int = 16) -> KVGroupSpec:
    return KVGroupSpec(block_size=block_size, num_kv_heads=1, head_dim=8, layers=(0,))


def hash_model(seed: int, tokens: np.ndarray) -> int:
    """Any change of any token, its place or the seed gives another next token, almost surely."""
    weights = np.cumprod(np.full(len(tokens), 6364136223846793005, np.uint64))
    mixed = (
        int((weights * (tokens.astype(np.uint64) + np.uint64(1))).sum()) + seed * 0x9E3779B97F4A7C15
    )
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64 % VOCAB_SIZE


def scripted(outputs: dict[int, Sequence[int]], num_prompt_tokens: dict[int, int]) -> Model:
    """A model that says outputs[seed] one by one, then 0."""

    def model(seed: int, tokens: np.ndarray) -> int:
        place = len(tokens) - num_prompt_tokens[seed]
        return outputs[seed][place] if place < len(outputs[seed]) else 0

    return model


def alone(
    submit: Submit, config: SchedulerConfig, model: Model = hash_model
) -> tuple[list[int], FinishCode]:
    """A request's outputs and end when nobody else is there: the plain loop that a person can audit."""
    num_prompt, params = len(submit.prompt_token_ids), submit.params
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_prompt + params.max_tokens)
    tokens = np.zeros(limit, np.int64)
    length = num_prompt + len(submit.output_token_ids)
    tokens[:length] = np.concatenate((submit.prompt_token_ids, submit.output_token_ids))
    while True:
        token = model(submit.seed, tokens[:length])
        tokens[length] = token
        length += 1
        outputs = tokens[num_prompt:length].tolist()
        if token in config.eos_token_ids and not params.ignore_eos:
            return outputs, FinishCode.STOP
        if token in params.stop_token_ids:
            return outputs, FinishCode.STOP
        if length == limit:
            return outputs, FinishCode.LENGTH


class FakeWorker:
    """Real tables; a KV cache whose slot holds the token that was computed there, one a group."""

    def __init__(self, scheduler: Scheduler, model: Model) -> None:
        config = scheduler.config
        self.state = WorkerState(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            groups=scheduler.groups,
            num_blocks=scheduler.pool.usable + 1,
            vocab_size=config.vocab_size,
        )
        self.model = model
        self.kv = [
            np.full((scheduler.pool.usable + 1, spec.block_size), -1) for spec in scheduler.groups
        ]

    def execute(self, step: SchedulerOutput) -> tuple[StepPlan, np.ndarray]:
        plan = self.state.apply(step)
        tokens = self._tokens(plan)
        self.state.commit(plan, tokens)
        return plan, tokens

    def _tokens(self, plan: StepPlan) -> np.ndarray:
        tokens = np.full(plan.num_reqs, -1, np.int32)
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        for row, start, end in zip(plan.index_mapping, plan.num_computed_tokens, ends, strict=True):
            self._write(row, np.arange(start, end))
        for batch_index in np.flatnonzero(plan.samples):
            row = plan.index_mapping[batch_index]
            seed = int(self.state.requests.seeds[row])
            tokens[batch_index] = self.model(seed, self._read(row, ends[batch_index]))
        return tokens

    def _write(self, row: int, positions: np.ndarray) -> None:
        for kv, table in zip(self.kv, self.state.block_tables.table, strict=True):
            block_ids = table[row, positions // kv.shape[1]]
            assert block_ids.all(), "a token would be written to the null block"
            kv[block_ids, positions % kv.shape[1]] = self.state.requests.token_ids[row, positions]

    def _read(self, row: int, length: int) -> np.ndarray:
        seen = []
        for kv, table in zip(self.kv, self.state.block_tables.table, strict=True):
            positions = np.arange(length)
            seen.append(kv[table[row, positions // kv.shape[1]], positions % kv.shape[1]])
        assert all((other == seen[0]).all() for other in seen), (
            "KV groups remember different tokens"
        )
        return seen[0]


class PositionWorker(FakeWorker):
    """The next token is a function of seed and length alone: thousands of rows and steps in little time."""

    def _tokens(self, plan: StepPlan) -> np.ndarray:
        requests, rows = self.state.requests, plan.index_mapping
        tokens = _at_position(requests.seeds[rows], requests.num_tokens[rows])
        return np.where(plan.samples, tokens, -1).astype(np.int32)


def position_model(seed: int, tokens: np.ndarray) -> int:
    """What PositionWorker computes, for one request."""
    return int(_at_position(np.array(seed), np.array(len(tokens))))


def _at_position(seeds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return (seeds * 31 + lengths * 17) % 89


class Bench:
    """A scheduler and a fake worker, stepped by hand; checks every invariant after every move.

    Requests are known by number; a request's seed is its number unless given. issued[number] counts the tokens that
    steps ran of it; outputs and ends hold what was delivered.
    """

    def __init__(
        self,
        *,
        usable: int = 9_999,
        groups: tuple[KVGroupSpec, ...] | None = None,
        block_size: int = 16,
        model: Model = hash_model,
        worker: type[FakeWorker] = FakeWorker,
        policy: Policy | None = None,
        **config,
    ) -> None:
        defaults = {
            "vocab_size": VOCAB_SIZE,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 8192,
            "depth": 1,
            "prefix_caching": False,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**(defaults | config)),
            groups or (group(block_size),),
            usable + 1,
            policy,
        )
        self.worker = worker(self.scheduler, model)
        self.submits: dict[int, Submit] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, FinishCode] = {}
        self.issued: dict[int, int] = {}
        self.num_tokens_run = 0
        self.last_step: SchedulerOutput | None = None
        self.last_frame = b""
        self._sequence = 0
        self._results: deque[np.ndarray] = deque()

    @property
    def free(self) -> int:
        return self.scheduler.pool.num_free

    @property
    def running(self) -> list[int]:
        return [r.number for r in self.scheduler.table.requests if r is not None]

    @property
    def waiting(self) -> list[int]:
        return [request.number for request in self.scheduler.waiting]

    def add(
        self,
        prompt: int | Sequence[int],
        *,
        number: int | None = None,
        outputs: Sequence[int] = (),
        request_id: str | None = None,
        key: int | None = None,
        seed: int | None = None,
        front: bytes = FRONT,
        **params,
    ) -> int:
        """Submit a prompt (or one of that many tokens) and name its number: 0, 1, 2, ..."""
        number = len(self.submits) if number is None else number
        if isinstance(prompt, int):
            prompt = [(number + place) % VOCAB_SIZE for place in range(prompt)]
        submit = Submit(
            number=number,
            submit_key=make_submit_key(b"c" * 16, number if key is None else key),
            request_id=f"r{number}" if request_id is None else request_id,
            prompt_token_ids=np.array(prompt, np.int32),
            output_token_ids=np.array(outputs, np.int32),
            seed=number if seed is None else seed,
            params=SamplingParams(**({"max_tokens": 16, "temperature": 0} | params)),
        )
        self.scheduler.add(front, submit)
        self.submits[number] = submit
        self.check()
        return number

    def abort(self, number: int) -> bool:
        known = self.scheduler.abort(FRONT, number)
        self.check()
        return known

    def issue(self, token_budget: int | None = None) -> dict[int, int] | None:
        """Schedule a step and let the worker run it; {number: tokens} in batch order, None when there was none."""
        step = self.scheduler.schedule(token_budget)
        self.last_step = step
        if step is None:
            self.check()
            return None
        self._sequence += 1
        self.last_frame = encode_step(step, epoch=1, sequence=self._sequence)
        frame = decode_frame(self.last_frame)
        assert isinstance(frame.body, SchedulerOutput)
        numbers = {row: self.scheduler.table.occupant(row).number for row in self._live_rows()}
        plan, tokens = self.worker.execute(frame.body)
        self._results.append(tokens)
        ran = {
            numbers[row]: count
            for row, count in zip(
                plan.index_mapping.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
            )
        }
        assert len(ran) == plan.num_reqs
        num_tokens = int(query_start_loc(plan)[-1])
        budget = (
            self.scheduler.config.max_num_batched_tokens if token_budget is None else token_budget
        )
        assert num_tokens <= budget, f"{num_tokens} tokens run, the budget is {budget}"
        for number, count in ran.items():
            self.issued[number] = self.issued.get(number, 0) + count
        self.num_tokens_run += num_tokens
        self.check()
        return ran

    def settle(self) -> list[tuple[int, int]]:
        """Hand the oldest step's tokens to the scheduler; (number, token) as delivered."""
        return self._deliver(self.scheduler.settle(self._results.popleft()))

    def drain(self) -> list[tuple[int, int]]:
        return self._deliver(self.scheduler.drain())

    def step(self) -> dict[int, int] | None:
        """Issue and settle one step: depth 1."""
        ran = self.issue()
        if ran is not None:
            self.settle()
        return ran

    def run(self, max_steps: int = 10_000) -> int:
        """Work at the configured depth until nothing is left; how many steps that took."""
        for done in range(max_steps):
            while self.scheduler.num_in_flight < self.scheduler.config.depth:
                if self.issue() is None:
                    break
            if not self.scheduler.num_in_flight:
                self.drain()
                assert not self.scheduler.num_unfinished, "requests are left and nothing happens"
                return done
            self.settle()
        raise AssertionError(
            f"requests {self.running} {self.waiting} are left after {max_steps} steps"
        )

    def _deliver(self, deliveries: Deliveries) -> list[tuple[int, int]]:
        delivered = []
        for number, token, code in zip(
            deliveries.numbers.tolist(),
            deliveries.tokens.tolist(),
            deliveries.finish_codes.tolist(),
            strict=True,
        ):
            assert number not in self.ends, f"request {number} got something after its end"
            if token >= 0:
                self.outputs.setdefault(number, []).append(token)
            if code:
                self.ends[number] = FinishCode(code)
            delivered.append((number, token))
        self.check()
        return delivered

    def _live_rows(self) -> list[int]:
        return np.flatnonzero(self.scheduler.table.live).tolist()

    # ---------------------------------------------------------------- what must always hold

    def check(self) -> None:
        self._check_pool()
        self._check_queues()
        self._check_tables()

    def _check_pool(self) -> None:
        pool, blocks = self.scheduler.pool, self.scheduler.blocks
        free = pool.free_ids()
        assert len(free) == pool.num_free
        held = np.zeros(pool.usable + 1, np.int32)
        for num_blocks, block_ids in zip(blocks.num_blocks, blocks.block_ids, strict=True):
            used = np.arange(block_ids.shape[1]) < num_blocks[:, None]
            assert not block_ids[~used].any(), "a block id stands beyond what the row holds"
            held += np.bincount(block_ids[used], minlength=len(held)).astype(np.int32)
        assert held[0] == 0, "the null block was handed out"
        assert (held == pool.ref_counts).all()
        is_free = np.zeros(pool.usable + 1, bool)
        is_free[free] = True
        assert is_free.sum() == len(free), "a block is free twice"
        assert not is_free[0]
        assert (is_free[1:] == (held[1:] == 0)).all()

    def _check_queues(self) -> None:
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        assert all(r.status is RequestStatus.WAITING and r.row == -1 for r in waiting)
        running = [r for r in scheduler.table.requests if r is not None]
        assert all(r.status is RequestStatus.RUNNING for r in running)
        assert len(running) == scheduler.num_running == int(scheduler.table.live.sum())
        assert len({id(r) for r in waiting + running}) == len(waiting) + len(running)
        num_ending = scheduler.num_unfinished - len(waiting) - len(running)
        assert num_ending >= 0
        assert num_ending == 0 or scheduler.num_in_flight, (
            "a request waits for a step that is not there"
        )
        assert all(r.num_in_flight >= 0 for r in waiting)

    def _check_tables(self) -> None:
        table, states = self.scheduler.table, self.worker.state.requests
        live = table.live & states.live & (self._same_request())
        for name in ("num_tokens", "num_computed_tokens"):
            ours, theirs = getattr(table, name)[live], getattr(states, name)[live]
            assert (ours == theirs).all(), f"{name}: {ours} here, {theirs} at the worker"
        for num_blocks, spec in zip(
            self.scheduler.blocks.num_blocks, self.scheduler.groups, strict=True
        ):
            needed = blocks_needed(table.num_computed_tokens, spec.block_size)
            assert (num_blocks >= needed).all(), "a row holds fewer blocks than it has tokens"
        for group_index, theirs in enumerate(self.worker.state.block_tables.table):
            ours = self.scheduler.blocks.block_ids[group_index]
            assert (ours[live] == theirs[live, : ours.shape[1]]).all()
        settled = np.arange(table.token_ids.shape[1]) < table.num_settled_tokens[:, None]
        settled &= live[:, None]
        assert (table.token_ids[settled] == states.token_ids[settled]).all()

    def _same_request(self) -> np.ndarray:
        """Rows whose present occupant the worker has heard of: a free that is not sent yet does not count."""
        pairs = zip(
            self.scheduler.table.requests, self.worker.state.requests.request_ids, strict=True
        )
        return np.array([r is not None and r.request_id == theirs for r, theirs in pairs])

    def check_all_ended(self) -> None:
        """Nothing is left of anyone, and each got what it gets alone."""
        for number, submit in self.submits.items():
            if self.ends[number] in (FinishCode.STOP, FinishCode.LENGTH):
                outputs, code = alone(submit, self.scheduler.config, self.worker.model)
                got = submit.output_token_ids.tolist() + self.outputs.get(number, [])
                assert (got, self.ends[number]) == (outputs, code), f"request {number}"
        self.check_empty()

    def check_empty(self) -> None:
        """No row, block, queue entry or dictionary entry is left once the front has acknowledged the ends."""
        scheduler = self.scheduler
        scheduler.forget(FRONT, list(self.ends))
        assert scheduler.num_running == len(scheduler.waiting) == scheduler.num_in_flight == 0
        assert self.free == scheduler.pool.usable
        assert scheduler.num_remembered == 0
        assert not self.worker.state.requests.live.any()
