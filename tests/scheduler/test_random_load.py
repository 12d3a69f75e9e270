"""Random load: what must hold after every step, whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rowcast.scheduler.front_messages import FinishCode
from rowcast.scheduler.kv_groups import blocks_needed
from rowcast.tests.scheduler.fakes import Bench, PositionWorker, alone, group, position_model

NUM_STEPS = 2_000


class LoadBench(Bench):
    """Checks the pool after every step and all tables now and then: whole tables of 1,024 rows cost too much."""

    moves = 0

    def check(self) -> None:
        self.moves += 1
        if self.moves % 97 == 0:
            super().check()
            return
        scheduler = self.scheduler
        pool, blocks, table = scheduler.pool, scheduler.blocks, scheduler.table
        held = sum(int(counts.sum()) for counts in blocks.num_blocks)
        assert held + pool.num_free == pool.usable == held + len(np.unique(pool.free_ids()))
        assert (pool.ref_counts >= 0).all()
        assert pool.ref_counts[0] == 0
        assert int(pool.ref_counts.sum()) == held
        for counts, spec in zip(blocks.num_blocks, scheduler.groups, strict=True):
            assert (counts >= blocks_needed(table.num_computed_tokens, spec.block_size)).all()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("max_prompt", "max_output", "max_num_seqs", "usable"),
    [(5000, 500, 256, 9_999), (500, 5000, 1024, 999)],
)
def test_invariants_hold_under_random_load(max_prompt, max_output, max_num_seqs, usable, depth):
    """S-09: each step runs at most the budget, only known requests, and loses no block; tokens are those of alone."""
    rng = np.random.default_rng(42)
    bench = LoadBench(
        usable=usable,
        max_model_len=max_prompt + max_output,
        max_num_seqs=max_num_seqs,
        depth=depth,
        worker=PositionWorker,
        model=position_model,
        eos_token_ids=(3,),
    )
    known: set[int] = set()
    for _ in range(NUM_STEPS):
        if not bench.waiting:
            for _ in range(int(rng.integers(0, 3))):
                bench.add(
                    int(rng.integers(1, max_prompt + 1)),
                    max_tokens=int(rng.integers(1, max_output + 1)),
                    ignore_eos=bool(rng.random() < 0.7),
                )
        while bench.scheduler.num_in_flight < depth:
            ran = bench.issue()
            if ran is None:
                break
            admissions = bench.last_step.admissions
            if admissions is not None:
                known |= {int(request_id[1:]) for request_id in admissions.request_ids}
            assert set(ran) <= known
            assert not set(ran) & set(bench.ends)
        if bench.scheduler.num_in_flight:
            for number, _ in bench.settle():
                assert number in known
        if len(bench.ends) % 50 == 49:
            bench.scheduler.forget(b"front", list(bench.ends))
    if usable == 999:
        assert bench.scheduler.num_preemptions >= 20
    assert len(bench.ends) >= 15
    for number in bench.submits:
        if number not in bench.ends:
            bench.abort(number)
    bench.run()
    bench.check_all_ended()


@st.composite
def request_lists(draw):
    """(prompt length, max_tokens, stop id or none, the step at which it comes, the step at which it is aborted)."""
    one = st.tuples(
        st.integers(1, 30),
        st.integers(1, 20),
        st.none() | st.integers(0, 100),
        st.integers(0, 12),
        st.none() | st.integers(0, 30),
    )
    return draw(st.lists(one, min_size=1, max_size=12))


@given(
    requests=request_lists(),
    depth=st.integers(1, 3),
    usable=st.integers(14, 40),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    block_sizes=st.sampled_from([(4,), (4, 8), (16, 4, 5)]),
    budgets=st.lists(st.none() | st.integers(1, 10), max_size=30),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_everyone_gets_what_he_gets_alone(
    requests, depth, usable, budget, max_num_seqs, block_sizes, budgets
):
    """Random arrivals, aborts, stops, pool sizes, groups, depths and budgets; every invariant after every move."""
    bench = Bench(
        usable=usable,
        groups=tuple(group(size) for size in block_sizes),
        depth=depth,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        eos_token_ids=(3,),
    )
    numbers: dict[int, int] = {}
    for step in range(31):
        for place, (length, max_tokens, stop, comes, aborted) in enumerate(requests):
            if comes == step:
                stops = () if stop is None else (stop,)
                needed = sum(blocks_needed(length + max_tokens - 1, size) for size in block_sizes)
                if needed > usable:
                    with pytest.raises(ValueError, match="pool holds"):
                        bench.add(length, number=place, max_tokens=max_tokens, stop_token_ids=stops)
                else:
                    bench.add(length, number=place, max_tokens=max_tokens, stop_token_ids=stops)
                    numbers[place] = place
            if aborted == step and place in numbers:
                bench.abort(place)
        token_budget = budgets[step] if step < len(budgets) else None
        if token_budget is not None:
            token_budget = min(token_budget, budget)
        while bench.scheduler.num_in_flight < depth and bench.issue(token_budget) is not None:
            pass
        if bench.scheduler.num_in_flight:
            bench.settle()
    bench.run()
    for place, number in numbers.items():
        if requests[place][4] is None:
            assert bench.ends[number] is not FinishCode.ABORT
        else:  # what came before the abort is the beginning of what it gets alone
            outputs, _ = alone(bench.submits[number], bench.scheduler.config)
            got = bench.outputs.get(number, [])
            assert got == outputs[: len(got)]
    bench.check_all_ended()
