"""The rules that scheduler and workers must share: who runs by default, batch order, block growth.

Both sides call these functions on their own tables with the same message, and so agree without sending the outcome.
Everything here depends on lengths alone, never on a sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .kv_groups import blocks_needed


class Lengths(Protocol):
    """The three per-row columns that decide a step; both sides' tables have them.

    Shapes: all [max_num_seqs]; live bool, the others int32. num_tokens counts the token being sampled by a step that
    was issued and is not settled yet; num_computed_tokens counts what issued steps compute.
    """

    live: np.ndarray
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Who runs in one step, in batch order.

    Shapes, all [num_reqs]: index_mapping int32, batch_index -> row; num_scheduled_tokens int32; num_computed_tokens
    int32, before this step; samples bool, true where this step computes the row's last token.
    """

    index_mapping: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    samples: np.ndarray

    @property
    def num_reqs(self) -> int:
        return len(self.index_mapping)


def scheduled_tokens(
    lengths: Lengths, run_rows: np.ndarray, run_counts: np.ndarray, paused_rows: np.ndarray
) -> np.ndarray:
    """Apply the default and its exceptions: a live row with exactly one uncomputed token runs it.

    Returns: [max_num_seqs] int32, tokens each row runs in this step. Trusts its input: the worker checks it first.
    """
    uncomputed = lengths.num_tokens - lengths.num_computed_tokens
    scheduled = (lengths.live & (uncomputed == 1)).astype(np.int32)
    scheduled[paused_rows] = 0
    scheduled[run_rows] = run_counts
    return scheduled


def batch_order(scheduled: np.ndarray, num_computed_tokens: np.ndarray) -> np.ndarray:
    """Order the rows that run: fewest tokens first; then rows with computed tokens; then row.

    Shapes: scheduled and num_computed_tokens [max_num_seqs]; returns [num_reqs] int32 rows.
    Example: row 7 runs 1 token, row 6 runs 8 -> [7, 6].
    """
    rows = np.flatnonzero(scheduled)
    counts, computed = scheduled[rows], num_computed_tokens[rows]
    if len(rows) and counts.max() == 1 and computed.min() > 0:  # steady: in row order already
        return rows.astype(np.int32)
    key = 2 * counts.astype(np.int64) + (computed == 0)
    return rows[np.argsort(key, kind="stable")].astype(np.int32)


def plan_step(
    lengths: Lengths, run_rows: np.ndarray, run_counts: np.ndarray, paused_rows: np.ndarray
) -> StepPlan:
    """Derive the whole batch of a step from the tables and the step's exceptions."""
    if not len(run_rows) and not len(paused_rows):
        plan = _plan_of_decodes(lengths)
        if plan is not None:
            return plan
    scheduled = scheduled_tokens(lengths, run_rows, run_counts, paused_rows)
    rows = batch_order(scheduled, lengths.num_computed_tokens)
    counts = scheduled[rows]
    computed = lengths.num_computed_tokens[rows]
    return StepPlan(
        index_mapping=rows,
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        samples=computed + counts == lengths.num_tokens[rows],
    )


def _plan_of_decodes(lengths: Lengths) -> StepPlan | None:
    """The same for the steady step, in a third of the time: no exceptions, and all that run have context."""
    default = lengths.live & (lengths.num_tokens - lengths.num_computed_tokens == 1)
    rows = np.flatnonzero(default).astype(np.int32)
    computed = lengths.num_computed_tokens[rows]
    if not computed.all():
        return None
    return StepPlan(
        index_mapping=rows,
        num_scheduled_tokens=np.ones(len(rows), np.int32),
        num_computed_tokens=computed,
        samples=np.ones(len(rows), bool),
    )


def derive_growth(
    plan: StepPlan, num_blocks: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows of one KV group that hold fewer blocks than they need after this step.

    Shapes: num_blocks [max_num_seqs] int32, blocks each row holds. Returns (rows [n] int32 ascending, counts [n] int32,
    at least 1 each): grown_block_ids holds counts[0] ids for rows[0], then counts[1] for rows[1], ...
    Example: block_size 16, row 7 holds 2 blocks, 32 tokens computed, runs 1 -> grows by 1.
    """
    needed = blocks_needed(plan.num_computed_tokens + plan.num_scheduled_tokens, block_size)
    missing = needed - num_blocks[plan.index_mapping]
    grows = np.flatnonzero(missing > 0)
    rows = plan.index_mapping[grows]
    order = np.argsort(rows)
    return rows[order], missing[grows][order].astype(np.int32)


def query_start_loc(plan: StepPlan) -> np.ndarray:
    """Where each request's tokens start in the flat batch: [num_reqs + 1] int32, first 0, last num_tokens."""
    starts = np.zeros(plan.num_reqs + 1, np.int32)
    np.cumsum(plan.num_scheduled_tokens, out=starts[1:])
    return starts
