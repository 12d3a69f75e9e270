"""How a step's token budget is divided among the running rows. Knows no blocks and no newcomers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .agreement import StepPlan
from .policy import Policy
from .request import RequestTable

NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Who runs what, as exceptions to the default that a row with one uncomputed token runs it.

    Shapes: run_rows and run_counts [n] int32, paused_rows [m] int32; prompts [k] rows with more than one uncomputed
    token, whether they run or not. left: tokens for newcomers. next_turn: the row that comes first when the budget next
    serves rows in turn; None if it did not.
    """

    run_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    run_counts: np.ndarray = field(default_factory=lambda: NO_ROWS)
    paused_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    prompts: np.ndarray = field(default_factory=lambda: NO_ROWS)
    left: int = 0
    next_turn: int | None = None


def share_budget(
    table: RequestTable,
    policy: Policy,
    budget: int,
    turn: int,
    cap: int,
    previous: StepPlan | None = None,
) -> Share:
    """Give decodes their one token first, then prompts at most `cap` each of what is left, in the policy's order.

    So a long prompt never holds up a decode, and with a cap below the budget it does not hold up a short one either.
    Fewer tokens than rows: one each, in turn, starting at row `turn`.
    previous: the latest step's plan, if nobody has come or gone since; after a step in which all rows decoded, all do.
    Example: a row that decodes and one with 80 uncomputed tokens, budget 50, cap 50 -> 1 and 49; cap 8 -> 1 and 8.
    """
    if table.num_live > budget:
        return _share_in_turn(table, budget, turn)
    if previous is not None and previous.batch.is_steady and previous.num_reqs == table.num_live:
        return Share(left=budget - table.num_live)
    uncomputed = table.num_tokens - table.num_computed_tokens
    prompts = (uncomputed > 1).nonzero()[0]
    left = budget - (table.num_live - len(prompts))
    if not len(prompts):
        return Share(left=left)
    rows, counts = [], []
    for row in policy.prompt_order(table, prompts).tolist():
        if not left:
            break
        rows.append(row)
        counts.append(min(left, cap, int(uncomputed[row])))
        left -= counts[-1]
    return Share(
        run_rows=np.array(rows, np.int32),
        run_counts=np.array(counts, np.int32),
        prompts=prompts,
        left=left,
    )


def _share_in_turn(table: RequestTable, budget: int, turn: int) -> Share:
    rows = np.flatnonzero(table.live).astype(np.int32)
    start = int(np.searchsorted(rows, turn))
    places = np.arange(start, start + budget) % len(rows)
    runs = np.zeros(len(rows), bool)
    runs[places] = True
    is_prompt = (table.num_tokens - table.num_computed_tokens)[rows] > 1
    run_rows = rows[is_prompt & runs]
    return Share(
        run_rows=run_rows,
        run_counts=np.ones(len(run_rows), np.int32),
        paused_rows=rows[~is_prompt & ~runs],
        prompts=rows[is_prompt],
        next_turn=int(rows[places[-1]]) + 1,
    )
