"""`rowcast bench kv-memory`: how much of the KV pool holds tokens when the engine is full.

The scheduler alone, with random tokens for a model. Two questions:
- saturated, one group of full attention: in the steps in which somebody was refused for want of blocks, what share of
  the pool was held, and how many blocks of it held no token;
- Gemma-3-270m's six groups: how many blocks a long request needs, beside what full attention everywhere would.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.config import SchedulerConfig
from ...scheduler.front_messages import Submit, make_submit_key
from ...scheduler.kv_groups import AttentionKind, KVGroupSpec, blocks_needed
from ...scheduler.sampling_params import SamplingParams
from ...scheduler.scheduler import Scheduler
from ...worker.request_states import RequestStates
from .checked_engine import CheckedEngine
from .fake_rank import FakeRank
from .throughput import machine, versions

POOL_BLOCKS = 4_096
GEMMA_TOKENS = 8_192
GEMMA_WINDOW = 512
_PROMPT_LENS = (64, 512)  # both included
_OUTPUT_LENS = (64, 256)
_VOCAB_SIZE = 32_000
_MAX_NUM_SEQS = 1_024
_MAX_NUM_BATCHED_TOKENS = 2_048
_QUEUED = 16  # that wait at least: saturated
_MEAN_PROMPT_LEN, _MEAN_OUTPUT_LEN = sum(_PROMPT_LENS) / 2, sum(_OUTPUT_LENS) / 2
# A step's tokens serve no more: each decodes one, and every _MEAN_OUTPUT_LEN steps another's prompt takes its place.
_MOST_RUNNING = int(_MAX_NUM_BATCHED_TOKENS / (1 + _MEAN_PROMPT_LEN / _MEAN_OUTPUT_LEN))
_FRONT = "bench"


def attention_group(layer: int, block_size: int, window: int = 0) -> KVGroupSpec:
    """Describe a group of full attention, or with a sliding window of that many tokens."""
    return KVGroupSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_dim=256,
        layers=(layer,),
        kind=AttentionKind.SLIDING_WINDOW if window else AttentionKind.FULL,
        window=window,
    )


def gemma_groups(block_size: int, num_groups: int = 6) -> tuple[KVGroupSpec, ...]:
    """Gemma-3-270m's 18 layers as groups of three: one with full attention, the others with a window of 512."""
    return tuple(
        attention_group(group, block_size, GEMMA_WINDOW if group else 0)
        for group in range(num_groups)
    )


class _Load:
    """A checked engine at the depth of a served one, and random requests for it."""

    def __init__(
        self, groups: tuple[KVGroupSpec, ...], *, num_blocks: int, max_model_len: int, seed: int
    ) -> None:
        config = SchedulerConfig(
            vocab_size=_VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        )
        self.random = np.random.default_rng(seed)
        self.scheduler = Scheduler(config, groups, num_blocks)
        rank = FakeRank(self.scheduler, self._sample, probes=1)
        self.engine = CheckedEngine(self.scheduler, rank, whole_every=64)
        self._count = 0

    def _sample(self, requests: RequestStates, plan: StepPlan) -> np.ndarray:
        return self._tokens(plan.num_reqs)

    def _tokens(self, count: int) -> np.ndarray:
        return self.random.integers(0, _VOCAB_SIZE, count, np.int32)

    def submit(self, prompt_len: int, output_len: int) -> None:
        self.scheduler.add(
            _FRONT,
            Submit(
                number=self._count,
                submit_key=make_submit_key(bytes(16), self._count),
                request_id=f"request-{self._count}",
                prompt_token_ids=self._tokens(prompt_len),
                seed=self._count,
                params=SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True),
            ),
        )
        self._count += 1

    def settle(self) -> None:
        ended = self.engine.settle()
        numbers = ended.numbers[ended.finish_codes != 0]
        self.scheduler.forget(_FRONT, numbers.tolist())

    @property
    def num_held(self) -> int:
        """Count the blocks that somebody references."""
        return self.scheduler.pool.usable - self.scheduler.pool.num_free


def _waste(scheduler: Scheduler) -> np.ndarray:
    """Count the blocks that each running request holds beyond its computed tokens, in blocks, per KV group."""
    table = scheduler.table
    rows = np.flatnonzero(table.live)
    wasted = []
    for spec, block_ids in zip(scheduler.groups, scheduler.blocks.block_ids, strict=True):
        held = np.count_nonzero(block_ids[rows], axis=1)
        wasted.append(held - table.num_computed_tokens[rows] / spec.block_size)
    return np.concatenate(wasted)


