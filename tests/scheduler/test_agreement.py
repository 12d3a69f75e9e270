"""The rules that both sides share: who runs by default, batch order, block growth."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.agreement import (
    Batch,
    batch_order,
    derive_growth,
    plan_step,
    scheduled_tokens,
)
from rowcast.scheduler.kv_groups import KVGroupSpec, agree_on_groups, blocks_needed

NONE = np.empty(0, np.int32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def lengths(rows: dict[int, tuple[int, int]], max_num_seqs: int = 8) -> SimpleNamespace:
    """A table from {row: (num_tokens, num_computed_tokens)}."""
    table = SimpleNamespace(
        live=np.zeros(max_num_seqs, bool),
        num_tokens=np.zeros(max_num_seqs, np.int32),
        num_computed_tokens=np.zeros(max_num_seqs, np.int32),
    )
    for row, (num_tokens, num_computed) in rows.items():
        table.live[row] = True
        table.num_tokens[row] = num_tokens
        table.num_computed_tokens[row] = num_computed
    return table


def test_worked_example_order_and_growth():
    """DESIGN.md section 1: one token of row 7, eight of row 6; neither holds too few blocks."""
    table = lengths({7: (32, 31), 6: (40, 16)})
    plan = plan_step(table, i32(6), i32(8), NONE)
    assert plan.index_mapping.tolist() == [7, 6]
    assert plan.num_scheduled_tokens.tolist() == [1, 8]
    assert plan.num_computed_tokens.tolist() == [31, 16]
    assert plan.samples.tolist() == [True, False]
    assert plan.batch.query_start_loc.tolist() == [0, 1, 9]
    rows, counts = derive_growth(plan, i32(0, 0, 0, 0, 0, 0, 2, 2), 16)
    assert rows.tolist() == counts.tolist() == []


def test_growth_is_in_row_order_though_the_batch_is_not():
    """The ids travel without rows: two sides that walk the rows differently would swap blocks."""
    table = lengths({7: (33, 32), 6: (60, 16), 2: (16, 0)})
    plan = plan_step(table, i32(6, 2), i32(40, 16), NONE)
    assert plan.index_mapping.tolist() == [7, 2, 6]
    rows, counts = derive_growth(plan, i32(0, 0, 0, 0, 0, 0, 1, 2), 16)
    assert rows.tolist() == [2, 6, 7]
    assert counts.tolist() == [1, blocks_needed(16 + 40, 16) - 1, 1]


def test_growth_at_the_border_of_a_block():
    """Off by one here and a token is written to a block that its row does not hold."""
    held = i32(2)
    for computed, grows in ((30, False), (31, False), (32, True), (33, True)):
        plan = plan_step(lengths({0: (computed + 1, computed)}, 1), NONE, NONE, NONE)
        assert (len(derive_growth(plan, held, 16)[0]) == 1) is grows, computed


def test_a_row_with_one_uncomputed_token_runs_it_unless_paused():
    """The default that costs no bytes, and its exceptions."""
    table = lengths({0: (5, 4), 1: (5, 4), 2: (9, 0), 3: (9, 0), 4: (1, 0)})
    scheduled = scheduled_tokens(table, i32(3), i32(9), i32(1))
    assert scheduled.tolist() == [1, 0, 0, 9, 1, 0, 0, 0]


def test_order_is_fewest_tokens_then_context_then_row():
    """W-13: a fresh one-token prompt among decodes must come after those that have context."""
    scheduled = i32(1, 5, 1, 5, 1, 0)
    computed = i32(0, 0, 7, 3, 9, 4)
    assert batch_order(scheduled, computed).tolist() == [2, 4, 0, 3, 1]


def test_a_step_without_tokens_is_an_empty_plan():
    plan = plan_step(lengths({3: (9, 4)}), NONE, NONE, NONE)
    assert plan.num_reqs == 0
    assert plan.batch.query_start_loc.tolist() == [0]
    assert derive_growth(plan, np.zeros(8, np.int32), 16)[0].tolist() == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20))
@settings(deadline=None)
def test_order_is_that_of_the_rule_said_in_words(rows):
    """The vectorised keys against the sentence in DESIGN.md."""
    scheduled = np.array([count for count, _ in rows], np.int32)
    computed = np.array([computed for _, computed in rows], np.int32)
    expected = sorted(
        (row for row, (count, _) in enumerate(rows) if count),
        key=lambda row: (rows[row][0], rows[row][1] == 0, row),
    )
    assert batch_order(scheduled, computed).tolist() == expected


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 2)), max_size=12),
    st.booleans(),
    st.lists(st.integers(1, 3), max_size=4),
)
@settings(deadline=None)
def test_the_short_paths_give_the_plan_of_the_general_one(rows, pause, runs):
    """Several ways to the same plan: were they to differ, sides that took different ones would."""
    made = {
        row: (computed + 1 + more, computed)
        for row, (live, computed, more) in enumerate(rows)
        if live
    }
    table = lengths(made, max(len(rows), 1))
    default = [row for row, (num_tokens, computed) in made.items() if num_tokens - computed == 1]
    paused = i32(*default[:1]) if pause else NONE
    left = {row: num_tokens - computed for row, (num_tokens, computed) in made.items()}
    prompts = [row for row in reversed(left) if left[row] > 1][: len(runs)]
    exceptions = (
        i32(*prompts),
        i32(*(min(left[row], n) for row, n in zip(prompts, runs, strict=False))),
        paused,
    )
    plan = plan_step(table, *exceptions)
    scheduled = scheduled_tokens(table, *exceptions)
    expected = batch_order(scheduled, table.num_computed_tokens)
    np.testing.assert_array_equal(plan.index_mapping, expected, strict=True)
    np.testing.assert_array_equal(plan.num_scheduled_tokens, scheduled[expected], strict=True)
    np.testing.assert_array_equal(
        plan.num_computed_tokens, table.num_computed_tokens[expected], strict=True
    )
    computed = table.num_computed_tokens[expected] + scheduled[expected]
    np.testing.assert_array_equal(plan.samples, computed == table.num_tokens[expected], strict=True)
    assert plan.batch.query_start_loc.tolist() == [0, *np.cumsum(scheduled[expected])]


def test_the_rows_that_open_a_block_take_turns():
    """The docstring's example; and block size 1, where everyone opens one in every step."""
    ones = np.ones(3, np.int32)
    batch = Batch(i32(2, 3, 7), ones, ones.astype(bool), steady_seq_lens=i32(33, 48, 34))
    opening = {age: batch.opening(16, age).tolist() for age in range(17)}
    assert {age: rows for age, rows in opening.items() if rows} == {
        0: [0],
        1: [1],
        15: [2],
        16: [0],
    }
    assert batch.opening(1, 5).tolist() == [0, 1, 2]


