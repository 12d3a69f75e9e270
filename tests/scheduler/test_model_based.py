"""Whatever comes, in whatever order: every rule holds after every move, and everyone gets what he gets alone.

hypothesis draws an engine and a list of moves; `play` makes them and checks everything after each. A failure prints
both as literals: they are the small test to keep (see the end of this file).

The suite plays the same few hundred games every time. ROWCAST_MODEL_EXAMPLES=20000 plays that many new ones.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rowcast.scheduler.front_messages import FinishCode
from rowcast.tests.scheduler.fake_forms import form
from rowcast.tests.scheduler.fakes import Bench, group, hash_model

EOS = 3
MAX_MODEL_LEN = 80
NUM_EXAMPLES = int(os.environ.get("ROWCAST_MODEL_EXAMPLES", "0"))
FEW_TOKENS = 13  # the model's alphabet: EOS and stop ids come often, and so do equal blocks


def model(seed: int, tokens: np.ndarray) -> int:
    return hash_model(seed, tokens) % FEW_TOKENS


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the moves meet. groups: (kind, block_size, window)."""

    groups: tuple[tuple[str, int, int], ...] = (("full", 4, 0),)
    usable: int = 20
    depth: int = 1
    max_num_seqs: int = 4
    budget: int = 16
    cap: int = 0
    caching: bool = False
    policy: str = "fcfs"
    slow_forms: bool = False  # one form is compiled a round


