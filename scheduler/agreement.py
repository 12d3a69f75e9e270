"""The rules that scheduler and workers must share: who runs by default, batch order, block growth, digest.

Both sides call these functions on their own tables with the same message, and so agree without sending the outcome.
Batch and growth depend on lengths alone, never on a sampled token. Whether the sides do agree, `TableDigest` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .asked import Asked as Asked  # part of the same rules, in files of their own
from .asked import asked_of_step as asked_of_step
from .kv_groups import blocks_needed
from .table_digest import DIGEST_BYTES as DIGEST_BYTES
from .table_digest import RowColumns as RowColumns
from .table_digest import TableDigest as TableDigest
from .table_digest import disagreement as disagreement


class Lengths(Protocol):
    """The three per-row columns that decide a step; both sides' tables have them.

    Shapes: all [max_num_seqs]; live bool, the others int32. num_tokens counts the token being sampled by a step that
    was issued and is not settled yet; num_computed_tokens counts what issued steps compute.
    """

    live: np.ndarray
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray


class Batch:
    """Who runs in one step, in batch order, and how much: everything but how far each request is.

    As long as nobody comes, goes, pauses or runs more than one token, step after step has the same Batch object: what
    a reader derives from it alone can be kept until another object comes. Its arrays are never changed.
    Shapes, [num_reqs] but for one: index_mapping int32, batch_index -> row; rows the same, of NumPy's own index type,
    which gathers and scatters five times faster; num_scheduled_tokens int32; samples bool, true where the step
    computes the row's last token; query_start_loc [num_reqs + 1] int32, first 0, last num_tokens.
    places: rows as a slice if they lie side by side, which NumPy reads and writes in a third of the time; else rows.
    words: index_mapping, query_start_loc and num_reqs in one piece of memory, [num_reqs + 1] uint64, for the digest.
    is_steady: the step had no exceptions, and every row that ran had context, ran one token and samples.
    """

    __slots__ = (
        "_first_seq_lens",
        "_turns",
        "all_sample",
        "index_mapping",
        "is_steady",
        "num_reqs",
        "num_scheduled_tokens",
        "num_tokens",
        "places",
        "query_start_loc",
        "rows",
        "samples",
        "words",
    )

    def __init__(
        self,
        rows: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        samples: np.ndarray,
        *,
        num_decodes: int = 0,
        steady_seq_lens: np.ndarray | None = None,
    ) -> None:
        """num_decodes: so many of the first are known to run one token each; 0 if nobody knows.

        steady_seq_lens: of a steady step, the seq_lens of the first that has this batch.
        """
        self.num_scheduled_tokens = num_scheduled_tokens
        self.samples = samples
        self.is_steady = steady_seq_lens is not None
        self.num_reqs = num_reqs = len(rows)
        self.words = np.empty(num_reqs + 1, np.uint64)
        cells = self.words.view(np.int32)
        self.index_mapping = cells[:num_reqs]
        self.query_start_loc = cells[num_reqs : 2 * num_reqs + 1]
        cells[-1] = num_reqs
        self.index_mapping[:] = rows
        self.query_start_loc[: num_decodes + 1] = np.arange(num_decodes + 1, dtype=np.int32)
        if num_decodes < num_reqs:
            ends = num_scheduled_tokens[num_decodes:].cumsum()
            self.query_start_loc[num_decodes + 1 :] = ends + num_decodes
        self.num_tokens = int(self.query_start_loc[-1])
        self.rows = rows.astype(np.intp, copy=False)
        self.places: np.ndarray | slice = self.rows
        self._first_seq_lens = steady_seq_lens
        self._turns: dict[int, list[np.ndarray]] = {}
        self.all_sample = self.is_steady or np.count_nonzero(samples) == num_reqs
        if self.is_steady and num_reqs:  # in row order, so side by side if they span no more
            first, last = int(self.rows[0]), int(self.rows[-1])
            if last - first + 1 == num_reqs:
                self.places = slice(first, last + 1)

    def opening(self, block_size: int, age: int) -> np.ndarray:
        """Find the rows of a steady batch that open a block in its step of this age: their batch indices, ascending.

        Each row opens one in every block_size-th step: whose turn it is is worked out once for all steps.
        Example: block_size 16, seq_lens [33, 48, 34] in the first step -> [0] at age 0, [1] at age 1, [2] at age 15.
        """
        turns = self._turns.get(block_size)
        if turns is None:
            assert self._first_seq_lens is not None, "a batch that is not steady has no turns"
            turn = (1 - self._first_seq_lens) % block_size
            order = np.argsort(turn, kind="stable")
            ends = np.cumsum(np.bincount(turn, minlength=block_size))[:-1]
            turns = self._turns[block_size] = np.split(order, ends)
        return turns[age % block_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step: its batch, and how far each of its requests is.

    Shapes, all [num_reqs] int32, in batch order: num_computed_tokens before this step; seq_lens after it.
    max_seq_len: the longest of seq_lens, 0 in an empty step. age: how many steps before this had its batch.
    """

    batch: Batch
    num_computed_tokens: np.ndarray
    seq_lens: np.ndarray
    max_seq_len: int
    age: int = 0

    @property
    def num_reqs(self) -> int:
        return self.batch.num_reqs

    @property
    def index_mapping(self) -> np.ndarray:
        return self.batch.index_mapping

    @property
    def num_scheduled_tokens(self) -> np.ndarray:
        return self.batch.num_scheduled_tokens

    @property
    def samples(self) -> np.ndarray:
        return self.batch.samples


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
    rows = scheduled.nonzero()[0]
    counts, computed = scheduled[rows], num_computed_tokens[rows]
    key = 2 * counts.astype(np.int64) + (computed == 0)
    return rows[np.argsort(key, kind="stable")].astype(np.int32)


