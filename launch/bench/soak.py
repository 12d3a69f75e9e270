"""`rowcast bench soak`: thousands of random steps of the scheduler with every rule checked after every move.

The load is that of vLLM's priority blast test: whenever nobody waits, up to two requests of random length and priority
come. Some share the beginning of their prompt, some are aborted. A fake rank keeps the real tables; its tokens depend
on seed and length alone, so that everyone's outputs are known beforehand.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.config import SchedulerConfig
from ...scheduler.deliveries import Deliveries
from ...scheduler.front_messages import FinishCode, Submit, make_submit_key
from ...scheduler.kv_groups import AttentionKind, KVGroupSpec
from ...scheduler.messages import ProtocolError
from ...scheduler.sampling_params import SamplingParams
from ...scheduler.scheduler import Scheduler
from ...worker.request_states import RequestStates
from .checked_engine import CheckedEngine
from .fake_rank import FakeRank
from .invariants import require

_FRONT = "soak"
_VOCAB_SIZE = 101
_EOS = 3
_NUM_DOCUMENTS = 8  # that prompts begin with
_SHARED = 0.5  # of the prompts
_ABORTED = 0.05  # of the steps abort somebody
_ACKNOWLEDGE_EVERY = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What comes, and what it meets. Units: tokens, rows, blocks."""

    max_prompt: int
    max_output: int
    max_num_seqs: int
    usable: int
    groups: tuple[KVGroupSpec, ...]
    config: dict[str, Any]


def _group(layer: int, block_size: int, kind: AttentionKind, window: int) -> KVGroupSpec:
    return KVGroupSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_dim=64,
        layers=(layer,),
        kind=kind,
        window=window,
    )


_FULL = _group(0, 16, AttentionKind.FULL, 0)
_HYBRID = (
    _FULL,
    _group(1, 16, AttentionKind.SLIDING_WINDOW, 100),
    _group(2, 32, AttentionKind.CHUNKED, 96),
)
# The first two are the peer's; the third is ours: mixed groups, a cap on prompts, and requests that share users.
PROFILES = {
    "prompts": Profile(
        max_prompt=5_000, max_output=500, max_num_seqs=256, usable=9_999, groups=(_FULL,), config={}
    ),
    "outputs": Profile(
        max_prompt=500, max_output=5_000, max_num_seqs=1_024, usable=999, groups=(_FULL,), config={}
    ),
    "hybrid": Profile(
        max_prompt=600,
        max_output=600,
        max_num_seqs=64,
        usable=999,
        groups=_HYBRID,
        config={"max_num_batched_tokens": 512, "long_prefill_token_threshold": 256},
    ),
}


