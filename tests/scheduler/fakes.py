"""A scheduler with a worker that computes nothing, so that a test takes milliseconds and every token is known.

The worker's tables, the frames and their checks are the real ones; only the model is fake: an integer function of a
request's tokens, while its KV cache remembers which prefix stands in which slot (`launch/bench/prefix_memory.py`).
Whoever reads a block that is not his fails at that read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from rowcast.launch.bench.checked_engine import CheckedEngine
from rowcast.launch.bench.fake_logprobs import rows_at
from rowcast.launch.bench.fake_rank import FakeRank
from rowcast.scheduler.agreement import StepPlan
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.deliveries import Deliveries
from rowcast.scheduler.extras import LogprobRows, PromptRows
from rowcast.scheduler.front_messages import FinishCode, Submit, make_submit_key
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.scheduler.messages import Admissions, SchedulerOutput
from rowcast.scheduler.policy import Policy
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.tests.scheduler.fake_forms import FakeGrammars, allowed_ids, choose
from rowcast.worker.request_states import RequestStates

VOCAB_SIZE = 101
FRONT = b"front"

Model = Callable[[int, np.ndarray], int]  # (seed, tokens so far) -> next token


def group(
    block_size: int = 16, *, window: int = 0, chunk: int = 0, layers: tuple[int, ...] = (0,)
) -> KVGroupSpec:
    """A group of full attention, or with a sliding window, or of chunks, whichever is given (tokens)."""
    kind = AttentionKind.FULL
    if window or chunk:
        kind = AttentionKind.SLIDING_WINDOW if window else AttentionKind.CHUNKED
    return KVGroupSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_dim=8,
        layers=layers,
        kind=kind,
        window=window or chunk,
    )


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
    submit: Submit, config: SchedulerConfig, model: Model = hash_model, *, most: int | None = None
) -> tuple[list[int], FinishCode]:
    """A request's outputs and end when nobody else is there: the plain loop that a person can audit.

    most: tokens that the pool can carry it to, if less than max_model_len.
    """
    num_prompt, params = len(submit.prompt_token_ids), submit.params
    limit = config.max_model_len if most is None else min(most, config.max_model_len)
    if params.max_tokens is not None:
        limit = min(limit, num_prompt + params.max_tokens)
    tokens = np.zeros(limit, np.int64)
    length = num_prompt + len(submit.output_token_ids)
    tokens[:length] = np.concatenate((submit.prompt_token_ids, submit.output_token_ids))
    while True:
        token = model(submit.seed, tokens[:length])
        form, vocabulary = params.structured_outputs, (config.vocab_size, config.eos_token_ids)
        if form is not None:
            said = tokens[num_prompt:length].tolist()
            token = choose(token, form.regex, said, *vocabulary, ignore_eos=params.ignore_eos)
        tokens[length] = token
        length += 1
        outputs = tokens[num_prompt:length].tolist()
        if form is not None and not allowed_ids(form.regex, outputs, *vocabulary):
            return outputs, FinishCode.STOP
        if token in config.eos_token_ids and not params.ignore_eos:
            return outputs, FinishCode.STOP
        if token in params.stop_token_ids:
            return outputs, FinishCode.STOP
        if length == limit:
            return outputs, FinishCode.LENGTH


class FakeWorker(FakeRank):
    """A rank whose next token is `model`'s, from the tokens in its own table. Every read of its cache is checked."""

    def __init__(self, scheduler: Scheduler, model: Model) -> None:
        super().__init__(scheduler, self._sample_rows)
        self.model = model

    def _sample_rows(self, requests: RequestStates, plan: StepPlan) -> np.ndarray:
        tokens = np.full(plan.num_reqs, -1, np.int32)
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        for batch_index in np.flatnonzero(plan.samples):
            row = plan.index_mapping[batch_index]
            seen = requests.token_ids[row, : ends[batch_index]]
            tokens[batch_index] = self.model(int(requests.seeds[row]), seen)
        return tokens


