"""What must hold of a scheduler after every step, whatever came: its pool, its queues, and the workers' tables.

The catch-all of the collected bug cases. Reads the scheduler's public tables and changes nothing; whatever does not
hold raises Violation with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.kv_groups import blocks_needed
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
    require(int(is_free.sum()) == len(free), "a block is free twice")
    require(not is_free[0], "the null block is free")
    rows = np.flatnonzero(table.live)
    settled = settled_computed(scheduler, in_flight)[rows]
    computed = table.num_computed_tokens[rows]
    held = np.zeros(pool.usable + 1, np.int64)
    for group, spec in enumerate(scheduler.groups):
        counts = blocks.num_blocks[group][rows]
        needed = blocks_needed(computed, spec.block_size)
        require(
            (counts == needed).all(),
            "a row's table has another width than its tokens need",
            counts,
            needed,
        )
        ids = blocks.block_ids[group][rows, : counts.max(initial=0) + 1]
        columns = np.arange(ids.shape[1])
        first = first_seen(spec, settled) // spec.block_size
        wanted = (columns >= first[:, None]) & (columns < counts[:, None])
        wrong = (ids != 0) != wanted
        if wrong.any():
            i, column = np.argwhere(wrong)[0]
            raise Violation(
                f"row {rows[i]}, KV group {group}: cell {column} is {ids[i, column]}, its window starts at block "
                f"{first[i]} of {counts[i]} ({settled[i]} tokens settled)"
            )
        held += np.bincount(ids.ravel(), minlength=len(held))
    held[0] = 0
    held += np.bincount(
        scheduler.memory.held_ids(), minlength=len(held)
    )  # by requests without a row
    require(held[0] == 0, "a request without a row holds the null block")
    wrong_refs = np.flatnonzero(held != pool.ref_counts)
    require(
        not len(wrong_refs), "reference counts differ from what is held",
        *((int(i), int(held[i]), int(pool.ref_counts[i])) for i in wrong_refs[:4]),
    )  # fmt: skip
    require((is_free[1:] == (held[1:] == 0)).all(), "a block is free and held, or neither")


def check_queues(scheduler: Scheduler) -> None:
    """Every live request is in exactly one place, and nobody waits for a step that is not there."""
    waiting = list(scheduler.waiting)
    running = [request for request in scheduler.table.requests if request is not None]
    for request in waiting:
        require(
            request.status is RequestStatus.WAITING and request.row == -1,
            "a waiting request", request.request_id, request.status, request.row,
        )  # fmt: skip
        require(
            request.num_in_flight >= 0,
            "a counter of steps in flight is negative",
            request.request_id,
        )
    for request in running:
        require(
            request.status is RequestStatus.RUNNING,
            "a row's request",
            request.request_id,
            request.status,
        )
    num_live = int(scheduler.table.live.sum())
    require(
        len(running) == scheduler.num_running == num_live, "rows", len(running), scheduler.num_running, num_live
    )  # fmt: skip
    require(
        len({id(request) for request in waiting + running}) == len(waiting) + len(running),
        "a request is in two places",
    )
    num_ending = scheduler.num_unfinished - len(waiting) - len(running)
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
    rows = np.array(
        [
            row
            for row in np.flatnonzero(table.live & states.live).tolist()
            if table.occupant(row).request_id == states.request_ids[row]
        ],
        np.int64,
    )
    for name in ("num_tokens", "num_computed_tokens"):
        ours, theirs = getattr(table, name)[rows], getattr(states, name)[rows]
        require((ours == theirs).all(), f"{name} here and at the worker", ours, theirs)
    requests = [table.occupant(row) for row in rows.tolist()]
    for name, values in (
        ("num_prompt_tokens", [request.num_prompt_tokens for request in requests]),
        ("seeds", [request.seed for request in requests]),
    ):
        theirs = getattr(states, name)[rows]
        require(
            (np.array(values) == theirs).all(), f"{name} here and at the worker", values, theirs
        )
    _check_token_ids(scheduler, state, rows, whole)
    for group, theirs in enumerate(state.block_tables.table):
        ours = scheduler.blocks.block_ids[group][rows]
        differ = (ours != 0) & (ours != theirs[rows])
        require(
            not differ.any(),
            f"block table {group} here and at the worker, (row of {rows.tolist()}, column)",
            np.argwhere(differ)[:4].tolist(),
        )
        counts = scheduler.blocks.num_blocks[group][rows]
        require(
            (counts == state.block_tables.num_blocks[group][rows]).all(),
            f"blocks held of KV group {group} here and at the worker",
        )


def _check_token_ids(
    scheduler: Scheduler, state: WorkerState, rows: np.ndarray, whole: bool
) -> None:
    ours, theirs = scheduler.table.token_ids, state.requests.token_ids
    lengths = scheduler.table.num_settled_tokens[rows]
    same = ours[rows, lengths - 1] == theirs[rows, lengths - 1]
    if whole and len(rows):
        same &= np.array(
            [
                np.array_equal(ours[row, :length], theirs[row, :length])
                for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
            ]
        )
    require(same.all(), "token ids here and at the worker differ in rows", *rows[~same].tolist())