def token_at(seeds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The token of a request of this seed behind this many tokens."""
    return (seeds * 31 + lengths * 17) % 89


def _sample(requests: RequestStates, plan: StepPlan) -> np.ndarray:
    rows = plan.index_mapping
    return token_at(requests.seeds[rows], requests.num_tokens[rows])


class Soak:
    """One engine under random load. Requests are numbered from 0; a request's seed is its number."""

    def __init__(self, profile: Profile, *, prefix_caching: bool, depth: int, seed: int) -> None:
        self._profile = profile
        self._random = np.random.default_rng(seed)
        options = {
            "vocab_size": _VOCAB_SIZE,
            "max_model_len": profile.max_prompt + profile.max_output,
            "max_num_seqs": profile.max_num_seqs,
            "max_num_batched_tokens": 8_192,
            "depth": depth,
            "prefix_caching": prefix_caching,
            "scheduling_policy": "priority",
            "eos_token_ids": (_EOS,),
        }
        scheduler = Scheduler(
            SchedulerConfig(**(options | profile.config)), profile.groups, profile.usable + 1
        )
        self.engine = CheckedEngine(
            scheduler, FakeRank(scheduler, _sample, probes=2), whole_every=16
        )
        self._documents = self._random.integers(
            0, _VOCAB_SIZE, (_NUM_DOCUMENTS, profile.max_prompt), np.int32
        )
        self._expected: dict[int, list[int]] = {}  # outputs of each request, until it has ended
        self._got: dict[int, int] = {}
        self._unacknowledged: list[int] = []
        self.num_requests = 0
        self.num_ended = 0
        self.max_running = 0
        self.num_steps = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def step(self) -> None:
        """Let some come and some go, fill the pipeline, settle one step."""
        scheduler = self.scheduler
        self.num_steps += 1
        if not len(scheduler.waiting):
            for _ in range(int(self._random.integers(0, 3))):
                self._submit()
        if self._expected and self._random.random() < _ABORTED:
            numbers = list(self._expected)
            scheduler.abort(_FRONT, numbers[int(self._random.integers(len(numbers)))])
        while scheduler.num_in_flight < scheduler.config.depth and self.engine.issue() is not None:
            self.max_running = max(self.max_running, scheduler.num_running)
        if scheduler.num_in_flight:
            self._take(self.engine.settle())
        else:
            self._take(scheduler.drain())

    def finish(self) -> None:
        """Abort whoever is left, settle, and see that nothing remains."""
        scheduler = self.scheduler
        for number in list(self._expected):
            scheduler.abort(_FRONT, number)
        while scheduler.num_in_flight or self.engine.issue() is not None:
            self._take(self.engine.settle())
        self._take(scheduler.drain())
        scheduler.forget(_FRONT, self._unacknowledged)
        require(not self._expected, "requests without an end", *list(self._expected)[:4])
        left = {
            "rows": scheduler.num_running,
            "rows at the worker": int(self.engine.rank.state.requests.live.sum()),
            "waiting": len(scheduler.waiting),
            "blocks": scheduler.pool.usable - scheduler.pool.num_free,
            "entries": scheduler.num_remembered,
        }
        require(not any(left.values()), "left when all is over", left)

    def _submit(self) -> None:
        number, random, profile = self.num_requests, self._random, self._profile
        prompt = random.integers(
            0, _VOCAB_SIZE, int(random.integers(1, profile.max_prompt + 1)), np.int32
        )
        if random.random() < _SHARED:
            shared = int(random.integers(1, len(prompt) + 1))
            prompt[:shared] = self._documents[random.integers(_NUM_DOCUMENTS), :shared]
        params = SamplingParams(
            temperature=0,
            max_tokens=int(random.integers(1, profile.max_output + 1)),
            ignore_eos=bool(random.random() < 0.7),
        )
        submit = Submit(
            number=number,
            submit_key=make_submit_key(bytes(16), number),
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            seed=number,
            params=params,
            priority=int(random.integers(-3, 4)),
            cache_salt="salted" if random.random() < 0.1 else None,
        )
        self.scheduler.add(_FRONT, submit)
        self.num_requests += 1
        self._expected[number] = _alone(submit)
        self._got[number] = 0

    def _take(self, deliveries: Deliveries) -> None:
        """Compare what is delivered with what each request gets alone."""
        for number, token, code in zip(
            deliveries.numbers.tolist(),
            deliveries.tokens.tolist(),
            deliveries.finish_codes.tolist(),
            strict=True,
        ):
            require(number in self._expected, "something for a request that has ended", number)
            expected, place = self._expected[number], self._got[number]
            if token >= 0:
                right = expected[place] if place < len(expected) else None
                require(
                    token == right,
                    "a token that the request does not get alone: number, place, token, expected",
                    number, place, token, right,
                )  # fmt: skip
                self._got[number] = place + 1
            last = self._got[number] == len(expected)
            if code in (FinishCode.STOP, FinishCode.LENGTH):
                require(last, "an end too early: number, outputs", number, self._got[number])
            else:
                require(not last or code == FinishCode.ABORT, "no end after the last token", number)
            if code:
                del self._expected[number], self._got[number]
                self.num_ended += 1
                self._unacknowledged.append(number)
        if len(self._unacknowledged) >= _ACKNOWLEDGE_EVERY:
            self.scheduler.forget(_FRONT, self._unacknowledged)
            self._unacknowledged.clear()


def _alone(submit: Submit) -> list[int]:
    """List a request's outputs when nobody else is there."""
    max_tokens = submit.params.max_tokens
    assert max_tokens is not None
    lengths = len(submit.prompt_token_ids) + np.arange(max_tokens)
    outputs = token_at(np.array(submit.seed), lengths).tolist()
    if not submit.params.ignore_eos and _EOS in outputs:
        return outputs[: outputs.index(_EOS) + 1]
    return outputs


def soak(
    profile: str, *, steps: int, prefix_caching: bool, depth: int = 2, seed: int = 42
) -> dict[str, Any]:
    """Run `steps` random steps of one profile; a rule that breaks ends the run and is told, not raised.

    Returns: violations and leaks (0 or 1), the sentence of the first as `violation`, steps, steps_per_s (checks
        included), requests, ended, preemptions, max_running, hit_rate (cached share of the admitted tokens).
    Raises: ValueError for an unknown profile or a number below 1.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    for name, value in (("steps", steps), ("depth", depth)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    run = Soak(PROFILES[profile], prefix_caching=prefix_caching, depth=depth, seed=seed)
    broken = leaked = ""
    start = time.perf_counter()
    try:
        for _ in range(steps):
            run.step()
    except (
        AssertionError,
        ProtocolError,
    ) as error:  # Violation, or an assertion of the scheduler's own
        broken = f"step {run.num_steps}: {type(error).__name__}: {error}"
    else:
        try:
            run.finish()
        except (AssertionError, ProtocolError) as error:
            leaked = f"at the end: {type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    scheduler = run.scheduler
    stats = scheduler.cache.stats
    return {
        "profile": profile,
        "prefix_caching": prefix_caching,
        "depth": depth,
        "steps": run.num_steps,
        "violations": int(bool(broken)),
        "leaks": int(bool(leaked)),
        "violation": broken or leaked,
        "steps_per_s": round(run.num_steps / seconds, 1),
        "requests": run.num_requests,
        "ended": run.num_ended,
        "preemptions": scheduler.num_preemptions,
        "max_running": run.max_running,
        "hit_rate": round(stats.hits / max(stats.queries, 1), 4),
    }


def sentence(figures: dict[str, Any]) -> str:
    """One run's figures for a person."""
    found = figures["violation"] or "no violation, nothing left"
    cache = f"prefix cache on (hit rate {figures['hit_rate']:.1%})"
    return (
        f"{figures['profile']}, {cache if figures['prefix_caching'] else 'prefix cache off'}: "
        f"{figures['steps']} steps, {figures['steps_per_s']:.0f} a second with all checks, "
        f"{figures['ended']} requests, at most {figures['max_running']} at once, "
        f"{figures['preemptions']} preemptions: {found}"
    )
