"""The worker's state: a step is checked whole, then applied; tokens are committed; rows are reused cleanly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rowcast.scheduler.kv_groups import AttentionKind
from rowcast.scheduler.messages import Features, ProtocolError
from rowcast.tests.worker.steps import (
    admissions,
    digest,
    i32,
    make_state,
    request,
    row_arrays,
    step,
)
from rowcast.tests.worker.toy_scheduler import ToyRow, ToyScheduler, churned
from rowcast.worker.request_states import RequestStates
from rowcast.worker.state import WorkerState

A, B = list(range(100, 140)), list(range(200, 205))


def slots(state: WorkerState, row: int, first: int, last: int, block_size: int = 16) -> list[int]:
    table = state.block_tables.table[0][row]
    return [
        int(table[position // block_size]) * block_size + position % block_size
        for position in range(first, last)
    ]


# ------------------------------------------------------------ a row's life


def test_a_row_lives_from_admission_to_free():
    """W-01: unscheduled rows keep their state, and leave others alone."""
    state = make_state()
    plan = state.apply(step(request(0, [1, 2, 3]), run={0: 3}, grow=[[5]]))
    assert plan.index_mapping.tolist() == [0]
    assert state.block_tables.table[0][0].tolist() == [5, 0, 0, 0]
    state.commit(plan, i32(77))
    assert state.requests.token_ids[0, :5].tolist() == [1, 2, 3, 77, 0]
    assert (state.requests.num_tokens[0], state.requests.num_computed_tokens[0]) == (4, 3)

    plan = state.apply(step(request(1, [8, 9]), pause=[0]))  # admitted, and nothing runs
    assert plan.num_reqs == 0
    state.commit(plan, i32())
    assert state.requests.live[:2].all()
    assert state.requests.num_tokens[:2].tolist() == [4, 2]

    plan = state.apply(step(run={1: 2}, grow=[[6]]))  # row 0 runs unasked: one uncomputed token
    assert plan.index_mapping.tolist() == [0, 1]
    assert plan.num_scheduled_tokens.tolist() == [1, 2]
    assert plan.num_computed_tokens.tolist() == [3, 0]
    state.commit(plan, i32(78, 10))
    assert state.requests.token_ids[0, :6].tolist() == [1, 2, 3, 77, 78, 0]
    assert state.requests.token_ids[1, :4].tolist() == [8, 9, 10, 0]

    plan = state.apply(step(free=[0]))
    assert plan.index_mapping.tolist() == [1]
    assert not state.requests.live[0]
    assert state.requests.request_ids[:2] == [None, "request-1"]
    assert state.block_tables.num_blocks[0][:2].tolist() == [0, 1]


def test_a_prompt_of_one_token_runs_unasked():
    state = make_state()
    plan = state.apply(step(request(3, [7]), grow=[[1]]))
    assert plan.index_mapping.tolist() == [3]
    assert plan.samples.tolist() == [True]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing():
    """W-09: chunk (48, 7) of an 80-token prompt leaves last token and length as they were."""
    state = make_state(max_model_len=96)
    blocks = [1, 2, 3, 4]
    plan = state.apply(step(request(1, range(80), blocks, cached=48), run={1: 7}))
    assert plan.samples.tolist() == [False]
    assert state.requests.num_computed_tokens[1] == 48
    state.commit(plan, i32(-1))
    assert state.requests.num_tokens[1] == 80
    assert state.requests.num_computed_tokens[1] == 48 + 7
    assert state.requests.token_ids[1, :81].tolist() == [*range(80), 0]


def test_a_reused_row_holds_only_its_new_request():
    """W01: A leaves and B takes its row in the same message."""
    state = make_state(max_model_len=80)
    state.apply(
        step(request(3, [*A, *range(21)], [11, 12, 13, 14], cached=60, prompt=40,
                     temperature=1.5, top_k=1, seed=42), pause=[3])
    )  # fmt: skip
    plan = state.apply(step(request(3, B, [20]), free=[3], run={3: 5}))
    assert slots(state, 3, 0, 5) == [320, 321, 322, 323, 324]
    assert plan.num_computed_tokens.tolist() == [0]
    state.commit(plan, i32(9))
    assert state.requests.num_computed_tokens[3] == 5
    assert state.block_tables.table[0][3].tolist() == [20, 0, 0, 0, 0]
    assert state.block_tables.num_blocks[0][3] == 1
    assert state.requests.temperature[3] == 0


def test_whatever_a_row_held_an_admission_replaces_it():
    """W-07, W01, by looking at every per-row array there is: a field that is added later cannot be forgotten."""
    admitted = step(
        request(3, B, [20], [21], cached=2, prompt=4, temperature=0.5, top_p=0.5, top_k=7, seed=9),
        run={3: 3},
        grow=[[], []],
    )
    dirty, fresh = make_state(16, 8), make_state(16, 8)
    for array in row_arrays(dirty).values():
        array[3] = True if array.dtype == bool else 77
    dirty.requests.live[3] = False
    dirty.requests.request_ids[3] = "someone else"
    for state in (dirty, fresh):
        state.apply(admitted)
    for name, array in row_arrays(fresh).items():
        assert np.array_equal(row_arrays(dirty)[name], array), name
    assert dirty.requests.request_ids == fresh.requests.request_ids


def test_free_leaves_every_array_as_it_was_before_the_request():
    state = make_state(16, 8)
    before = digest(state)
    state.apply(step(request(3, B, [20], [21], temperature=1, seed=5), run={3: 5}, grow=[[], []]))
    assert digest(state) != before
    state.apply(step(free=[3], grow=[[], []]))
    assert digest(state) == before


@pytest.mark.parametrize("row", [2, 5])
def test_a_resumed_request_brings_its_whole_history(row: int):
    """W02: resume replaces the blocks and tokens, in its old row or another; only growth appends."""
    state = make_state(num_blocks=50)
    history = [*range(36), 901, 902, 903, 904]
    plan = state.apply(step(request(2, history[:36], [3, 4, 5]), run={2: 36}))
    for token in history[36:]:
        state.commit(plan, i32(token))
        plan = state.apply(step())
    state.apply(step(free=[2]))  # preempted

    plan = state.apply(step(request(row, history, [9, 10, 11], prompt=36), run={row: 32}))
    assert state.block_tables.table[0][row].tolist() == [9, 10, 11, 0]
    assert slots(state, row, 17, 18) == [10 * 16 + 1]
    assert state.requests.token_ids[row, :32].tolist() == history[:32]
    assert plan.samples.tolist() == [False]
    state.commit(plan, i32(-1))
    plan = state.apply(step(run={row: 8}))
    assert plan.num_computed_tokens.tolist() == [32]
    assert state.requests.token_ids[row, 32:40].tolist() == history[32:]
    assert plan.samples.tolist() == [True]
    state.commit(plan, i32(905))
    for token in range(8):  # tokens 41 to 48 fill block 11
        state.commit(state.apply(step()), i32(token))
    state.apply(step(grow=[[12]]))
    assert state.block_tables.table[0][row].tolist() == [9, 10, 11, 12]


def test_a_resume_with_a_prefix_hit_starts_behind_it():
    """W02: the hit's block comes first, and the first token computed lies in the next one."""
    state = make_state()
    plan = state.apply(step(request(2, range(40), [3, 9, 10], cached=16), run={2: 24}))
    assert plan.num_computed_tokens.tolist() == [16]
    assert state.requests.num_computed_tokens[2] == 16  # what the inputs' positions are built from
    assert slots(state, 2, 16, 17) == [9 * 16]