@dataclass(frozen=True, kw_only=True)
class Add:
    """Submit a request. Its prompt is `shared` tokens of one of two documents, then `own` tokens of its own."""

    document: int = 0
    shared: int = 0
    own: int = 1
    max_tokens: int | None = 4
    stop: int | None = None
    ignore_eos: bool = False
    salt: str | None = None
    priority: int = 0
    user: str = ""
    form: tuple[int, int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Abort:
    """Abort the which-th of the requests that live."""

    which: int


@dataclass(frozen=True)
class Resubmit:
    """The client of the which-th live request comes again under another number, with the outputs that it has."""

    which: int


@dataclass(frozen=True)
class Issue:
    """Issue a step, unless as many are in flight as may be. budget: this step's alone, or None."""

    budget: int | None = None


@dataclass(frozen=True)
class Settle:
    """Settle the oldest step, if there is one."""


@dataclass(frozen=True)
class Rounds:
    """Issue as many steps as may be and settle one, as the engine's loop does; and that so often."""

    count: int = 1


@dataclass(frozen=True)
class Reset:
    """Empty the prefix cache, if possible or by force."""

    preempt_running: bool


Move = Add | Abort | Resubmit | Issue | Settle | Rounds | Reset


class Game:
    """Plays moves on one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bench = Bench(
            usable=engine.usable,
            groups=tuple(_group(*spec) for spec in engine.groups),
            model=model,
            depth=engine.depth,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.budget,
            long_prefill_token_threshold=engine.cap,
            prefix_caching=engine.caching,
            scheduling_policy=engine.policy,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
        )
        self.bench.grammars.at_once = not engine.slow_forms
        self.aborted: set[int] = set()
        self.salts: dict[int, str | None] = {}
        self.keys: dict[int, int] = {}  # of requests that came again, and of those that they were
        documents = np.random.default_rng(7)
        self.documents = documents.integers(0, FEW_TOKENS, (2, MAX_MODEL_LEN), np.int32)

    def play(self, move: Move) -> None:
        bench = self.bench
        in_flight = bench.scheduler.num_in_flight
        match move:
            case Add():
                self._add(move)
            case Abort(which):
                live = [number for number in bench.submits if number not in bench.ends]
                if live:
                    number = live[which % len(live)]
                    assert bench.abort(number)
                    bench.drain()
                    assert not bench.abort(number)
                    self.aborted.add(number)
            case Resubmit(which):
                live = [number for number in bench.submits if number not in bench.ends]
                if live:
                    self._resubmit(live[which % len(live)])
            case Issue(budget):
                if in_flight < self.engine.depth:
                    bench.issue(None if budget is None else min(budget, self.engine.budget))
            case Settle():
                if in_flight:
                    bench.settle()
            case Rounds(count):
                for _ in range(count):
                    self._round()
            case Reset(preempt_running):
                self._reset(preempt_running)
        self.check_salts()

    def _round(self) -> None:
        bench = self.bench
        bench.grammars.finish(1)
        while bench.scheduler.num_in_flight < self.engine.depth and bench.issue() is not None:
            pass
        if bench.scheduler.num_in_flight:
            bench.settle()

    def _add(self, move: Add) -> None:
        bench, number = self.bench, len(self.salts)
        own = np.random.default_rng(number).integers(0, FEW_TOKENS, move.own, np.int32)
        prompt = np.concatenate((self.documents[move.document, : move.shared], own)).tolist()
        self.salts[number] = move.salt or None
        # Where it has no effect, the door refuses it.
        priority = move.priority if self.engine.policy == "priority" else 0
        end_len = min(MAX_MODEL_LEN, len(prompt) + (move.max_tokens or 1))
        refused = pytest.raises(ValueError, match=r"whole (KV )?pool holds")
        priority = move.priority if self.engine.policy == "priority" else 0
        with refused if end_len > bench.most_tokens else nullcontext():
            bench.add(
                prompt,
                number=number,
                max_tokens=move.max_tokens,
                stop_token_ids=() if move.stop is None else (move.stop,),
                ignore_eos=move.ignore_eos,
                structured_outputs=None if move.form is None else form(*move.form),
                logprobs=move.logprobs,
                prompt_logprobs=move.prompt_logprobs,
                submit={"priority": priority, "user": move.user, "cache_salt": move.salt},
            )

    def _resubmit(self, old: int) -> None:
        """The old number gets nothing more, not even an end; what was in flight for it is sampled again."""
        bench, number = self.bench, len(self.salts)
        before = bench.submits.pop(old)
        got = [*before.output_token_ids.tolist(), *bench.outputs.pop(old, [])]
        self.salts[number] = self.salts[old]
        bench.add(
            before.prompt_token_ids.tolist(),
            number=number,
            outputs=got,
            key=self.keys.setdefault(old, old),
            seed=before.seed,
            max_tokens=before.params.max_tokens,
            stop_token_ids=before.params.stop_token_ids,
            ignore_eos=before.params.ignore_eos,
            structured_outputs=before.params.structured_outputs,
            logprobs=before.params.logprobs,
            prompt_logprobs=before.params.prompt_logprobs,
            submit={
                "priority": before.priority,
                "user": before.user,
                "cache_salt": before.cache_salt,
            },
        )
        self.keys[number] = self.keys[old]
        bench.drain()

    def _reset(self, preempt_running: bool) -> None:
        scheduler = self.bench.scheduler
        waiting = self.bench.waiting
        done = scheduler.reset_prefix_cache(preempt_running=preempt_running)
        if preempt_running:
            assert done
            assert scheduler.num_running == 0
            assert set(waiting) <= set(self.bench.waiting)
        if done:
            assert scheduler.pool.num_free == scheduler.pool.usable
            assert scheduler.cache.num_cached == 0
        self.bench.check()

    def check_salts(self) -> None:
        """H-01, PC-12: whoever shares a block shares the salt and the group; nobody else can have it."""
        scheduler = self.bench.scheduler
        owner: dict[int, tuple[str | None, int, int]] = {}
        for row in np.flatnonzero(scheduler.table.live).tolist():
            salt = self.salts[scheduler.table.occupant(row).number]
            for index, block_ids in enumerate(scheduler.blocks.block_ids):
                for column, block_id in enumerate(block_ids[row].tolist()):
                    if block_id:
                        who = (salt, index, column)
                        assert owner.setdefault(block_id, who) == who, (block_id, who)

    def finish(self) -> None:
        bench = self.bench
        bench.run()
        for number in bench.submits:
            if (
                number in self.aborted
            ):  # what came before the abort is the beginning of what it gets alone
                outputs, _ = bench.alone(number)
                brought = bench.submits[number].output_token_ids.tolist()
                got = brought + bench.outputs.get(number, [])
                assert got == outputs[: len(got)]
                assert bench.ends[number] is FinishCode.ABORT
            else:
                assert bench.ends[number] is not FinishCode.ABORT
        bench.check_all_ended()
        assert bench.scheduler.reset_prefix_cache()
        assert bench.scheduler.cache.num_cached == 0


def _group(kind: str, block_size: int, window: int):
    return group(
        block_size,
        window=window if kind == "sliding" else 0,
        chunk=window if kind == "chunked" else 0,
    )


def play(engine: Engine, moves: list[Move]) -> Bench:
    """Play a whole game to its end."""
    game = Game(engine)
    for move in moves:
        game.play(move)
    game.finish()
    return game.bench


# ---------------------------------------------------------------- the games

# Block sizes that go together: a hit is a multiple of all of them.
SIZES = [(1, 2, 4), (2, 4, 8), (3, 6), (2, 3), (4,), (4,), (8, 16)]


@st.composite
def group_lists(draw) -> tuple[tuple[str, int, int], ...]:
    sizes = st.sampled_from(draw(st.sampled_from(SIZES)))
    full = st.tuples(st.just("full"), sizes, st.just(0))
    windowed = st.tuples(st.sampled_from(["sliding", "chunked"]), sizes, st.integers(1, 24))
    return tuple(draw(st.lists(full | windowed, min_size=1, max_size=4)))


engines = st.builds(
    Engine,
    groups=group_lists(),
    usable=st.integers(10, 30) | st.integers(10, 90),
    depth=st.integers(1, 3),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(4, 60),
    cap=st.sampled_from([0, 0, 1, 3, 8]),
    caching=st.sampled_from([True, True, True, False]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    slow_forms=st.booleans(),
)
adds = st.builds(
    Add,
    document=st.integers(0, 1),
    shared=st.integers(0, 40),
    own=st.integers(1, 9),
    max_tokens=st.integers(1, 20) | st.none(),
    stop=st.none() | st.integers(0, FEW_TOKENS - 1),
    ignore_eos=st.booleans(),
    salt=st.sampled_from([None, None, None, "", "a"]),
    priority=st.integers(-2, 2),
    user=st.sampled_from(["", "u", "v"]),
    form=st.none() | st.none() | st.tuples(st.integers(1, 3), st.integers(1, 12)),
    logprobs=st.sampled_from([None, None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
MOVES = {  # one_of would drop the repeats that weigh a choice
    "add": (5, adds),
    "rounds": (6, st.builds(Rounds, st.integers(1, 8))),
    "issue": (2, st.builds(Issue, st.none() | st.integers(1, 10))),
    "settle": (2, st.builds(Settle)),
    "abort": (1, st.builds(Abort, st.integers(0, 9))),
    "resubmit": (1, st.builds(Resubmit, st.integers(0, 9))),
    "reset": (1, st.builds(Reset, st.booleans())),
}
moves = st.sampled_from(
    [name for name, (weight, _) in MOVES.items() for _ in range(weight)]
).flatmap(lambda name: MOVES[name][1])


@given(
    engine=engines.map(lambda engine: replace(engine, usable=3_000, caching=True)),
    moves=st.lists(adds | MOVES["rounds"][1] | MOVES["settle"][1], min_size=3, max_size=15),
)
@settings(
    max_examples=NUM_EXAMPLES // 4 or 30,
    derandomize=not NUM_EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_what_was_computed_is_found_again(engine, moves):
    """A wrong name is a hit that never comes: nothing was evicted, so whoever repeats a request finds all of it."""
    game = Game(engine)
    for move in moves:
        game.play(move)
    game.bench.run()
    bench, alignment = game.bench, lcm(*(size for _, size, _ in engine.groups))
    for number, submit in list(bench.submits.items()):
        again = [*submit.prompt_token_ids.tolist(), *bench.outputs[number]]
        if len(again) == MAX_MODEL_LEN:
            continue
        repeat = bench.add(
            again,
            number=number + 1_000,
            max_tokens=1,
            submit={"cache_salt": submit.cache_salt},
        )
        bench.run()
        assert bench.cached.get(repeat, 0) == (len(again) - 1) // alignment * alignment


@given(engine=engines, moves=st.lists(moves, min_size=10, max_size=50))
@settings(
    max_examples=NUM_EXAMPLES or 150,
    derandomize=not NUM_EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_every_rule_holds_whatever_comes(engine, moves):
    play(engine, moves)