def plan_step(
    lengths: Lengths,
    run_rows: np.ndarray,
    run_counts: np.ndarray,
    paused_rows: np.ndarray,
    previous: StepPlan | None = None,
) -> StepPlan:
    """Derive the whole batch of a step from the tables and the step's exceptions.

    previous: the plan of the step before this one, if that step was carried out and no row was freed or admitted
        since (None otherwise). A steady step then costs one addition, and has the same `batch` object.
    """
    no_exceptions = not len(run_rows) and not len(paused_rows)
    if no_exceptions and previous is not None and previous.batch.is_steady:
        return StepPlan(
            batch=previous.batch,
            num_computed_tokens=previous.seq_lens,
            seq_lens=previous.seq_lens + 1,
            max_seq_len=previous.max_seq_len + (previous.num_reqs > 0),
            age=previous.age + 1,
        )
    default = lengths.live & (lengths.num_tokens - lengths.num_computed_tokens == 1)
    if len(paused_rows):
        default[paused_rows] = False
    decodes = default.nonzero()[0]
    computed = lengths.num_computed_tokens[decodes]
    have_context = np.count_nonzero(computed) == len(computed)
    if have_context and (not len(run_rows) or run_counts.min() > 1):
        if len(run_rows):
            return _plan_of_decodes_and_prompts(lengths, decodes, computed, run_rows, run_counts)
        return _plan_of_decodes(decodes, computed, is_steady=not len(paused_rows))
    scheduled = scheduled_tokens(lengths, run_rows, run_counts, paused_rows)
    rows = batch_order(scheduled, lengths.num_computed_tokens)
    counts = scheduled[rows]
    computed = lengths.num_computed_tokens[rows]
    seq_lens = computed + counts
    batch = Batch(rows, counts, samples=seq_lens == lengths.num_tokens[rows])
    return _plan(batch, computed, seq_lens)


def _plan_of_decodes(decodes: np.ndarray, computed: np.ndarray, *, is_steady: bool) -> StepPlan:
    """The same where all that run have context and run one token: they are in batch order already."""
    ones, seq_lens = np.ones(len(decodes), np.int32), computed + 1
    batch = Batch(
        decodes,
        ones,
        ones.astype(bool),
        num_decodes=len(decodes),
        steady_seq_lens=seq_lens if is_steady else None,
    )
    return _plan(batch, computed, seq_lens)


def _plan_of_decodes_and_prompts(
    lengths: Lengths,
    decodes: np.ndarray,
    computed: np.ndarray,
    run_rows: np.ndarray,
    run_counts: np.ndarray,
) -> StepPlan:
    """The same where those come first, and behind them the few that run more than one token: only these are sorted."""
    of_prompts = lengths.num_computed_tokens[run_rows]
    order = np.lexsort((run_rows, of_prompts == 0, run_counts))
    prompts, counts, of_prompts = run_rows[order], run_counts[order], of_prompts[order]
    samples = np.ones(len(decodes) + len(prompts), bool)
    samples[len(decodes) :] = of_prompts + counts == lengths.num_tokens[prompts]
    counts = np.concatenate((np.ones(len(decodes), np.int32), counts))
    computed = np.concatenate((computed, of_prompts))
    batch = Batch(np.concatenate((decodes, prompts)), counts, samples, num_decodes=len(decodes))
    return _plan(batch, computed, computed + counts)


def _plan(batch: Batch, computed: np.ndarray, seq_lens: np.ndarray) -> StepPlan:
    return StepPlan(
        batch=batch,
        num_computed_tokens=computed,
        seq_lens=seq_lens,
        max_seq_len=int(seq_lens.max()) if len(seq_lens) else 0,
    )


def derive_growth(
    plan: StepPlan, num_blocks: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows of one KV group that hold fewer blocks than they need after this step.

    Shapes: num_blocks [max_num_seqs] int32, blocks each row holds. Returns (rows [n] int32 ascending, counts [n] int32,
    at least 1 each): grown_block_ids holds counts[0] ids for rows[0], then counts[1] for rows[1], ...
    Example: block_size 16, row 7 holds 2 blocks, 32 tokens computed, runs 1 -> grows by 1.
    """
    batch = plan.batch
    if plan.age > 1:  # the batch lasts: every row holds what it needs, and the turns pay
        grows = batch.opening(block_size, plan.age)
        return batch.index_mapping[grows], np.ones(len(grows), np.int32)
    held = num_blocks[batch.rows]
    grows = (plan.seq_lens > held * block_size).nonzero()[0]
    rows = batch.index_mapping[grows]
    counts = blocks_needed(plan.seq_lens[grows], block_size) - held[grows]
    if not batch.is_steady:  # a steady batch is in row order already
        order = rows.argsort()
        rows, counts = rows[order], counts[order]
    return rows, counts