def measure_saturation(
    *, num_blocks: int = POOL_BLOCKS, block_size: int = 16, steps: int = 1_000, seed: int = 0
) -> dict[str, Any]:
    """Run until `steps` steps refused an admission for want of blocks, and look at the pool in each of them.

    Such a step leaves somebody waiting although rows and token budget are left.
    Returns: pool_in_use (share of the usable blocks that are referenced) and waste (blocks a request and group that
        hold no token), mean and worst; running, mean; preemptions; steps.
    """
    low, high = _OUTPUT_LENS
    load = _Load(
        (attention_group(0, block_size),),
        num_blocks=num_blocks,
        max_model_len=_PROMPT_LENS[1] + high,
        seed=seed,
    )
    scheduler, config = load.scheduler, load.scheduler.config
    in_use, waste, running = [], [], []
    num_steps = 0
    while len(in_use) < steps:
        while len(scheduler.waiting) < _QUEUED:
            prompt_len = int(load.random.integers(_PROMPT_LENS[0], _PROMPT_LENS[1] + 1))
            load.submit(prompt_len, int(load.random.integers(low, high + 1)))
        while scheduler.num_in_flight < config.depth:
            issued = load.engine.issue()
            if issued is None:
                break
            num_steps += 1
            refused = (
                len(scheduler.waiting)
                and scheduler.num_running < config.max_num_seqs
                and issued.num_tokens < config.max_num_batched_tokens
            )
            if refused:
                in_use.append(load.num_held / scheduler.pool.usable)
                waste.append(_waste(scheduler))
                running.append(scheduler.num_running)
        load.settle()
        if num_steps > 20 * steps:
            raise ValueError(
                f"only {len(in_use)} of {num_steps} steps refused anybody for want of blocks: the pool does not get "
                f"full; lower pool_blocks, got {num_blocks}, or block_size, got {block_size}"
            )
    wasted = np.concatenate(waste)
    return {
        "refused_steps": len(in_use),
        "steps": num_steps,
        "pool_in_use": {
            "mean": round(float(np.mean(in_use)), 5),
            "min": round(float(np.min(in_use)), 5),
        },
        "waste_blocks_per_request_and_group": {
            "mean": round(float(wasted.mean()), 4),
            "max": round(float(wasted.max()), 4),
        },
        "running_mean": round(float(np.mean(running)), 1),
        "preemptions": scheduler.num_preemptions,
    }


def measure_long_request(
    groups: tuple[KVGroupSpec, ...],
    *,
    num_tokens: int = GEMMA_TOKENS,
    num_blocks: int = POOL_BLOCKS,
) -> dict[str, int]:
    """Prefill one prompt, settle it, and count the blocks that it holds: at the end, and at most on the way."""
    load = _Load(groups, num_blocks=num_blocks, max_model_len=num_tokens + 8, seed=0)
    load.submit(num_tokens, 8)
    most = 0
    while True:
        issued = load.engine.issue()
        assert issued is not None, "the prompt is left and nothing runs"
        most = max(most, load.num_held)
        load.settle()
        if issued.plan.samples.all():
            return {"settled": load.num_held, "most": most}


def bench_kv_memory(
    *, num_blocks: int = POOL_BLOCKS, block_size: int = 16, steps: int = 1_000, seed: int = 0
) -> dict[str, Any]:
    """Both measurements. num_blocks counts the null block.

    Raises: ValueError for a number that is too small to measure anything, and for a pool that never gets full.
    """
    for name, value, least in (("steps", steps, 1), ("block_size", block_size, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    longest = _PROMPT_LENS[1] + _OUTPUT_LENS[1]
    needed = max(1 + blocks_needed(longest, block_size), 2)
    if num_blocks < needed:
        raise ValueError(
            f"pool_blocks must be at least {needed}, so that a request of {longest} tokens fits, got {num_blocks}"
        )
    most = _MOST_RUNNING * blocks_needed(int(_MEAN_PROMPT_LEN), block_size)
    if num_blocks > most:
        raise ValueError(
            f"pool_blocks must be at most {most} with block_size {block_size}, so that the pool gets full, "
            f"got {num_blocks}"
        )
    hybrid = gemma_groups(block_size)
    full = tuple(attention_group(group, block_size) for group in range(len(hybrid)))
    roomy = 1 + len(full) * blocks_needed(GEMMA_TOKENS + 8, block_size)
    blocks = measure_long_request(hybrid, num_blocks=roomy)
    all_full = measure_long_request(full, num_blocks=roomy)
    return {
        "saturated": measure_saturation(
            num_blocks=num_blocks, block_size=block_size, steps=steps, seed=seed
        ),
        "gemma_3_270m": {
            "tokens": GEMMA_TOKENS,
            "blocks": blocks["settled"],
            "most_blocks": blocks["most"],
            "all_full_blocks": all_full["settled"],
            "share": round(blocks["settled"] / all_full["settled"], 4),
        },
        "sizes": {"num_blocks": num_blocks, "block_size": block_size, "seed": seed},
        "versions": versions(),
        "machine": machine(),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    saturated, gemma = figures["saturated"], figures["gemma_3_270m"]
    in_use, waste = saturated["pool_in_use"], saturated["waste_blocks_per_request_and_group"]
    return "\n".join(
        (
            f"saturated: {figures['sizes']['num_blocks']} blocks of {figures['sizes']['block_size']} tokens, prompts "
            f"{_PROMPT_LENS[0]} to {_PROMPT_LENS[1]}, outputs {_OUTPUT_LENS[0]} to {_OUTPUT_LENS[1]}, "
            f"{saturated['running_mean']:.0f} requests running",
            f"  in {saturated['refused_steps']} steps that refused an admission: {in_use['mean']:.2%} of the pool in "
            f"use (at least {in_use['min']:.2%}), {waste['mean']:.2f} blocks wasted a request and group "
            f"(at most {waste['max']:.2f}), {saturated['preemptions']} preemptions",
            f"Gemma-3-270m, one request of {gemma['tokens']} tokens, prefill settled: {gemma['blocks']} blocks, "
            f"{gemma['share']:.1%} of the {gemma['all_full_blocks']} of full attention everywhere",
        )
    )
