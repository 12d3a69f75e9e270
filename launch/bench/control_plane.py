"""`rowcast bench control-plane`: what a decode step costs beside the model, in time and in bytes.

The real scheduler with its prefix cache, the real frames and digests, the real worker tables and input kernels (the
Numba twins, one thread), back to back in one thread, two steps in flight as served; a fake sampler stands where the
model would. Before it measures nothing is known to be right, so it ends with a comparison of both sides' tables.

Phases, as they follow one another round the circle: `schedule`; `encode`, with the scheduler's digest; `decode`;
`apply`, with the worker's digest; `inputs`; `update`: the worker's tables take the tokens, the result is encoded, and
the scheduler reads, compares and settles the result of the step before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...scheduler.agreement import StepPlan, disagreement
from ...scheduler.config import SchedulerConfig
from ...scheduler.front_messages import Submit, make_submit_key
from ...scheduler.kv_groups import blocks_needed
from ...scheduler.messages import (
    SchedulerOutput,
    StepResult,
    decode_frame,
    decode_report,
    encode_result,
    encode_step,
)
from ...scheduler.sampling_params import SamplingParams
from ...scheduler.scheduler import Scheduler
from ...worker.backend import select_backend
from ...worker.input_batch import InputBuilder
from ...worker.state import WorkerState
from ..config import MAX_NUM_SEQS, check_tables_fit
from .invariants import check_pool, check_queues, check_tables
from .kv_memory import gemma_groups
from .throughput import machine, versions

PHASES = ("schedule", "encode", "decode", "apply", "inputs", "update")
DEPTH = 2  # as served
_VOCAB_SIZE = 32_000
_EOS = 0  # sampled only where a request is to end
_PREFILL_TOKENS = 8_192  # a step's, until all decode
_CHURN_PROMPT = 100
_DISPLACED_BYTES = 64 * 2**20  # beyond any core's own caches
_EPOCH = 1
_FRONT = "bench"
_T = TypeVar("_T")


@dataclass(slots=True)
class _Clock:
    """Nanoseconds by phase, of each step; of this thread's CPU alone; and of submitting, which belongs to no phase."""

    spent: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in PHASES})
    totals: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    submits: list[int] = field(default_factory=list)
    frame_bytes: list[int] = field(default_factory=list)
    result_bytes: list[int] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)  # rows that crossed a block border
    _cpu_of_step: int = 0

    def time(self, phase: str, call: Callable[[], _T]) -> _T:
        cpu_start = time.thread_time_ns()
        start = time.perf_counter_ns()
        value = call()
        self.spent[phase].append(time.perf_counter_ns() - start)
        self._cpu_of_step += time.thread_time_ns() - cpu_start
        return value

    def close_step(self) -> None:
        self.totals.append(sum(spent[-1] for spent in self.spent.values()))
        self.cpu.append(self._cpu_of_step)
        self._cpu_of_step = 0

    def microseconds(self, reduce: Callable[[list[int]], Any]) -> dict[str, float]:
        columns = {**self.spent, "total": self.totals}
        return {name: round(float(reduce(spent)) / 1_000, 2) for name, spent in columns.items()}


