"""Which blocks each row holds, per KV group. The scheduler's twin of the workers' block tables.

Groups of one block size always hold the same count, and groups of one kind and window return the same places: what they
share is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .agreement import StepPlan, derive_growth
from .kv_groups import AttentionKind, KVGroupSpec, blocks_needed, first_needed_block


@dataclass(frozen=True, kw_only=True, slots=True)
class SameSize:
    """The groups of one block size.

    Shapes: groups [n] int64; num_blocks [max_num_seqs] int32; block_ids [n, max_num_seqs, max_blocks] int32, and cells
        [n, max_num_seqs * max_blocks] the same memory, which NumPy gathers from in half the time.
    """

    block_size: int
    groups: np.ndarray
    num_blocks: np.ndarray
    block_ids: np.ndarray
    cells: np.ndarray

    def cells_at(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Gather block ids: [n, len(rows)] int32."""
        return self.cells.take(rows * self.block_ids.shape[2] + columns, axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SameWindow:
    """The groups that see equally far; `spec` is any of them.

    Shapes: num_returned [max_num_seqs] int32; block_ids those of the groups' size, in which theirs stand at places [n].
    """

    spec: KVGroupSpec
    groups: tuple[int, ...]
    num_returned: np.ndarray
    block_ids: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The rows that grow in a step, for each of `RowBlocks.sizes`: rows and counts [n] int32, for each group of it."""

    rows: Sequence[np.ndarray]
    counts: Sequence[np.ndarray]
    num_blocks: int


class RowBlocks:
    """Block tables of all rows and groups.

    Shapes, per group: num_blocks and num_returned [max_num_seqs] int32; block_ids [max_num_seqs, max_blocks] int32, 0
    beyond num_blocks and in the first num_returned cells, which lie left of the group's window.
    row_capacity: the blocks that a row has room for, of all groups.
    """

    def __init__(
        self, groups: Sequence[KVGroupSpec], *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.groups = tuple(groups)
        self.max_num_seqs = max_num_seqs
        self.sizes = tuple(
            self._same_size(size, max_model_len)
            for size in dict.fromkeys(spec.block_size for spec in groups)
        )
        kinds = dict.fromkeys((spec.kind, spec.window, spec.block_size) for spec in groups)
        self.windows = tuple(
            self._same_window(*kind) for kind in kinds if kind[0] is not AttentionKind.FULL
        )
        size_of = {int(group): same for same in self.sizes for group in same.groups}
        window_of = {group: same for same in self.windows for group in same.groups}
        never = np.zeros(max_num_seqs, np.int32)
        every_group = range(len(groups))
        self.row_capacity = sum(same.block_ids.shape[2] * len(same.groups) for same in self.sizes)
        self.num_blocks = tuple(size_of[group].num_blocks for group in every_group)
        self.num_returned = tuple(
            window_of[group].num_returned if group in window_of else never for group in every_group
        )
        self.block_ids = tuple(
            size_of[group].block_ids[int(np.flatnonzero(size_of[group].groups == group)[0])]
            for group in every_group
        )

    def _same_size(self, block_size: int, max_model_len: int) -> SameSize:
        groups = [group for group, spec in enumerate(self.groups) if spec.block_size == block_size]
        width = blocks_needed(max_model_len, block_size)
        block_ids = np.zeros((len(groups), self.max_num_seqs, width), np.int32)
        return SameSize(
            block_size=block_size,
            groups=np.array(groups),
            num_blocks=np.zeros(self.max_num_seqs, np.int32),
            block_ids=block_ids,
            cells=block_ids.reshape(len(groups), -1),
        )

    def _same_window(self, kind: AttentionKind, window: int, block_size: int) -> SameWindow:
        groups = tuple(
            group
            for group, spec in enumerate(self.groups)
            if (spec.kind, spec.window, spec.block_size) == (kind, window, block_size)
        )
        size = next(same for same in self.sizes if same.block_size == block_size)
        return SameWindow(
            spec=self.groups[groups[0]],
            groups=groups,
            num_returned=np.zeros(self.max_num_seqs, np.int32),
            block_ids=size.block_ids,
            places=np.flatnonzero(np.isin(size.groups, groups)),
        )

    def most_growth(self, num_rows: int, run_counts: np.ndarray) -> int:
        """Bound the blocks that num_rows rows take in a step: one each, and what prompts' chunks fill beyond."""
        num_prompt_tokens = int(run_counts.sum()) if len(run_counts) else 0
        return sum(
            (num_rows + num_prompt_tokens // same.block_size) * len(same.groups)
            for same in self.sizes
        )

    def num_missing(self, seq_lens: np.ndarray) -> int:
        """Count the blocks that rows lack to hold seq_lens [max_num_seqs] tokens."""
        total = 0
        for same in self.sizes:
            rows = (seq_lens > same.num_blocks * same.block_size).nonzero()[0]
            missing = blocks_needed(seq_lens[rows], same.block_size) - same.num_blocks[rows]
            total += int(missing.sum()) * len(same.groups)
        return total

    def growth(self, plan: StepPlan) -> Growth:
        """Find the rows that need more blocks than they hold, as the workers will."""
        all_rows, all_counts, num_blocks = [], [], 0
        for same in self.sizes:
            rows, counts = derive_growth(plan, same.num_blocks, same.block_size)
            all_rows.append(rows)
            all_counts.append(counts)
            num_blocks += int(counts.sum()) * len(same.groups)
        return Growth(rows=all_rows, counts=all_counts, num_blocks=num_blocks)

    def grow(self, growth: Growth, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        """Append new blocks, `growth.num_blocks` of them: group by group, in row order, as the workers read them.

        Returns: each group's part of ids.
        """
        if len(self.sizes) == 1:
            by_group = ids.reshape(len(self.groups), -1)
            self._append(self.sizes[0], growth.rows[0], growth.counts[0], by_group)
            return tuple(by_group)
        parts = [ids[:0]] * len(self.groups)
        totals = [0] * len(self.groups)
        for same, counts in zip(self.sizes, growth.counts, strict=True):
            for group in same.groups.tolist():
                totals[group] = int(counts.sum())
        start = 0
        for group, total in enumerate(totals):
            parts[group] = ids[start : start + total]
            start += total
        for same, rows, counts in zip(self.sizes, growth.rows, growth.counts, strict=True):
            own = np.stack([parts[group] for group in same.groups.tolist()])
            self._append(same, rows, counts, own)
        return tuple(parts)

    def _append(
        self, same: SameSize, rows: np.ndarray, counts: np.ndarray, ids: np.ndarray
    ) -> None:
        """ids [n, sum(counts)]: the first counts[0] of each line go to rows[0], ... Rows are unique."""
        if not len(rows):
            return
        held = same.num_blocks[rows]
        same.block_ids[:, *_cells_of_runs(rows, held, counts)] = ids
        same.num_blocks[rows] = held + counts

    def seat(self, row: int, block_ids: Sequence[np.ndarray]) -> None:
        """Fill an empty row with the blocks of a prefix hit, by group; its null blocks count as returned."""
        for group, ids in enumerate(block_ids):
            self.block_ids[group][row, : len(ids)] = ids
            self.num_blocks[group][row] = len(ids)
        for same in self.windows:
            same.num_returned[row] = np.count_nonzero(block_ids[same.groups[0]] == 0)

    def cells(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Name the block of each group that ends with token `ends` of each row; 0 if none of that group does.

        Shapes: rows, ends [n]; returns [num_groups, n] int32.
        """
        if len(self.sizes) == 1:  # then whatever ends at all ends a block of every group
            same = self.sizes[0]
            return same.cells_at(rows, ends // same.block_size - 1)
        named = np.zeros((len(self.groups), len(rows)), np.int32)
        for same in self.sizes:
            columns, rest = np.divmod(ends, same.block_size)
            named[same.groups] = same.cells_at(rows, columns - 1) * (rest == 0)
        return named

    def row_tables(self, row: int) -> tuple[np.ndarray, ...]:
        """Copy what a row holds: each group's cells up to its count."""
        if len(self.sizes) == 1:
            same = self.sizes[0]
            return tuple(same.block_ids[:, row, : same.num_blocks[row]].copy())
        return tuple(
            table[row, : held[row]].copy()
            for held, table in zip(self.num_blocks, self.block_ids, strict=True)
        )

    def return_unseen(self, rows: np.ndarray, num_computed: np.ndarray) -> np.ndarray | None:
        """Take out the blocks that no later token of their rows can read, deepest first.

        Shapes: rows, num_computed [n], settled tokens alone: a step in flight may still read further left.
        Returns: the ids taken out, None if there are none.
        """
        taken = []
        for same in self.windows:
            first = first_needed_block(same.spec, num_computed)
            old = same.num_returned[rows]
            moved = np.flatnonzero(first > old)
            if not len(moved):
                continue
            runs = rows[moved], old[moved], first[moved] - old[moved]
            same.num_returned[runs[0]] = first[moved]
            moved_rows, columns = _cells_of_runs(*runs)
            order = np.argsort(-columns)
            cells = same.places[:, None], moved_rows[order], columns[order]
            taken.append(same.block_ids[cells].T.ravel())
            same.block_ids[cells] = 0
        return np.concatenate(taken) if taken else None

    def release(self, rows: Sequence[int]) -> np.ndarray:
        """Empty rows and name what they held, row by row, the block that ends deepest first whichever its group."""
        at = np.array(rows)
        if len(self.sizes) == 1:
            same = self.sizes[0]
            held = same.block_ids[:, at, : int(same.num_blocks[at].max())]
            ids = held[:, :, ::-1].transpose(1, 2, 0).ravel()
            ids = ids[ids > 0]
        else:
            ids = np.concatenate([deepest_first(self.row_tables(row), self.groups) for row in rows])
        self.clear(at)
        return ids

    def clear(self, rows: np.ndarray) -> None:
        """Empty rows."""
        for same in self.sizes:
            same.block_ids[:, rows, : int(same.num_blocks[rows].max())] = 0
            same.num_blocks[rows] = 0
        for same in self.windows:
            same.num_returned[rows] = 0


def _cells_of_runs(
    rows: np.ndarray, first: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """List the cells (row, column) of runs of columns, one run a row: first[i], first[i] + 1, ... counts[i] of them.

    Shapes: rows, first, counts [n], counts at least 1; returns two arrays [sum(counts)].
    """
    total = int(counts.sum())
    if total == len(rows):  # one each: decodes
        return rows, first
    starts = counts.cumsum() - counts
    return rows.repeat(counts), np.arange(total) - (starts - first).repeat(counts)


def deepest_first(tables: Sequence[np.ndarray], groups: Sequence[KVGroupSpec]) -> np.ndarray:
    """Name the blocks of one row, the one that ends at the highest token first: [n] int32, without null blocks.

    So the start of a prefix outlives its continuation, in every group alike.
    Example: tables [5, 6, 7] of block_size 4 and [8, 9] of block_size 8 -> [9, 7, 6, 8, 5].
    """
    if len(tables) == 1:
        ids = tables[0][::-1]
        return ids if ids.all() else ids[ids > 0]
    if len({spec.block_size for spec in groups}) == 1:
        ids = np.stack(tables)[:, ::-1].T.ravel()
        return ids[ids > 0]
    ids = np.concatenate(tables)
    ends = np.concatenate(
        [
            np.arange(1, len(table) + 1) * spec.block_size
            for table, spec in zip(tables, groups, strict=True)
        ]
    )
    ids = ids[np.argsort(-ends, kind="stable")]
    return ids[ids > 0]


def cells_of(
    tables: Sequence[np.ndarray], groups: Sequence[KVGroupSpec], ends: np.ndarray
) -> np.ndarray:
    """Do what `RowBlocks.cells` does for one row whose cells are given by group: [num_groups, n] int32."""
    named = np.zeros((len(groups), len(ends)), np.int32)
    for group, (spec, ids) in enumerate(zip(groups, tables, strict=True)):
        columns, rest = np.divmod(ends, spec.block_size)
        named[group] = ids[columns - 1] * (rest == 0)
    return named