class PositionWorker(FakeRank):
    """The next token is a function of seed and length alone, and few reads are made: for much in little time."""

    def __init__(self, scheduler: Scheduler, model: Model) -> None:
        super().__init__(scheduler, positions, probes=2)
        self.model = model


def positions(requests: RequestStates, plan: StepPlan) -> np.ndarray:
    rows = plan.index_mapping
    return _at_position(requests.seeds[rows], requests.num_tokens[rows])


def position_model(seed: int, tokens: np.ndarray) -> int:
    """What PositionWorker computes, for one request."""
    return int(_at_position(np.array(seed), np.array(len(tokens))))


def _at_position(seeds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return (seeds * 31 + lengths * 17) % 89


class Bench:
    """A scheduler and a fake worker, stepped by hand; checks every invariant after every move.

    Requests are known by number; a request's seed is its number unless given. issued[number] counts the tokens that
    steps ran of it; outputs, ends and cached hold what was delivered. first_hits[number]: what its first admission
    found in the cache, as the worker was told. scored[number]: up to which of its prompt's tokens it has rows of
    log-probabilities; every row is checked as it is delivered.
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
        settings = SchedulerConfig(**(defaults | config))
        self.grammars = FakeGrammars(settings.vocab_size, settings.eos_token_ids)
        self.scheduler = Scheduler(
            settings,
            groups or (group(block_size),),
            usable + 1,
            policy,
            grammars=self.grammars,  # type: ignore[arg-type]
        )
        self.worker = worker(self.scheduler, model)
        self.engine = CheckedEngine(self.scheduler, self.worker)
        self.submits: dict[int, Submit] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, FinishCode] = {}
        self.cached: dict[int, int] = {}
        self.first_hits: dict[int, int] = {}
        self.scored: dict[int, int] = {}
        self.issued: dict[int, int] = {}
        self.num_tokens_run = 0
        self.last_step: SchedulerOutput | None = None
        self.last_frame = b""

    @property
    def free(self) -> int:
        return self.scheduler.pool.num_free

    @property
    def most_tokens(self) -> int:
        """The length that a request may reach before the whole pool ends it: its last token needs no KV."""
        return self.scheduler._door.max_kv_tokens + 1

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
        submit: Mapping[str, Any] = MappingProxyType({}),
        **params,
    ) -> int:
        """Submit a prompt (or one of that many tokens) and name its number: 0, 1, 2, ...

        submit: further fields of Submit; params: those of SamplingParams.
        """
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
            **submit,
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
        issued = self.engine.issue(token_budget)
        self.last_step = None if issued is None else issued.step
        if issued is None:
            return None
        self.last_frame = issued.frame
        if issued.step.admissions is not None:
            self._note_hits(issued.step.admissions)
        plan = issued.plan
        counts = plan.num_scheduled_tokens.tolist()
        ran = dict(zip(issued.numbers.tolist(), counts, strict=True))
        assert len(ran) == plan.num_reqs
        for number, count in ran.items():
            self.issued[number] = self.issued.get(number, 0) + count
        self.num_tokens_run += issued.num_tokens
        return ran

    def _note_hits(self, admissions: Admissions) -> None:
        for row, cached, length in zip(
            admissions.rows.tolist(),
            admissions.num_cached_tokens.tolist(),
            admissions.num_prompt_tokens.tolist(),
            strict=True,
        ):
            number = self.scheduler.table.occupant(row).number
            self.first_hits.setdefault(number, min(cached, length))

    def settle(self) -> list[tuple[int, int]]:
        """Hand the oldest step's tokens to the scheduler; (number, token) as delivered."""
        return self._deliver(self.engine.settle())

    def drain(self) -> list[tuple[int, int]]:
        delivered = self._deliver(self.scheduler.drain())
        self.check()
        return delivered

    def step(self) -> dict[int, int] | None:
        """Issue and settle one step: depth 1."""
        ran = self.issue()
        if ran is not None:
            self.settle()
        return ran

    def run(self, max_steps: int = 10_000) -> int:
        """Work at the configured depth until nothing is left; how many steps that took."""
        for done in range(max_steps):
            self.grammars.finish()
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
        for number, cached in zip(
            deliveries.cached_numbers.tolist(), deliveries.cached_tokens.tolist(), strict=True
        ):
            assert number not in self.ends, f"request {number} got something after its end"
            assert number not in self.cached, f"request {number} is told twice what was cached"
            assert number not in self.outputs, f"request {number} has tokens already"
            self.cached[number] = cached
        for _, rows in deliveries.prompt_logprobs:
            self._check_prompt_rows(rows)
        entries = zip(
            deliveries.numbers.tolist(),
            deliveries.tokens.tolist(),
            deliveries.finish_codes.tolist(),
            strict=True,
        )
        for place, (number, token, code) in enumerate(entries):
            assert number not in self.ends, f"request {number} got something after its end"
            self._check_row(number, token, deliveries.logprobs.get(place))
            if token >= 0:
                self.outputs.setdefault(number, []).append(token)
            if code:
                self.ends[number] = FinishCode(code)
            delivered.append((number, token))
        return delivered

    def _check_prompt_rows(self, given: PromptRows) -> None:
        """Each prompt token's row comes once, in order, before the first output, and is that of its place."""
        number, first, rows = given
        submit = self.submits[number]
        num_best = submit.params.prompt_logprobs
        assert num_best is not None, f"request {number} did not ask for its prompt"
        assert number not in self.ends, number
        assert number not in self.outputs, number
        assert first == self.scored.get(number, 1), f"request {number}: rows from {first} on"
        end = self.scored[number] = first + len(rows)
        targets = submit.prompt_token_ids[first:end]
        assert rows == rows_at(np.arange(first, end), targets, num_best, VOCAB_SIZE), number

    def _check_row(self, number: int, token: int, row: LogprobRows | None) -> None:
        """A token comes with its row, if that was asked for, and the first one when its prompt is complete."""
        submit = self.submits[number]
        asked, num_prompt = submit.params, len(submit.prompt_token_ids)
        if token < 0 or asked.logprobs is None:
            assert row is None, f"request {number} got a row that it did not ask for"
            if token < 0:
                return
        num_outputs = len(submit.output_token_ids) + len(self.outputs.get(number, ()))
        if asked.logprobs is not None:
            at = np.array([num_prompt + num_outputs])
            assert row == rows_at(at, np.array([token]), asked.logprobs, VOCAB_SIZE), number
        if asked.prompt_logprobs is not None and not num_outputs:
            assert self.scored.get(number, 1) == num_prompt, f"request {number}: prompt rows lack"

    def check(self) -> None:
        self.engine.check()

    def alone(self, number: int) -> tuple[list[int], FinishCode]:
        """What this request gets when nobody else is there."""
        config, most = self.scheduler.config, self.most_tokens
        return alone(self.submits[number], config, self.worker.model, most=most)

    def check_all_ended(self) -> None:
        """Nothing is left of anyone, and each got what it gets alone."""
        for number, submit in self.submits.items():
            if self.ends[number] in (FinishCode.STOP, FinishCode.LENGTH):
                outputs, code = self.alone(number)
                got = submit.output_token_ids.tolist() + self.outputs.get(number, [])
                assert (got, self.ends[number]) == (outputs, code), f"request {number}"
                assert self.cached.get(number, 0) == self.first_hits.get(number, 0)
        self.check_empty()

    def check_empty(self) -> None:
        """No row, block, queue entry or dictionary entry is left once the front has acknowledged the ends."""
        scheduler = self.scheduler
        scheduler.forget(FRONT, list(self.ends))
        assert scheduler.num_running == len(scheduler.waiting) == scheduler.num_in_flight == 0
        assert self.free == scheduler.pool.usable
        assert scheduler.num_remembered == 0
        assert not self.worker.state.requests.live.any()