def test_rows_are_freed_before_others_are_admitted():
    """W-15: all rows taken, one ends, one starts in its place."""
    state = make_state(max_num_seqs=2)
    state.apply(step(request(0, [1]), request(1, [2]), grow=[[1, 2]]))
    state.apply(step(request(0, [3], request_id="next"), free=[0], grow=[[1]]))
    assert state.requests.request_ids == ["next", "request-1"]


def test_state_is_read_by_row_and_not_by_place_in_the_batch():
    """W-10: row 0 is in prefill, rows 1 and 2 decode; batch place 0 is not row 0."""
    state = make_state()
    prefill = request(0, range(40), [1], cached=8)
    decodes = [request(1, range(11), [4], cached=10), request(2, range(21), [5, 6], cached=20)]
    state.apply(step(prefill, *decodes, pause=[1, 2]))
    pure = state.apply(step())
    assert pure.index_mapping.tolist() == [1, 2]
    assert pure.num_computed_tokens.tolist() == [10, 20]
    state.commit(pure, i32(501, 502))
    mixed = state.apply(step(run={0: 8}))
    assert mixed.index_mapping.tolist() == [1, 2, 0]
    state.commit(mixed, i32(601, 602, -1))
    assert state.requests.token_ids[1, 10:13].tolist() == [10, 501, 601]
    assert state.requests.token_ids[2, 20:23].tolist() == [20, 502, 602]
    assert state.requests.num_computed_tokens[:3].tolist() == [16, 12, 22]


