"""The digest by which ranks and scheduler notice that they differ: everything that it covers changes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rowcast.scheduler.agreement import Batch, RowColumns, StepPlan, TableDigest, disagreement
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec, first_needed_block

ROWS, WIDTH = 20, 24  # two rows share one step in sixteen, and the last parts hold one row alone
WINDOW = 6
FULL = KVGroupSpec(block_size=4, num_kv_heads=1, head_dim=8, layers=(0,))
SLIDING = KVGroupSpec(
    block_size=2, num_kv_heads=1, head_dim=8, layers=(1,),
    kind=AttentionKind.SLIDING_WINDOW, window=WINDOW,
)  # fmt: skip
CHUNKED = KVGroupSpec(
    block_size=2, num_kv_heads=1, head_dim=8, layers=(2,), kind=AttentionKind.CHUNKED, window=WINDOW
)
GROUPS = (FULL, SLIDING, CHUNKED, SLIDING)  # two see alike
DEPTH = 2
FRAME = b"a frame of some bytes"


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


COLUMNS = ["num_tokens", "num_computed_tokens", "num_prompt_tokens", "top_k", "features", "seeds"]
REALS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
]  # fmt: skip


class Side:
    """One side's tables, filled at random; the same for the same seed."""

    def __init__(self, seed: int = 0, depth: int = DEPTH, width: int = WIDTH) -> None:
        rng = np.random.default_rng(seed)
        self.table = table = RowColumns(ROWS)
        table.live[:] = True
        table.num_tokens[:] = rng.integers(12, WIDTH, ROWS)
        table.num_computed_tokens[:] = table.num_tokens - 1
        table.num_prompt_tokens[:] = rng.integers(1, 9, ROWS)
        table.top_k[:] = rng.integers(0, 50, ROWS)
        table.features[:] = rng.integers(0, 2**31, ROWS)
        for name in REALS:
            getattr(table, name)[:] = rng.random(ROWS)
        table.seeds[:] = rng.integers(0, 2**63, ROWS)
        table.clear([3])
        self.token_ids = rng.integers(1, 1000, (ROWS, width)).astype(np.int32)
        of_size = {size: (-(-table.num_tokens // size)).astype(np.int32) for size in (2, 4)}
        self.num_blocks = tuple(of_size[spec.block_size] for spec in GROUPS)
        self.block_ids = tuple(
            rng.integers(1, 500, (ROWS, WIDTH // spec.block_size)).astype(np.int32)
            for spec in GROUPS
        )
        for row, length in enumerate(self.table.num_tokens):
            self.token_ids[row, length:] = 0
        for held, ids in zip(self.num_blocks, self.block_ids, strict=True):
            for row, count in enumerate(held):
                ids[row, count:] = 0
        self.digest = TableDigest(
            table, self.token_ids, self.num_blocks, self.block_ids, GROUPS, depth=depth
        )

    def plan(self, rows: np.ndarray | None = None, counts: np.ndarray | None = None) -> StepPlan:
        rows = i32(7, 5, 9) if rows is None else rows
        counts = i32(1, 1, 3) if counts is None else counts
        computed = self.table.num_computed_tokens[rows]
        return StepPlan(
            batch=Batch(rows, counts, np.ones(len(rows), bool)),
            num_computed_tokens=computed,
            seq_lens=computed + counts,
            max_seq_len=WIDTH,
        )

    def step(self, frame: bytes = FRAME, tokens: np.ndarray | None = None, **plan) -> int:
        self.digest.begin(self.plan(**plan))
        value = self.digest.end(frame)
        self.digest.sampled(i32(4, 5, 6) if tokens is None else tokens)
        return value

    def steps(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


def first_difference(change: Callable[[Side], object], num_steps: int = 16) -> int | None:
    """The step at which a side that was changed once differs from one that was not."""
    ours, theirs = Side(), Side()
    change(theirs)
    pairs = zip(ours.steps(num_steps), theirs.steps(num_steps), strict=True)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)


def test_equal_tables_give_equal_digests_in_every_step():
    ours, theirs = Side(), Side()
    assert ours.steps(40) == theirs.steps(40)


def test_the_digest_fits_eight_bytes_and_never_stays():
    values = Side().steps(64)
    assert len(set(values)) == 64
    assert all(0 <= value < 2**64 for value in values)
    assert max(values) >= 2**63  # all 64 bits are used


@pytest.mark.parametrize("row", [0, 2, 3, 7, 15, 16, 18, 19])
@pytest.mark.parametrize("column", [*COLUMNS, *REALS])
def test_a_value_that_differs_is_noticed_at_once(column: str, row: int):
    """Lengths and params decide what ranks send each other in this very step. Row 3 is free."""

    def change(side: Side) -> None:
        array = getattr(side.table, column)
        bits = array.view(np.uint64 if array.itemsize == 8 else np.uint32)
        bits[row] ^= 1  # the lowest bit of whatever it is

    assert first_difference(change) == 0


def test_every_bit_of_a_seed_counts():
    same = Side().step()
    for bit in range(63):
        side = Side()
        side.table.seeds[4] ^= 1 << bit
        assert side.step() != same, bit


def test_a_row_that_one_side_thinks_free_is_noticed():
    def change(side: Side) -> None:
        side.table.live[11] = False

    assert first_difference(change) == 0

    def wake(side: Side) -> None:
        side.table.live[3] = True

    assert first_difference(wake) == 0


def test_columns_lie_side_by_side_and_are_cleared_together():
    """In one piece of memory a column that overlaps another would go unseen until both are used."""
    columns = RowColumns(5)
    names = [*COLUMNS, *REALS, "live"]
    for number, name in enumerate(names):
        getattr(columns, name)[:] = np.arange(1, 6) + 10 * number
    for number, name in enumerate(names[:-1]):
        assert getattr(columns, name).tolist() == [1 + 10 * number + i for i in range(5)], name
    assert columns.live.all()
    columns.clear(i32(1, 4))
    for name in names:
        assert np.flatnonzero(getattr(columns, name) == 0).tolist() == [1, 4], name
    columns.clear(i32(0, 2, 3))
    assert not columns.words.any()


@pytest.mark.parametrize("row", range(ROWS))
def test_the_ids_of_a_row_are_folded_once_in_sixteen_steps(row: int):
    def token(side: Side) -> None:
        side.token_ids[row, 0] += 1

    def block(side: Side) -> None:
        side.block_ids[0][row, 0] += 1

    assert first_difference(token) == row % 16
    assert first_difference(block) == row % 16


@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_token_that_both_sides_know_counts(depth: int, width: int):
    """The last depth - 1 tokens may be known to the workers alone, so those of nobody count."""

    def side(row: int = 0, place: int = 0, by: int = 0) -> Side:
        made = Side(depth=depth, width=width)
        made.token_ids[row, place] += by
        return made

    same = side().steps(16)
    for row in (6, 9, 18):
        table = side().table
        known = table.num_tokens[row] - (depth - 1)
        for place in range(table.num_tokens[row]):
            differs = side(row, place, 1).steps(16) != same
            assert differs == (place < known), (row, place)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_row_of_fewer_tokens_than_may_be_in_flight_has_nothing_of_its_neighbour(depth: int):
    """The cells before a row are the end of another one, of which one side may know more."""

    def side(last: int) -> Side:
        made = Side(depth=depth)
        made.table.num_tokens[[0, 6, 7]] = 1, 1, 0
        made.token_ids[5, -1] = made.token_ids[6, -1] = last
        return made

    assert side(1).steps(8) == side(2).steps(8)


def test_every_block_id_that_attention_may_read_counts():
    """Left of a window the scheduler holds 0 and the workers what was once there."""
    side = Side()
    for group, spec in enumerate(GROUPS):
        for row in (6, 18):
            held = int(side.num_blocks[group][row])
            first = first_needed_block(spec, int(side.table.num_computed_tokens[row]))
            assert (first > 0) == (group > 0), "the window must hide something"
            for place in range(held):

                def change(side: Side, row=row, place=place, group=group) -> None:
                    side.block_ids[group][row, place] += 1

                noticed = first_difference(change) is not None
                assert noticed == (first <= place), (group, row, place)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_count_of_blocks_that_differs_is_noticed(group: int, by: int):
    """Also where the cell beyond holds 0, which adds nothing to a sum."""

    def change(side: Side) -> None:
        side.num_blocks[group][5] += by

    def clear(side: Side) -> None:
        count = side.num_blocks[group][5]
        side.block_ids[group][5, count - 1 :] = 0

    ours, theirs = Side(), Side()
    clear(ours)
    clear(theirs)
    change(theirs)
    assert ours.steps(16) != theirs.steps(16)


def test_swaps_are_noticed():
    def tokens(side: Side) -> None:
        side.token_ids[6, [2, 3]] = side.token_ids[6, [3, 2]]

    def rows(side: Side) -> None:
        side.token_ids[[2, 18]] = side.token_ids[[18, 2]]

    def blocks(side: Side) -> None:
        side.block_ids[0][6, [0, 1]] = side.block_ids[0][6, [1, 0]]

    def groups(side: Side) -> None:
        first, second = side.block_ids[1][8, 5], side.block_ids[3][8, 5]
        side.block_ids[1][8, 5], side.block_ids[3][8, 5] = second, first

    def params(side: Side) -> None:
        side.table.seeds[[1, 17]] = side.table.seeds[[17, 1]]

    def lengths(side: Side) -> None:
        table = side.table
        table.num_prompt_tokens[4], table.top_k[4] = table.top_k[4], table.num_prompt_tokens[4]

    for change in (tokens, rows, blocks, groups, params, lengths):
        assert first_difference(change) is not None, change.__name__


@pytest.mark.parametrize(
    "other",
    [
        {"frame": FRAME[:-1] + b"z"},
        {"frame": b"A" + FRAME[1:]},
        {"frame": FRAME + b"\0"},
        {"frame": FRAME[:-1]},
        {"rows": i32(7, 5, 8)},
        {"rows": i32(5, 7, 9)},
        {"rows": i32(7, 5, 9, 10), "counts": i32(1, 1, 3, 1)},
        {"counts": i32(1, 2, 2)},
        {"counts": i32(1, 1, 4)},
    ],
    ids=str,
)
def test_a_frame_or_a_batch_that_differs_changes_its_own_step_and_all_later_ones(other: dict):
    ours, theirs = Side(), Side()
    ours.step()
    theirs.step()
    assert ours.step() != theirs.step(**other)
    pairs = list(zip(ours.steps(20), theirs.steps(20), strict=True))
    assert all(a != b for a, b in pairs)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 300, 100_000])
def test_frames_of_zeros_differ_by_their_length(length: int):
    values = {Side().step(frame=bytes(length + more)) for more in range(9)}
    assert len(values) == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sampled_token_that_differs_is_noticed_depth_steps_later(depth: int):
    """Only then does the scheduler know it for sure."""
    ours, theirs = Side(depth=depth), Side(depth=depth)
    tokens = i32(4, 5, 6)
    changed = i32(4, 5, 7)
    pairs = [
        (ours.step(tokens=tokens), theirs.step(tokens=changed if step == 1 else tokens))
        for step in range(6)
    ]
    assert [a != b for a, b in pairs] == [step >= 1 + depth for step in range(6)]


def test_a_token_for_a_row_that_did_not_sample_is_another_token():
    ours, theirs = Side(), Side()
    ours.step(tokens=i32(4, -1, 6))
    theirs.step(tokens=i32(4, 0, 6))
    assert ours.steps(2)[1] != theirs.steps(2)[1]


def test_who_disagrees_is_named():
    def of(*values: int) -> bytes:
        return np.array(values, np.uint64).tobytes()

    big = 2**64 - 5
    assert disagreement(big, of(big, big)) is None
    assert disagreement(big, b"") is None
    assert disagreement(big, of(big, 1)) == "rank 1 disagrees with the scheduler"
    assert disagreement(7, of(1, 7, 2)) == "ranks 0 and 2 disagree with the scheduler"
    assert disagreement(7, of(7, 1, 1, 2)) == "ranks 1, 2 and 3 disagree with the scheduler"
    assert "though not among themselves" in str(disagreement(7, of(3, 3, 3)))


def test_tables_smaller_than_a_round_are_folded():
    tokens, blocks = np.ones((1, 4), np.int32), i32(5)[None]
    digest = TableDigest(RowColumns(1), tokens, [i32(1)], [blocks], [FULL], depth=1)
    batch = Batch(i32(), i32(), np.zeros(0, bool))
    plan = StepPlan(batch=batch, num_computed_tokens=i32(), seq_lens=i32(), max_seq_len=0)
    for _ in range(17):
        digest.begin(plan)
        digest.end(b"")
        digest.sampled(i32())


def test_a_frame_carries_what_is_known_before_it():
    side = Side()
    assert side.digest.begin(side.plan()) != side.digest.begin(side.plan())
    begun = side.digest.begin(side.plan())
    assert len(begun) == 8
    assert side.digest.end(FRAME) != int.from_bytes(begun, "little")