@given(
    rows=st.dictionaries(st.integers(0, 7), st.integers(1, 60), min_size=1),
    block_size=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_a_steady_batch_that_lasts_is_what_each_step_would_derive_anew(rows, block_size):
    """Derived from the step before, also who grows: off by one step, both sides would agree on the wrong rows."""
    table = lengths({row: (computed + 1, computed) for row, computed in rows.items()})
    held = blocks_needed(table.num_computed_tokens, block_size)
    plan = None
    for age in range(45):
        anew = plan_step(table, NONE, NONE, NONE)
        plan = plan_step(table, NONE, NONE, NONE, plan)
        assert plan.age == age
        for name in ("index_mapping", "num_computed_tokens", "seq_lens", "samples", "max_seq_len"):
            assert np.array_equal(getattr(plan, name), getattr(anew, name)), name
        grown, expected = (
            derive_growth(plan, held, block_size),
            derive_growth(anew, held, block_size),
        )
        assert [column.tolist() for column in grown] == [column.tolist() for column in expected]
        held[grown[0]] += grown[1]
        column = np.arange(8)
        assert column[plan.batch.places].tolist() == sorted(rows)
        table.num_computed_tokens[plan.batch.rows] += 1
        table.num_tokens[plan.batch.rows] += 1


def test_the_rank_with_the_fewest_blocks_decides():
    """T06, H-14: rank 0 sized 2,111 blocks and sent ids that rank 1, with 2,055, does not have."""
    spec = KVGroupSpec(block_size=16, num_kv_heads=2, head_dim=8, layers=(0, 1))
    groups, num_blocks = agree_on_groups([[spec], [spec]], [2111, 2055])
    assert (groups, num_blocks) == ((spec,), 2055)


def test_ranks_with_different_groups_are_refused_by_name():
    one = KVGroupSpec(block_size=16, num_kv_heads=2, head_dim=8, layers=(0, 1))
    other = KVGroupSpec(block_size=8, num_kv_heads=2, head_dim=8, layers=(0, 1))
    with pytest.raises(ValueError, match="rank 1 describes"):
        agree_on_groups([[one], [other]], [10, 10])
    with pytest.raises(ValueError, match="rank 1 has memory for 1 KV blocks"):
        agree_on_groups([[one], [one]], [10, 1])