def test_rows_that_grow_are_derived_and_take_their_ids_in_row_order():
    """Batch order is by length, growth by row: mixing the two gives each request another's blocks."""
    state = make_state(16, 8, max_num_seqs=4)
    plan = state.apply(
        step(request(3, [1]), request(1, range(20)), run={1: 20}, grow=[[7, 8, 9], [2, 3, 4, 5]])
    )
    assert plan.index_mapping.tolist() == [3, 1]
    assert state.block_tables.table[0][1, :3].tolist() == [7, 8, 0]
    assert state.block_tables.table[0][3, :2].tolist() == [9, 0]
    assert state.block_tables.table[1][1, :4].tolist() == [2, 3, 4, 0]
    assert state.block_tables.table[1][3, :2].tolist() == [5, 0]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_leaves_what_plain_lists_hold(seed: int):
    """W-08: random admissions, chunks, pauses and frees; after each step every cell against a second implementation."""
    toy, state = churned(seed, 0)
    for _ in range(100):
        plan = state.apply(toy.next_step())
        assert list(zip(plan.index_mapping, plan.num_scheduled_tokens, strict=True)) == toy.order
        state.commit(plan, toy.settle())
        requests = state.requests
        assert np.flatnonzero(requests.live).tolist() == sorted(toy.rows)
        for row in range(state.max_num_seqs):
            held = toy.rows.get(row) or ToyRow(None, [], 0, 0, [[], []], 0)
            assert requests.request_ids[row] == held.request_id
            assert requests.num_tokens[row] == len(held.tokens)
            assert requests.num_prompt_tokens[row] == held.num_prompt
            assert requests.num_computed_tokens[row] == held.computed
            assert requests.seeds[row] == held.seed
            _assert_asks(requests, row, held)
            assert requests.token_ids[row].tolist() == padded(held.tokens, state.max_model_len)
            for group, width in enumerate(state.block_tables.max_blocks):
                assert state.block_tables.num_blocks[group][row] == len(held.blocks[group])
                table = state.block_tables.table[group][row].tolist()
                assert table == padded(held.blocks[group], width)