class ControlPlane:
    """Scheduler and one rank's tables, joined by real frames, with random tokens for a model.

    prompt_lens: [rows] tokens. churn: requests that end, and come, in every step.
    """

    def __init__(
        self,
        *,
        prompt_lens: np.ndarray,
        max_steps: int,
        block_size: int,
        kv_groups: int,
        churn: int = 0,
        prefill_tokens: int = _PREFILL_TOKENS,
    ) -> None:
        rows = len(prompt_lens)
        groups = gemma_groups(block_size, kv_groups)
        max_model_len = int(max(prompt_lens.max(), _CHURN_PROMPT)) + max_steps + 1
        # Those that decode already take nothing from the prompts: the prefill is as short as max_steps counts on.
        max_tokens = rows + max(prefill_tokens, churn * _CHURN_PROMPT)
        num_blocks = 1 + rows * kv_groups * blocks_needed(max_model_len, block_size)
        self._scheduler = Scheduler(
            SchedulerConfig(
                vocab_size=_VOCAB_SIZE,
                max_model_len=max_model_len,
                max_num_seqs=rows,
                max_num_batched_tokens=max_tokens,
                max_waiting=rows + churn,
                depth=DEPTH,
                eos_token_ids=(_EOS,),
            ),
            groups,
            num_blocks,
        )
        self._state = WorkerState(
            max_num_seqs=rows,
            max_model_len=max_model_len,
            groups=groups,
            num_blocks=num_blocks,
            vocab_size=_VOCAB_SIZE,
            depth=DEPTH,
        )
        self._builder = InputBuilder(
            self._state,
            select_backend("cpu", "cpu"),
            max_num_batched_tokens=max_tokens,
            device="cpu",
        )
        self._random = np.random.default_rng(0)
        self._churn = churn
        self._sequence = 0
        self._count = 0
        self._sent: deque[tuple[bytes, int]] = deque()  # result and expected digest, not settled
        self._oldest: deque[int] = deque()  # rows, in the order in which they are to end
        self._ended: list[int] = []
        self._displaced = np.zeros(_DISPLACED_BYTES // 8, np.int64)
        for length in prompt_lens.tolist():
            self._submit(length)

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(_EOS + 1, _VOCAB_SIZE, count, np.int32)

    def _submit(self, length: int) -> None:
        number, self._count = self._count, self._count + 1
        self._scheduler.add(
            _FRONT,
            Submit(
                number=number,
                submit_key=make_submit_key(bytes(16), number),
                request_id=f"request-{number}",
                prompt_token_ids=self._tokens(length),
                seed=number,
                params=SamplingParams(temperature=0, max_tokens=None),
            ),
        )

    def prefill(self) -> None:
        """Step until every request decodes; then the oldest end first."""
        churn, self._churn = self._churn, 0
        requests = self._state.requests
        while not (
            self._scheduler.num_running == self._state.max_num_seqs
            and (requests.num_tokens - requests.num_computed_tokens == 1).all()
        ):
            self.step(_Clock())
        self._churn = churn
        self._oldest.extend(range(self._state.max_num_seqs))

    def displace_cache(self) -> None:
        """Fill the caches with something else, as a model's step would."""
        self._displaced += 1

    def step(self, clock: _Clock) -> None:
        """One step round the whole circle, and the settling of the one before it."""
        self._come_and_go(clock)
        self._sequence += 1
        sequence, scheduler, state = self._sequence, self._scheduler, self._state
        step = clock.time("schedule", scheduler.schedule)
        assert step is not None

        def encode() -> tuple[bytes, int]:
            frame = encode_step(step, epoch=_EPOCH, sequence=sequence)
            return frame, scheduler.digests.end(frame)

        frame, expected = clock.time("encode", encode)
        decoded = clock.time("decode", lambda: decode_frame(frame)).body
        assert isinstance(decoded, SchedulerOutput)

        def apply() -> tuple[StepPlan, int]:
            plan = state.apply(decoded)
            return plan, state.digests.end(frame)

        plan, digest = clock.time("apply", apply)
        clock.time("inputs", lambda: self._builder.build(plan))
        tokens = self._sample(plan)

        def update() -> bytes:
            state.commit(plan, tokens)
            digests = digest.to_bytes(8, "little") if (tokens >= 0).any() else b""
            message = encode_result(
                StepResult(tokens=tokens, digests=digests), epoch=_EPOCH, sequence=sequence
            )
            if len(self._sent) == DEPTH - 1:
                self._settle()
            return message

        message = clock.time("update", update)
        self._sent.append((message, expected))
        clock.close_step()
        clock.frame_bytes.append(len(frame))
        clock.result_bytes.append(len(message))
        clock.grown.append(len(step.grown_block_ids[0]) if step.admissions is None else 0)
        if step.admissions is not None:
            self._oldest.extend(step.admissions.rows.tolist())

    def _come_and_go(self, clock: _Clock) -> None:
        start = time.perf_counter_ns()
        if self._ended:
            self._scheduler.forget(_FRONT, self._ended)
            self._ended.clear()
        for _ in range(self._churn):
            self._submit(_CHURN_PROMPT)
        clock.submits.append(time.perf_counter_ns() - start)

    def _sample(self, plan: StepPlan) -> np.ndarray:
        """Random tokens, and an end for the oldest `churn` requests."""
        tokens = np.where(plan.samples, self._tokens(plan.num_reqs), np.int32(-1))
        if self._churn:
            batch_index_of_row = np.empty(self._state.max_num_seqs, np.int64)
            batch_index_of_row[plan.index_mapping] = np.arange(plan.num_reqs)
            rows = [self._oldest.popleft() for _ in range(self._churn)]
            tokens[batch_index_of_row[rows]] = _EOS
        return tokens

    def _settle(self) -> None:
        message, expected = self._sent.popleft()
        result = decode_report(message).result
        assert result is not None
        who = disagreement(expected, result.digests)
        assert who is None, who
        delivered = self._scheduler.settle(result.tokens)
        if self._churn:
            self._ended.extend(delivered.numbers[delivered.finish_codes != 0].tolist())

    def check(self) -> None:
        """Both sides hold the same rows, tokens and blocks: a fast step that got them wrong measures nothing.

        And nobody ended but by churn: fewer rows than asked for are faster.
        """
        while self._sent:
            self._settle()
        there, rows = self._scheduler.num_unfinished, self._state.max_num_seqs
        assert there >= rows, f"{there} requests are left of {rows}"
        check_queues(self._scheduler)
        check_pool(self._scheduler, ())
        check_tables(self._scheduler, self._state)


def _run(plane: ControlPlane, steps: int, *, cold: bool = False) -> _Clock:
    clock = _Clock()
    for _ in range(steps):
        if cold:
            plane.displace_cache()
        plane.step(clock)
    return clock


def bench_control_plane(
    rows: int = 1024,
    steps: int = 64,
    block_size: int = 16,
    kv_groups: int = 1,
    warmup: int = 5,
    *,
    churn: int = 0,
    cold: bool = False,
    border: bool = False,
    prompt_len: int = 64,
) -> dict[str, Any]:
    """Measure `steps` decode steps of `rows` requests, each of prompt_len to 2 * prompt_len - 1 random prompt tokens.

    kv_groups: Gemma's, one of full attention and the others with a sliding window of 512. churn: requests of 100 prompt
    tokens that come, and others that end, in every step. cold: measure again with the caches displaced between steps.
    border: measure again with requests of one length, which cross their block borders in the same step.

    Returns: us_per_step and us_per_step_median (microseconds by phase: schedule, encode, decode, apply, inputs, update,
        total), cpu_us_per_step (mean total of this thread's CPU time alone, on a machine with other work),
        bytes_per_step (mean broadcast), max_bytes_per_step, result_bytes, submit_us_per_step (in no phase); cold
        (us_per_step); border (of the step in which all cross: us, worst_us, cpu_us, and ratio and cpu_ratio, which are
        to the mean totals); sizes, versions, machine.
    Raises: ValueError for a size below 1 (warmup and churn below 0), more rows than an engine can have, or tables
        that this machine cannot hold.
    """
    sizes = {"rows": rows, "steps": steps, "block_size": block_size, "kv_groups": kv_groups}
    sizes |= {"prompt_len": prompt_len}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if rows > MAX_NUM_SEQS:
        raise ValueError(f"rows must be at most {MAX_NUM_SEQS}, as max_num_seqs, got {rows}")
    for name, value in (("warmup", warmup), ("churn", churn)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if churn * (DEPTH + 2) > rows:
        raise ValueError(
            f"churn must be at most a {DEPTH + 2}th of rows, since ended rows come back {DEPTH} steps later: "
            f"got {churn} of {rows}"
        )
    longest = 2 * max(prompt_len, _CHURN_PROMPT) + steps * (1 + cold)
    check_tables_fit(rows, longest, 0, remedy="lower --rows, --prompt-len or --steps")
    random = np.random.default_rng(1)
    prompt_lens = random.integers(prompt_len, 2 * prompt_len, rows)
    plane = ControlPlane(
        prompt_lens=prompt_lens,
        max_steps=steps * (1 + cold)
        + warmup
        + blocks_needed(int(prompt_lens.sum()), _PREFILL_TOKENS)
        + DEPTH,
        block_size=block_size,
        kv_groups=kv_groups,
        churn=churn,
    )
    plane.prefill()
    _run(plane, warmup)
    clock = _run(plane, steps)
    figures: dict[str, Any] = {
        "us_per_step": clock.microseconds(np.mean),
        "us_per_step_median": clock.microseconds(np.median),
        "cpu_us_per_step": round(float(np.mean(clock.cpu)) / 1_000, 2),
        "bytes_per_step": round(float(np.mean(clock.frame_bytes)), 1),
        "max_bytes_per_step": max(clock.frame_bytes),
        "result_bytes": round(float(np.mean(clock.result_bytes)), 1),
        "submit_us_per_step": round(float(np.mean(clock.submits)) / 1_000, 2),
    }
    if cold:
        figures["cold"] = {"us_per_step": _run(plane, steps, cold=True).microseconds(np.mean)}
    plane.check()
    if border:
        figures["border"] = _measure_border(rows, steps, block_size, kv_groups, prompt_len)
        at_border = figures["border"]
        at_border["ratio"] = round(at_border["us"] / figures["us_per_step"]["total"], 2)
        at_border["cpu_ratio"] = round(at_border["cpu_us"] / figures["cpu_us_per_step"], 2)
    return figures | {
        "sizes": sizes | {"warmup": warmup, "churn": churn, "depth": DEPTH},
        "versions": versions(),
        "machine": machine(),
    }


def _measure_border(
    rows: int, steps: int, block_size: int, kv_groups: int, prompt_len: int
) -> dict[str, float]:
    """Measure the steps in which every row needs another block and has filled one: all prompts alike, in one step."""
    steps = max(steps, 4 * block_size)
    plane = ControlPlane(
        prompt_lens=np.full(rows, prompt_len),
        max_steps=steps + 2 * block_size,
        block_size=block_size,
        kv_groups=kv_groups,
        prefill_tokens=rows * prompt_len,
    )
    plane.prefill()
    _run(plane, block_size)  # the first border warms up
    clock = _run(plane, steps)
    plane.check()
    crosses = np.array(clock.grown) == rows
    borders, cpu = (np.array(spent)[crosses] / 1_000 for spent in (clock.totals, clock.cpu))
    return {
        "us": round(float(borders.mean()), 2),
        "worst_us": round(float(borders.max()), 2),
        "cpu_us": round(float(cpu.mean()), 2),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for a person, a phase a line."""
    sizes, mean, median = figures["sizes"], figures["us_per_step"], figures["us_per_step_median"]
    cold = figures.get("cold", {}).get("us_per_step")
    churn = (
        f"{sizes['churn']} requests come and {sizes['churn']} end a step, "
        if sizes["churn"]
        else ""
    )
    lines = [
        f"decode, {sizes['rows']} rows, {sizes['kv_groups']} KV group(s) of block size {sizes['block_size']}, {churn}"
        f"prefix cache and digests on, depth {sizes['depth']}, {sizes['steps']} steps, no model",
        f"{'phase':<10}{'mean us':>10}{'median us':>11}" + (f"{'cold us':>10}" if cold else ""),
    ]
    lines += [
        f"{phase:<10}{mean[phase]:>10.1f}{median[phase]:>11.1f}"
        + (f"{cold[phase]:>10.1f}" if cold else "")
        for phase in mean
    ]
    lines.append(f"{'CPU':<10}{figures['cpu_us_per_step']:>10.1f}")
    lines.append(
        f"broadcast {figures['bytes_per_step']:.0f} bytes a step (at most {figures['max_bytes_per_step']}), "
        f"result {figures['result_bytes']:.0f} bytes"
    )
    if sizes["churn"]:
        lines.append(f"beside it, submitting: {figures['submit_us_per_step']:.1f} us a step")
    if "border" in figures:
        border = figures["border"]
        lines.append(
            f"all rows cross a block border at once: {border['us']:.0f} us (at worst {border['worst_us']:.0f}), "
            f"{border['ratio']:.1f} x the mean; of CPU {border['cpu_us']:.0f} us, {border['cpu_ratio']:.1f} x"
        )
    return "\n".join(lines)
