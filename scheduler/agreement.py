"""The rules that scheduler and workers must share: who runs by default, batch order, block growth, digest.

Both sides call these functions on their own tables with the same message, and so agree without sending the outcome.
Batch and growth depend on lengths alone, never on a sampled token. Whether the sides do agree, `TableDigest` tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .kv_groups import AttentionKind, KVGroupSpec, blocks_needed, first_needed_block


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
    is_steady: the step had no exceptions, and every row that ran had context, ran one token and samples.
    """

    __slots__ = (
        "all_sample",
        "index_mapping",
        "is_steady",
        "num_reqs",
        "num_scheduled_tokens",
        "num_tokens",
        "query_start_loc",
        "rows",
        "samples",
    )

    def __init__(
        self,
        index_mapping: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        samples: np.ndarray,
        *,
        is_steady: bool = False,
    ) -> None:
        self.index_mapping = index_mapping
        self.num_scheduled_tokens = num_scheduled_tokens
        self.samples = samples
        self.is_steady = is_steady
        self.num_reqs = len(index_mapping)
        self.rows = index_mapping.astype(np.intp)
        self.all_sample = is_steady or bool(samples.all())
        self.query_start_loc = np.zeros(self.num_reqs + 1, np.int32)
        np.cumsum(num_scheduled_tokens, out=self.query_start_loc[1:])
        self.num_tokens = int(self.query_start_loc[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step: its batch, and how far each of its requests is.

    Shapes, all [num_reqs] int32, in batch order: num_computed_tokens before this step; seq_lens after it.
    max_seq_len: the longest of seq_lens, 0 in an empty step.
    """

    batch: Batch
    num_computed_tokens: np.ndarray
    seq_lens: np.ndarray
    max_seq_len: int

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
    rows = np.flatnonzero(scheduled)
    counts, computed = scheduled[rows], num_computed_tokens[rows]
    if len(rows) and counts.max() == 1 and computed.min() > 0:  # steady: in row order already
        return rows.astype(np.int32)
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
    if not len(run_rows) and not len(paused_rows):
        if previous is not None and previous.batch.is_steady:
            return StepPlan(
                batch=previous.batch,
                num_computed_tokens=previous.seq_lens,
                seq_lens=previous.seq_lens + 1,
                max_seq_len=previous.max_seq_len + (previous.num_reqs > 0),
            )
        plan = _plan_of_decodes(lengths)
        if plan is not None:
            return plan
    scheduled = scheduled_tokens(lengths, run_rows, run_counts, paused_rows)
    rows = batch_order(scheduled, lengths.num_computed_tokens)
    counts = scheduled[rows]
    computed = lengths.num_computed_tokens[rows]
    seq_lens = computed + counts
    batch = Batch(rows, counts, samples=seq_lens == lengths.num_tokens[rows])
    return _plan(batch, computed, seq_lens)


def _plan_of_decodes(lengths: Lengths) -> StepPlan | None:
    """The same for a step without exceptions in which all that run have context, in a third of the time."""
    default = lengths.live & (lengths.num_tokens - lengths.num_computed_tokens == 1)
    rows = np.flatnonzero(default)
    computed = lengths.num_computed_tokens[rows]
    if not computed.all():
        return None
    ones = np.ones(len(rows), np.int32)
    batch = Batch(rows.astype(np.int32), ones, ones.astype(bool), is_steady=True)
    return _plan(batch, computed, computed + 1)


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
    held = num_blocks[batch.rows]
    grows = np.flatnonzero(plan.seq_lens > held * block_size)
    rows = batch.index_mapping[grows]
    counts = blocks_needed(plan.seq_lens[grows], block_size) - held[grows]
    if not batch.is_steady:  # a steady batch is in row order already
        order = np.argsort(rows)
        rows, counts = rows[order], counts[order]
    return rows, counts


# ---------------------------------------------------------------- digest


DIGEST_BYTES = 8
_PERIOD = 16  # a row's stored values are folded in one of this many steps
_MASK = 2**64 - 1
_CHAIN = 0x9E3779B97F4A7C15  # odd: what a step folds never loses a difference that an earlier one brought in
_SEED = np.uint64(0xD1342543DE82EF95)  # odd
_LIVE = np.uint64(0xF1357AEA2E62A9C5)
_BYTES = 0xAEF17502108EF2D9
_all_weights = np.empty(0, np.uint64)

# Cells [rows, columns] uint32, and the columns [first, end) of each row that count: [rows], or one number for all.
_Run = tuple[np.ndarray, np.ndarray | int, np.ndarray]


class DigestedTable(Lengths, Protocol):
    """The per-row columns that the digest covers; both sides' tables have them.

    Shapes: [max_num_seqs] int32, or as said: seeds int64; temperature and top_p float32; token_ids
        [max_num_seqs, max_model_len]. What stands in a row that is not live does not matter.
    """

    token_ids: np.ndarray
    num_prompt_tokens: np.ndarray
    seeds: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray


class TableDigest:
    """Folds one side's step and tables into eight bytes, in a chain over all steps of a life of the group.

    Call, for every step: `begin` with its plan, after its frees, admissions and growth and before its lengths count;
    `end` with the bytes of its frame; `sampled` with its tokens as soon as they are known, in step order.

    Folded in each step: the frame; index_mapping; query_start_loc; the tokens of step - depth; and of the live rows `i`
    with `i % 16 == step % 16` lengths, prompt length, sampling params, seed, the token ids that both sides must know
    by now, and per group the block ids that attention may still read, with their count. One value that differs always
    changes the digest of its step, and so of every later one; several that differ do, but for chances of 2**-59.

    What it cannot tell: with two ranks, whether rank 0 reported (and stored) a token that it did not sample. The
    scheduler knows rank 0's word alone, so rank 1 is the one that differs then. With three and more, all others differ.

    table, num_blocks and block_ids are referred to, never copied: they must stay the same arrays.
    Shapes: num_blocks by group [max_num_seqs] int32; block_ids by group [max_num_seqs, max_blocks] int32.
    """

    def __init__(
        self,
        table: DigestedTable,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        groups: Sequence[KVGroupSpec],
        *,
        depth: int,
    ) -> None:
        self._groups = tuple(groups)
        self._depth = depth
        self._parts = [_RowPart(table, num_blocks, block_ids, first) for first in range(_PERIOD)]
        self._sampled: deque[np.ndarray] = deque()
        self._step = 0
        self._value = 0

    def begin(self, plan: StepPlan) -> None:
        """Fold everything of a step but its frame."""
        values = [
            _fold(plan.batch.index_mapping.tobytes()),
            _fold(plan.batch.query_start_loc.tobytes()),
            self._fold_rows(self._parts[self._step % _PERIOD]),
        ]
        if self._step >= self._depth and self._sampled:
            values.append(_fold(self._sampled.popleft().tobytes()))
        for value in values:
            self._value = (self._value * _CHAIN + value) & _MASK
        self._step += 1

    def end(self, frame: bytes) -> int:
        """Fold the frame's bytes; returns this step's digest, in [0, 2**64)."""
        self._value = (self._value * _CHAIN + _fold(frame)) & _MASK
        return self._value

    def sampled(self, tokens: np.ndarray) -> None:
        """Keep a step's tokens [num_reqs] int32, -1 where a row did not sample, until their turn. Not copied."""
        self._sampled.append(tokens)

    def _fold_rows(self, part: _RowPart) -> int:
        live = part.live
        if not live.any():
            return 0
        computed = part.num_computed_tokens
        # Of a row that runs, the last depth - 1 tokens may be known to the workers alone.
        known = np.maximum(part.num_tokens - (self._depth - 1), part.num_prompt_tokens) * live
        runs: list[_Run] = [(part.token_ids, 0, known)]
        for spec, held, ids in zip(self._groups, part.num_blocks, part.block_ids, strict=True):
            first = 0
            if spec.kind is not AttentionKind.FULL:
                first = np.minimum(first_needed_block(spec, computed), held) * live
            runs.append((ids, first, held * live))
        sums = _sums_of_runs(runs)
        sums += part.columns()
        sums *= live
        return int(np.dot(sums, _weights(len(sums)))) & _MASK


class _RowPart:
    """Every 16th row of the tables, as views."""

    def __init__(
        self,
        table: DigestedTable,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        first: int,
    ) -> None:
        def part(array: np.ndarray) -> np.ndarray:
            return array[first::_PERIOD]

        self.live = part(table.live)
        self.num_tokens = part(table.num_tokens)
        self.num_computed_tokens = part(table.num_computed_tokens)
        self.num_prompt_tokens = part(table.num_prompt_tokens)
        self.token_ids = part(table.token_ids).view(np.uint32)
        self.num_blocks = tuple(map(part, num_blocks))
        self.block_ids = tuple(part(ids).view(np.uint32) for ids in block_ids)
        self._seeds = part(table.seeds).view(np.uint64)
        self._columns = [
            column.view(np.uint32)
            for column in (
                self.num_tokens,
                self.num_computed_tokens,
                self.num_prompt_tokens,
                part(table.top_k),
                part(table.temperature),
                part(table.top_p),
                *self.num_blocks,
            )
        ]

    def columns(self) -> np.ndarray:
        """One sum over all scalar columns of each row: [rows of this part] uint64."""
        values = np.concatenate(self._columns).astype(np.uint64)
        weights = _weights(len(self._columns))
        sums = np.dot(weights, values.reshape(len(weights), -1))
        sums += self._seeds * _SEED
        sums += _LIVE
        return sums


def _sums_of_runs(runs: Sequence[_Run]) -> np.ndarray:
    """A weighted sum over the counting cells of each row: [rows] uint64.

    The weighted cells of all runs lie side by side in one buffer, so that one `reduceat` sums them all. Between two
    runs lies a column that is never written, and never in a sum: bounds may then equal a run's width.
    """
    num_rows = len(runs[0][2])
    stride = sum(cells.shape[1] for cells, _, _ in runs) + len(runs)
    bounds = np.empty((num_rows, len(runs), 2), np.intp)
    products = np.empty((num_rows, stride), np.uint64)
    start = 0
    for index, (cells, first, ends) in enumerate(runs):
        # Of a damaged length too: read as unsigned, one below zero is beyond the last column.
        ends = np.minimum(ends.view(np.uint32), cells.shape[1])
        width = int(ends.max())
        np.multiply(cells[:, :width], _weights(width), out=products[:, start : start + width])
        bounds[:, index, 0] = first
        bounds[:, index, 1] = ends
        bounds[:, index] += start
        start += width + 1
    counts = bounds[:, :, 1] > bounds[:, :, 0]
    bounds += np.arange(0, num_rows * stride, stride)[:, None, None]
    sums = np.add.reduceat(products.reshape(-1), bounds.reshape(-1))[::2].reshape(counts.shape)
    sums *= counts  # of an empty run reduceat gives the cell at its bound
    return np.dot(sums, _weights(64 + len(runs))[64:])


def _fold(data: bytes) -> int:
    """Any difference of length or content gives another number, not reduced."""
    count = len(data) // 8
    weights = _weights(count + 1)
    total = len(data) * _BYTES + int.from_bytes(data[8 * count :], "little") * int(weights[count])
    if count:
        total += int(np.dot(np.frombuffer(data, np.uint64, count), weights[:count]))
    return total


def _weights(count: int) -> np.ndarray:
    """The first `count` of an endless row of odd numbers: [count] uint64. An odd factor mod 2**64 loses nothing.

    Source: splitmix64's finalizer (Steele, Lea, Flood, 2014) of 1, 2, 3, ..., with the lowest bit set.
    """
    global _all_weights
    if count > len(_all_weights):
        z = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(_CHAIN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        _all_weights = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return _all_weights[:count]


def disagreement(expected: int, digests: bytes) -> str | None:
    """Compare the digests of a step, 8 bytes a rank in rank order, with the scheduler's; None if all are the same.

    Returns: who differs, for a sentence: `rank 1 disagrees with the scheduler`.
    """
    values = np.frombuffer(digests, "<u8")
    wrong = np.flatnonzero(values != np.uint64(expected)).tolist()
    if not wrong:
        return None
    if len(wrong) == 1:
        return f"rank {wrong[0]} disagrees with the scheduler"
    names = f"{', '.join(map(str, wrong[:-1]))} and {wrong[-1]}"
    one = len(wrong) == len(values) and (values == values[0]).all()
    return f"ranks {names} disagree with the scheduler" + (
        ", though not among themselves" if one else ""
    )