def _assert_asks(requests: RequestStates, row: int, held: ToyRow) -> None:
    """A row has what its request asked for and the defaults for the rest; a free one has nothing."""
    live = held.request_id is not None
    for name, default in (
        ("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("presence_penalty", 0),
        ("frequency_penalty", 0), ("repetition_penalty", 1),
    ):  # fmt: skip
        value = held.asked.get(name, default) if live else 0
        assert getattr(requests, name)[row] == np.float32(value), name
    features = held.asked.get("features")
    assert requests.features.get(row) == features
    asks = features is not None and features.asks
    assert requests.asking.get(row) == (features if asks else None)
    assert requests.feature_checksums[row] == (0 if features is None else features.checksum)
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert (row in requests.penalized) == bool(penalties & held.asked.keys())


def padded(numbers: list[int], width: int) -> list[int]:
    return numbers + [0] * (width - len(numbers))


# ------------------------------------------------------------ what is refused

WRONG_STEPS = {
    "freed row out of range": (step(free=[8]), r"freed_rows: rows are \[0, 8\), got 8"),
    "freed row negative": (step(free=[-1]), r"freed_rows: rows are \[0, 8\), got -1"),
    "freed row is free": (step(free=[5]), "row 5 must be live"),
    "row freed twice": (step(free=[1, 1]), "row 1 is named 2 times"),
    "admission out of range": (step(request(9, [1])), r"rows are \[0, 8\), got 9"),
    "admission into a live row": (
        step(request(1, [1], request_id="new")),
        "request 'new': row 1 must be free, it holds request 'request-1'",
    ),
    "two admissions into one row": (step(request(4, [1]), request(4, [2])), "row 4 is named 2"),
    "no tokens": (step(request(4, [], prompt=1)), r"num_tokens must be in \[1, 64\], got 0"),
    "too many tokens": (step(request(4, range(65))), r"num_tokens must be in \[1, 64\], got 65"),
    "prompt longer than the tokens": (step(request(4, [1], prompt=2)), "num_prompt_tokens"),
    "no prompt": (step(request(4, [1], prompt=0)), "num_prompt_tokens"),
    "all tokens cached": (
        step(request(4, [1, 2], [9], cached=2)),
        r"num_cached_tokens must be in \[0, num_tokens\), got 2",
    ),
    "token above the vocabulary": (step(request(4, [1, 1000])), r"\[0, 1000\), got 1000"),
    "token negative": (step(request(4, [-1])), r"\[0, 1000\), got -1"),
    "seed negative": (step(request(4, [1], seed=-1)), "seed must be"),
    "temperature NaN": (step(request(4, [1], temperature=np.nan)), "temperature.*got nan"),
    "temperature infinite": (step(request(4, [1], temperature=np.inf)), "temperature.*got inf"),
    "top_p zero": (step(request(4, [1], top_p=0)), "top_p must be"),
    "top_p NaN": (step(request(4, [1], top_p=np.nan)), "top_p must be"),
    "top_k negative": (step(request(4, [1], top_k=-1)), "top_k must be"),
    "min_p above 1": (step(request(4, [1], min_p=1.5)), r"min_p must be in \[0, 1\], got 1.5"),
    "min_p NaN": (step(request(4, [1], min_p=np.nan)), "min_p must be"),
    "presence_penalty below": (step(request(4, [1], presence_penalty=-2.5)), "presence_penalty"),
    "frequency_penalty NaN": (step(request(4, [1], frequency_penalty=np.nan)), "frequency_penal"),
    "repetition_penalty 0": (step(request(4, [1], repetition_penalty=0)), "repetition_penalty mu"),
    "repetition_penalty NaN": (step(request(4, [1], repetition_penalty=np.nan)), "repetition_pen"),
    "biased id": (
        step(request(4, [1], features=Features(bias_ids=i32(3, 1000), bias=np.ones(2)))),
        r"request 'request-4': logit_bias: token ids are \[0, 1000\), got 1000",
    ),
    "allowed id": (
        step(request(4, [1], features=Features(allowed=i32(1000)))),
        "allowed_token_ids: token ids",
    ),
    "id of a bad word": (
        step(request(4, [1], features=Features(bad_words=(i32(3), i32(-1, 5))))),
        "bad_words: token ids.*got -1",
    ),
    "id that min_tokens forbids": (
        step(request(4, [1], features=Features(min_tokens=1, min_tokens_ids=i32(1000)))),
        "min_tokens: token ids",
    ),
    "cached tokens without blocks": (
        step(request(4, range(40), [9, 10], cached=33)),
        "request 'request-4' to row 4: KV group 0 needs blocks for every cached token, got 2",
    ),
    "more blocks than a row holds": (
        step(request(4, [1], [1, 2, 3, 4, 5])),
        "request 'request-4' to row 4: KV group 0 has room for 4 blocks in a row, got 5",
    ),
    "the null block": (step(request(4, [1], [0])), r"block ids are \[1, 100\), got 0"),
    "a block past the pool": (step(request(4, [1], [100])), r"block ids are \[1, 100\), got 100"),
    "a free row runs": (step(run={5: 2}), "run_rows: row 5 must be live"),
    "a row runs twice": (
        replace(step(), run_rows=i32(2, 2), run_counts=i32(1, 1)),
        "row 2 is named 2 times",
    ),
    "a default row is told to run": (step(run={1: 1}), "row 1 must have more than one uncomputed"),
    "more than is left": (step(run={2: 21}, grow=[[9, 10]]), "can run 1 to 20 tokens, got 21"),
    "no token": (step(run={2: 0}), "can run 1 to 20 tokens, got 0"),
    "a free row pauses": (step(pause=[5]), "paused_rows: row 5 must be live"),
    "a row in prefill pauses": (step(pause=[2]), "row 2 must have exactly one uncomputed"),
    "a row pauses twice": (step(pause=[1, 1]), "row 1 is named 2 times"),
    "a row that is freed runs": (step(free=[2], run={2: 20}), "run_rows: row 2 must be live"),
    "a block too many": (step(grow=[[9]]), "must have 0 ids for 0 rows that grow, got 1"),
    "a block too few": (step(run={2: 20}), "must have 2 ids for 1 rows that grow, got 0"),
    "growth into the null block": (step(run={2: 20}, grow=[[9, 0]]), "got 0"),
    "growth past the pool": (step(run={2: 20}, grow=[[100, 9]]), "got 100"),
    "another number of groups": (step(grow=[[], []]), "must have 1 KV groups, got 2"),
    "masked rows that do not sample": (step(masked=[1, 2]), r"in batch order, got \[1, 2\] where \[1\] sample"),
    "a row masked twice": (step(masked=[1, 1]), r"each named once and in batch order, got \[1, 1\]"),
    "a row masked that nobody has": (step(masked=[-1]), r"got \[-1\] where \[1\] sample"),
    "append to a row that is not there": (step(grow=[[12]]), "0 rows that grow"),
}  # fmt: skip


@pytest.fixture
def state() -> WorkerState:
    """Row 1 decodes (3 computed of 4), row 2 has 20 tokens to compute and no block."""
    state = make_state()
    state.commit(state.apply(step(request(1, [1, 2, 3]), run={1: 3}, grow=[[5]])), i32(4))
    state.apply(step(request(2, range(20)), pause=[1]))
    return state


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused_whole(name: str, state: WorkerState):
    """Half a step applied is a table that no message describes."""
    wrong, sentence = WRONG_STEPS[name]
    before = digest(state)
    with pytest.raises(ProtocolError, match=sentence):
        state.apply(wrong)
    assert digest(state) == before
    assert state.apply(step()).index_mapping.tolist() == [1]  # and the state goes on


def test_a_step_wrong_in_its_last_part_changes_nothing_in_its_first(state: WorkerState):
    """Frees and admissions are fine, growth is not: neither may have happened."""
    before = digest(state)
    wrong = step(request(1, [7]), request(4, [8]), free=[1], run={2: 20}, grow=[[9, 10, 11]])
    with pytest.raises(ProtocolError, match="must have 4 ids for 3 rows that grow, got 3"):
        state.apply(wrong)
    assert digest(state) == before


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([0, 8, 9], None),
        ([7, 8, 9], "block 0 of a row lies left of its window and must be 0, got 7"),
        ([0, 0, 9], r"block ids are \[1, 100\), got 0"),
        ([0, 8, 100], r"block ids are \[1, 100\), got 100"),
    ],
)
def test_a_window_groups_hit_has_blocks_exactly_where_it_is_read(blocks, sentence):
    """H-01, B13: 12 tokens cached, window 8: position 12 and later read from 5 on, so block 0 (0 to 3) is not there."""
    windowed = replace(make_state(4).groups[0], kind=AttentionKind.SLIDING_WINDOW, window=8)
    state = WorkerState(
        max_num_seqs=2, max_model_len=64, groups=(windowed,), num_blocks=100, vocab_size=1000
    )
    before = digest(state)
    admitted = step(request(1, range(13), blocks, cached=12), grow=[[10]])
    if sentence is None:
        assert state.apply(admitted).num_computed_tokens.tolist() == [12]
        assert state.block_tables.table[0][1, :4].tolist() == [0, 8, 9, 10]
        return
    with pytest.raises(ProtocolError, match=sentence):
        state.apply(admitted)
    assert digest(state) == before


