"""`rowcast bench control-plane`: what a steady decode step costs beside the model, in time and in bytes.

The real scheduler, the real frames, the real worker tables and input kernels (the Numba twins, one thread), back to
back in one thread; a fake sampler stands where the model would. Before it measures nothing is known to be right, so it
ends with a comparison of both sides' tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ...scheduler.config import SchedulerConfig
from ...scheduler.front_messages import Submit, make_submit_key
from ...scheduler.kv_groups import KVGroupSpec, blocks_needed
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
from ..config import MAX_NUM_SEQS
from .throughput import machine, versions

PHASES = ("schedule", "encode", "decode", "apply", "inputs", "update")
_VOCAB_SIZE = 32_000
_PROMPT_LENS = (64, 128)  # half-open
_PREFILL_TOKENS = 8_192  # a step's, until all decode
_EPOCH = 1
_T = TypeVar("_T")


@dataclass(slots=True)
class _Clock:
    """Nanoseconds by phase, of each step."""

    spent: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in PHASES})
    totals: list[int] = field(default_factory=list)

    def time(self, phase: str, call: Callable[[], _T]) -> _T:
        start = time.perf_counter_ns()
        value = call()
        self.spent[phase].append(time.perf_counter_ns() - start)
        return value

    def microseconds(self, reduce: Callable[[list[int]], Any]) -> dict[str, float]:
        columns = {**self.spent, "total": self.totals}
        return {name: round(float(reduce(spent)) / 1_000, 2) for name, spent in columns.items()}


class ControlPlane:
    """Scheduler and one rank's tables, joined by real frames, with random tokens for a model."""

    def __init__(self, *, rows: int, max_steps: int, block_size: int, kv_groups: int) -> None:
        groups = tuple(
            KVGroupSpec(block_size=block_size, num_kv_heads=1, head_dim=64, layers=(group,))
            for group in range(kv_groups)
        )
        max_model_len = _PROMPT_LENS[1] + max_steps + 1
        max_tokens = max(_PREFILL_TOKENS, rows)
        num_blocks = 1 + rows * kv_groups * blocks_needed(max_model_len, block_size)
        self._scheduler = Scheduler(
            SchedulerConfig(
                vocab_size=_VOCAB_SIZE,
                max_model_len=max_model_len,
                max_num_seqs=rows,
                max_num_batched_tokens=max_tokens,
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
        )
        self._builder = InputBuilder(
            self._state,
            select_backend("cpu", "cpu"),
            max_num_batched_tokens=max_tokens,
            device="cpu",
        )
        self._random = np.random.default_rng(0)
        self._sequence = 0
        self.bytes_sent: list[int] = []
        self.result_bytes: list[int] = []
        low, high = _PROMPT_LENS
        for number, length in enumerate(self._random.integers(low, high, rows).tolist()):
            self._scheduler.add(
                "bench",
                Submit(
                    number=number,
                    submit_key=make_submit_key(bytes(16), number),
                    request_id=f"request-{number}",
                    prompt_token_ids=self._tokens(length),
                    seed=number,
                    params=SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
                ),
            )

    def _tokens(self, count: int) -> np.ndarray:
        return self._random.integers(0, _VOCAB_SIZE, count, np.int32)

    def prefill(self) -> None:
        """Step until every request decodes."""
        while not (
            self._scheduler.num_running == self._state.max_num_seqs
            and (
                self._state.requests.num_tokens - self._state.requests.num_computed_tokens == 1
            ).all()
        ):
            self.step(_Clock())

    def step(self, clock: _Clock) -> None:
        """One step round the whole circle."""
        start = time.perf_counter_ns()
        self._sequence += 1
        step = clock.time("schedule", self._scheduler.schedule)
        assert step is not None
        frame = clock.time(
            "encode", lambda: encode_step(step, epoch=_EPOCH, sequence=self._sequence)
        )
        decoded = clock.time("decode", lambda: decode_frame(frame)).body
        assert isinstance(decoded, SchedulerOutput)
        plan = clock.time("apply", lambda: self._state.apply(decoded))
        clock.time("inputs", lambda: self._builder.build(plan))
        sampler = time.perf_counter_ns()
        tokens = np.where(plan.samples, self._tokens(plan.num_reqs), np.int32(-1))
        sampled = time.perf_counter_ns()

        def update() -> bytes:
            message = encode_result(
                StepResult(tokens=tokens), epoch=_EPOCH, sequence=self._sequence
            )
            self._state.commit(plan, tokens)
            result = decode_report(message).result
            assert result is not None
            self._scheduler.settle(result.tokens)
            return message

        message = clock.time("update", update)
        clock.totals.append(time.perf_counter_ns() - start - (sampled - sampler))
        self.bytes_sent.append(len(frame))
        self.result_bytes.append(len(message))

    def check(self) -> None:
        """Both sides hold the same rows, tokens and blocks: a fast step that got them wrong measures nothing."""
        theirs, ours = self._scheduler.table, self._state.requests
        for name in ("live", "num_tokens", "num_computed_tokens"):
            assert np.array_equal(getattr(theirs, name), getattr(ours, name)), name
        for row, length in enumerate(ours.num_tokens.tolist()):
            assert np.array_equal(theirs.token_ids[row, :length], ours.token_ids[row, :length]), row
        for group, held in enumerate(self._scheduler.blocks.num_blocks):
            assert np.array_equal(held, self._state.block_tables.num_blocks[group]), group


def bench_control_plane(
    rows: int = 1024, steps: int = 64, block_size: int = 16, kv_groups: int = 1, warmup: int = 5
) -> dict[str, Any]:
    """Measure `steps` steady decode steps of `rows` requests, each of 64 to 127 random prompt tokens.

    Returns: us_per_step and us_per_step_median (microseconds by phase: schedule, encode, decode, apply, inputs, update,
        total), bytes_per_step (mean broadcast), max_bytes_per_step, result_bytes, sizes, versions, machine.
    Raises: ValueError for a size below 1 (warmup below 0), or more rows than an engine can have.
    """
    sizes = {"rows": rows, "steps": steps, "block_size": block_size, "kv_groups": kv_groups}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if rows > MAX_NUM_SEQS:
        raise ValueError(f"rows must be at most {MAX_NUM_SEQS}, as max_num_seqs, got {rows}")
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    plane = ControlPlane(
        rows=rows,
        max_steps=steps + warmup + blocks_needed(rows * _PROMPT_LENS[1], _PREFILL_TOKENS),
        block_size=block_size,
        kv_groups=kv_groups,
    )
    plane.prefill()
    for _ in range(warmup):
        plane.step(_Clock())
    plane.bytes_sent.clear()
    plane.result_bytes.clear()
    clock = _Clock()
    for _ in range(steps):
        plane.step(clock)
    plane.check()
    return {
        "us_per_step": clock.microseconds(np.mean),
        "us_per_step_median": clock.microseconds(np.median),
        "bytes_per_step": round(float(np.mean(plane.bytes_sent)), 1),
        "max_bytes_per_step": max(plane.bytes_sent),
        "result_bytes": round(float(np.mean(plane.result_bytes)), 1),
        "sizes": sizes | {"warmup": warmup},
        "versions": versions(),
        "machine": machine(),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for a person, a phase a line."""
    sizes, mean, median = figures["sizes"], figures["us_per_step"], figures["us_per_step_median"]
    lines = [
        f"steady decode, {sizes['rows']} rows, {sizes['kv_groups']} KV group(s) of block size "
        f"{sizes['block_size']}, {sizes['steps']} steps, no model",
        f"{'phase':<10}{'mean us':>10}{'median us':>11}",
    ]
    lines += [f"{phase:<10}{mean[phase]:>10.1f}{median[phase]:>11.1f}" for phase in mean]
    lines.append(
        f"broadcast {figures['bytes_per_step']:.0f} bytes a step (at most {figures['max_bytes_per_step']}), "
        f"result {figures['result_bytes']:.0f} bytes"
    )
    return "\n".join(lines)
