"""What must hold of a scheduler after every step, whatever came: its pool, its queues, and the workers' tables.

The catch-all of the collected bug cases. Reads the scheduler's public tables and changes nothing; whatever does not
hold raises Violation with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.kv_groups import AttentionKind, blocks_needed
from ...scheduler.request import RequestStatus
from ...scheduler.scheduler import Scheduler
from ...worker.state import WorkerState
from .prefix_memory import Violation, first_seen

# An unsettled step: its plan, and the generations that its rows had when it was issued.
InFlight = tuple[StepPlan, np.ndarray]


def require(holds: bool | np.bool_, what: str, *found: object) -> None:
    """Raise Violation with what should hold and what was found, unless it holds."""
    if not holds:
        raise Violation(": ".join((what, ", ".join(map(str, found)))) if found else what)


def settled_computed(scheduler: Scheduler, in_flight: Iterable[InFlight]) -> np.ndarray:
    """Count the tokens of each row whose computation has settled: [max_num_seqs] int32."""
    table = scheduler.table
    computed = table.num_computed_tokens.copy()
    for plan, generations in in_flight:
        rows = plan.index_mapping
        ran = np.where(table.generation[rows] == generations, plan.num_scheduled_tokens, 0)
        computed[rows] -= ran
    return computed


def check_pool(scheduler: Scheduler, in_flight: Iterable[InFlight]) -> None:
    """No block is lost, free twice, or held by nobody; each row holds what its tokens need and nothing else."""
    pool, blocks, table = scheduler.pool, scheduler.blocks, scheduler.table
    free = pool.free_ids()
    require(
        len(free) == pool.num_free, "free list and free counter differ", len(free), pool.num_free
    )
    is_free = np.zeros(pool.usable + 1, bool)
    is_free[free] = True
    require(np.count_nonzero(is_free) == len(free), "a block is free twice")
    require(not is_free[0], "the null block is free")
    rows = np.flatnonzero(table.live)
    settled = settled_computed(scheduler, in_flight)[rows]
    computed = table.num_computed_tokens[rows]
    held_ids = [scheduler.memory.held_ids()]  # by requests without a row
    require(
        np.count_nonzero(held_ids[0]) == len(held_ids[0]),
        "a request without a row holds the null block",
    )
    for group, spec in enumerate(scheduler.groups if len(rows) else ()):
        counts = blocks.num_blocks[group][rows]
        needed = blocks_needed(computed, spec.block_size)
        require(
            np.array_equal(counts, needed),
            "a row's table has another width than its tokens need",
            counts,
            needed,
        )
        ids = blocks.block_ids[group][rows, : counts.max() + 1]
        columns = np.arange(ids.shape[1])
        wanted = columns < counts[:, None]
        first = first_seen(spec, settled) // spec.block_size
        if spec.kind is not AttentionKind.FULL:
            wanted &= columns >= first[:, None]
        is_held = ids != 0
        if not np.array_equal(is_held, wanted):
            i, column = np.argwhere(is_held != wanted)[0]
            raise Violation(
                f"row {rows[i]}, KV group {group}: cell {column} is {ids[i, column]}, its window starts at block "
                f"{first[i]} of {counts[i]} ({settled[i]} tokens settled)"
            )
        held_ids.append(ids[wanted])
    held = np.bincount(np.concatenate(held_ids), minlength=pool.usable + 1)
    if not np.array_equal(held, pool.ref_counts):
        wrong = np.flatnonzero(held != pool.ref_counts)[:4].tolist()
        found = [(i, int(held[i]), int(pool.ref_counts[i])) for i in wrong]
        raise Violation(f"reference counts differ from what is held: {found}")
    require(np.array_equal(is_free[1:], held[1:] == 0), "a block is free and held, or neither")


def check_queues(scheduler: Scheduler) -> None:
    """Every live request is in exactly one place, and nobody waits for a step that is not there."""
    waiting = list(scheduler.waiting)
    running = [request for request in scheduler.table.requests if request is not None]
    wrong = [
        request
        for request in waiting
        if request.status is not RequestStatus.WAITING
        or request.row != -1
        or request.num_in_flight < 0
    ]
    for request in wrong:
        raise Violation(
            f"a waiting request: {request.request_id}, {request.status}, row {request.row}, "
            f"{request.num_in_flight} steps in flight"
        )
    wrong = [request for request in running if request.status is not RequestStatus.RUNNING]
    require(not wrong, "requests with a row", *((r.request_id, r.status) for r in wrong))
    num_live = np.count_nonzero(scheduler.table.live)
    require(
        len(running) == scheduler.num_running == num_live, "rows", len(running), scheduler.num_running, num_live
    )  # fmt: skip
    require(
        len({*map(id, waiting), *map(id, running)}) == len(waiting) + len(running),
        "a request is in two places",
    )
    num_ending = scheduler.num_unfinished - len(waiting) - len(running) - scheduler.num_compiling
    require(num_ending >= 0, "more requests are queued than live", num_ending)
    require(
        num_ending == 0 or scheduler.num_in_flight > 0, "requests wait for a step that is not there", num_ending
    )  # fmt: skip


def check_tables(scheduler: Scheduler, state: WorkerState, *, whole: bool = True) -> None:
    """A worker holds the lengths, tokens and blocks that the scheduler believes; left of a window it may be stale.

    Rows whose present request the worker has not heard of yet are left out. Without `whole` only the last settled
    token of each row is compared: tokens are only ever appended.
    """
    table, states = scheduler.table, state.requests
    present = [
        (row, request)
        for row in np.flatnonzero(table.live & states.live).tolist()
        if (request := table.occupant(row)).request_id == states.request_ids[row]
    ]
    if not present:
        return
    rows = np.array([row for row, _ in present], np.int64)
    requests = [request for _, request in present]
    for name, ours in (
        ("num_tokens", table.num_tokens[rows]),
        ("num_computed_tokens", table.num_computed_tokens[rows]),
        ("num_prompt_tokens", [request.num_prompt_tokens for request in requests]),
        ("seeds", [request.seed for request in requests]),
    ):
        theirs = getattr(states, name)[rows]
        require(np.array_equal(ours, theirs), f"{name} here and at the worker", ours, theirs)
    _check_token_ids(scheduler, state, rows, whole)
    for group, (theirs, widths) in enumerate(
        zip(state.block_tables.table, state.block_tables.num_blocks, strict=True)
    ):
        counts = scheduler.blocks.num_blocks[group][rows]
        require(
            np.array_equal(counts, widths[rows]),
            f"blocks held of KV group {group} here and at the worker",
        )
        # Beyond its blocks a row has zeros here (`check_pool`) and, at the worker, anything.
        width = counts.max()
        ours = scheduler.blocks.block_ids[group][rows, :width]
        differ = ours != theirs[rows, :width]
        differ &= ours != 0
        if differ.any():
            raise Violation(
                f"block table {group} here and at the worker, (row of {rows.tolist()}, column): "
                f"{np.argwhere(differ)[:4].tolist()}"
            )


def _check_token_ids(
    scheduler: Scheduler, state: WorkerState, rows: np.ndarray, whole: bool
) -> None:
    ours, theirs = scheduler.table.token_ids, state.requests.token_ids
    lengths = scheduler.table.num_settled_tokens[rows]
    same = ours[rows, lengths - 1] == theirs[rows, lengths - 1]
    if whole:
        same &= np.array(
            [
                np.array_equal(ours[row, :length], theirs[row, :length])
                for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
            ]
        )
    require(same.all(), "token ids here and at the worker differ in rows", *rows[~same].tolist())