def test_a_full_row_cannot_sample_another_token():
    """Its token would be written into the next row."""
    state = make_state(max_model_len=16)
    state.apply(step(request(0, range(16), [1], cached=15), request(1, [1]), pause=[0, 1]))
    before = digest(state)
    with pytest.raises(ProtocolError, match="row 0 has 16 tokens and would sample one more"):
        state.apply(step(grow=[[2]]))
    assert digest(state) == before
    assert state.apply(step(pause=[0], grow=[[2]])).index_mapping.tolist() == [1]


def test_admissions_sort_their_columns_by_their_own_row():
    """Rows come in any order; every column belongs to the row beside it."""
    state = make_state()
    state.apply(
        step(
            request(6, [60, 61], [6], seed=66, temperature=0.5),
            request(2, [20], [2], seed=22, temperature=0.25),
            grow=[[]],
        )
    )
    assert state.requests.seeds[[2, 6]].tolist() == [22, 66]
    assert state.requests.temperature[[2, 6]].tolist() == [0.25, 0.5]
    assert state.requests.token_ids[[2, 6], 0].tolist() == [20, 60]
    assert state.block_tables.table[0][[2, 6], 0].tolist() == [2, 6]
    assert admissions(request(1, [1])).rows.tolist() == [1]


def test_late_tokens_go_to_the_rows_that_ran_and_not_to_who_got_them_since():
    """A-08, W01: the token of a row that changed hands while it was under way would stand in a stranger's prompt."""
    state = make_state(4)
    plan = state.apply(
        step(
            request(0, [1, 2], [1]), request(1, [3, 4], [2]), request(2, [5, 6], [3]),
            run={0: 2, 1: 2, 2: 2},
        )
    )  # fmt: skip
    assert plan.index_mapping.tolist() == [0, 1, 2]
    state.advance(plan)
    assert state.requests.num_tokens[:3].tolist() == [3, 3, 3]
    assert state.requests.token_ids[:3, 2].tolist() == [0, 0, 0]
    # Row 1 is freed, row 2 goes to another; row 0 runs its new token, which the host has not seen.
    later = state.apply(step(request(2, [7, 8, 9, 10], [4]), free=[1, 2], pause=[], grow=[[]]))
    assert later.index_mapping.tolist() == [0]
    state.advance(later)
    state.take_tokens(i32(50, 51, 52))
    assert state.requests.token_ids[0, :4].tolist() == [1, 2, 50, 0]
    assert not state.requests.token_ids[1].any()
    assert state.requests.token_ids[2, :5].tolist() == [7, 8, 9, 10, 0]
    state.take_tokens(i32(60))
    assert state.requests.token_ids[0, :5].tolist() == [1, 2, 50, 60, 0]


def test_tokens_that_come_late_leave_the_same_tables():
    """Committed at once or a step later: the tables end the same, also with rows that change hands in between."""
    toy, twin = ToyScheduler(5, 16, 4), ToyScheduler(5, 16, 4)
    at_once, late = make_state(16, 4), make_state(16, 4)
    waiting: list[np.ndarray] = []
    for _ in range(150):
        at_once.commit(at_once.apply(toy.next_step()), toy.settle())
        late.advance(late.apply(twin.next_step()))
        waiting.append(twin.settle())
        if len(waiting) == 2:
            late.take_tokens(waiting.pop(0))
    late.take_tokens(waiting.pop(0))
    assert digest(late) == digest(at_once)


def test_a_step_of_another_digest_is_refused_before_it_is_computed():
    """A rank that ran on would leave its peers in a collective with messages of another size."""
    state = make_state(4)
    admitted = step(request(0, [1, 2], [1]), run={0: 2})
    with pytest.raises(
        ProtocolError, match=r"^digest [0-9a-f]{16} is not the scheduler's 3132333435363738: "
    ):
        state.apply(replace(admitted, digest=b"12345678"))
