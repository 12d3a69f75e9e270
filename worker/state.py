"""What one rank remembers between steps, and the one way to change it: a step's delta, then the sampled tokens.

Worker state is a pure function of the frames received and the tokens sampled. Owns both tables and the check of a step
against them. Builds no tensors (`input_batch.py`) and needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..scheduler.agreement import Lengths, StepPlan, TableDigest, derive_growth, plan_step
from ..scheduler.kv_groups import KVGroupSpec
from ..scheduler.messages import Admissions, ProtocolError, SchedulerOutput
from . import table_changes
from .block_tables import BlockTables, ragged_cells
from .request_states import RequestStates
from .step_checks import (
    check_admissions,
    check_exceptions,
    check_freed_rows,
    check_grown_blocks,
    check_growth_counts,
    check_masked_rows,
)
from .table_changes import TableChanges


@dataclass(kw_only=True, slots=True)
class _Forecast:
    """Lengths and block counts of the live rows as they will be once a step's frees and admissions are applied.

    num_blocks: one for each of `BlockTables.sizes`.
    """

    live: np.ndarray
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    num_blocks: tuple[np.ndarray, ...]


class WorkerState:
    """The request table and the block tables of one rank.

    Units: max_num_seqs rows; max_model_len tokens; num_blocks pool blocks, the null block 0 included; depth steps, as
        the scheduler's.
    digests: folds every step that is applied and its tokens; whoever has the step's frame calls `digests.end`.
    changes: None, or where every changed cell is noted (a device mirror sets it).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVGroupSpec],
        num_blocks: int,
        vocab_size: int,
        depth: int = 2,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.requests = RequestStates(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.block_tables = BlockTables(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, groups=self.groups
        )
        self.digests = TableDigest(
            self.requests.columns,
            self.requests.token_ids,
            self.block_tables.num_blocks,
            self.block_tables.table,
            self.groups,
            depth=depth,
        )
        self.changes: TableChanges | None = None
        self._flat_tokens = self.requests.token_ids.reshape(-1)
        self._previous: StepPlan | None = None  # the latest step that was advanced
        # Steps whose tokens are to come, oldest first, and how many moves (frees and admissions) were made by then.
        self._awaited: deque[tuple[StepPlan, int]] = deque()
        self._num_moves = 0
        self._moved_at = np.zeros(max_num_seqs, np.int64)  # by row, the number of its latest move

    @property
    def max_num_seqs(self) -> int:
        return self.requests.max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self.requests.max_model_len

    def apply(self, step: SchedulerOutput) -> StepPlan:
        """Check a whole step, then free, admit and grow; say who runs.

        Trusts the form of `step` (`messages.decode_frame` checked it), and nothing else of it.
        Returns: the plan, in batch order; its num_computed_tokens are those before the step.
        Raises: ProtocolError naming what, where, expected and got; the tables are then untouched. Also if this rank's
            digest is not the scheduler's: they were wrong before.
        """
        if len(step.grown_block_ids) != self.block_tables.num_groups:
            raise ProtocolError(
                f"step: grown_block_ids must have {self.block_tables.num_groups} KV groups, "
                f"got {len(step.grown_block_ids)}"
            )
        lengths: Lengths = self.requests
        held = tuple([same.num_blocks for same in self.block_tables.sizes])
        previous = self._previous
        if len(step.freed_rows) or step.admissions is not None:
            forecast = self._forecast(step)
            lengths, held, previous = forecast, forecast.num_blocks, None
        if len(step.run_rows) or len(step.paused_rows):
            check_exceptions(step, lengths)
        plan = plan_step(lengths, step.run_rows, step.run_counts, step.paused_rows, previous)
        if len(step.masked_rows):
            check_masked_rows(step.masked_rows, plan)
        self._check_room(plan, lengths)
        growth = [
            derive_growth(plan, num_blocks, same.block_size)
            for num_blocks, same in zip(held, self.block_tables.sizes, strict=True)
        ]
        for (rows, counts), same in zip(growth, self.block_tables.sizes, strict=True):
            check_growth_counts(same.groups, rows, counts, step.grown_block_ids)
        check_grown_blocks(step.grown_block_ids, self.num_blocks)
        # Nothing below can fail: from here on the tables change.
        if len(step.freed_rows):
            self._free(step.freed_rows)
        if step.admissions is not None:
            self._admit(step.admissions)
        for size, (rows, counts) in enumerate(growth):
            if len(rows):
                self._grow(size, rows, counts, step.grown_block_ids)
        digest = self.digests.begin(plan)
        if step.digest and digest != step.digest:
            raise ProtocolError(
                f"digest {digest.hex()} is not the scheduler's {step.digest.hex()}: what was sent, stored, run or "
                "sampled up to this step is not the same on both sides"
            )
        return plan

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> None:
        """Take a step's outcome into the request table: computed tokens count, sampled ones are appended.

        Shapes: tokens [num_reqs] int32, -1 where the row did not sample; kept for the digest, so not to be changed.
        """
        self.advance(plan)
        if self.changes is not None:
            batch, rows, places = plan.batch, plan.batch.rows, plan.seq_lens
            if not batch.all_sample:
                rows, places = rows[batch.samples], places[batch.samples]
            self.changes.add(table_changes.TOKEN_IDS, rows, places)
        self.take_tokens(tokens)

    def advance(self, plan: StepPlan) -> None:
        """Count a step whose tokens the host has not seen: they come by `take_tokens`, in step order.

        The device has them already: no changed cell is noted for them.
        """
        requests, batch = self.requests, plan.batch
        rows = batch.rows
        # Added to, not set from the plan: a count that has gone wrong stays wrong, and is found by its digest.
        requests.num_computed_tokens[batch.places] += batch.num_scheduled_tokens
        if self.changes is not None:
            self.changes.add(table_changes.NUM_COMPUTED_TOKENS, rows)
        requests.num_tokens[batch.places if batch.all_sample else rows[batch.samples]] += 1
        self._awaited.append((plan, self._num_moves))
        self._previous = plan

    def take_tokens(self, tokens: np.ndarray) -> None:
        """Write the tokens of the oldest step that was advanced, as for `commit`.

        A row that another request got since, or nobody holds any more, keeps what it has.
        """
        plan, num_moves = self._awaited.popleft()
        assert len(tokens) == plan.num_reqs, (len(tokens), plan.num_reqs)
        self.digests.sampled(tokens)
        batch, rows, places = plan.batch, plan.batch.rows, plan.seq_lens
        if not batch.all_sample:
            rows, places, tokens = rows[batch.samples], places[batch.samples], tokens[batch.samples]
        if not len(tokens):
            return
        highest = int(tokens.view(np.uint32).max())  # a negative one is very high
        assert highest < self.vocab_size, (highest, self.vocab_size)
        if num_moves != self._num_moves:
            stays = self._moved_at[rows] <= num_moves
            rows, places, tokens = rows[stays], places[stays], tokens[stays]
        # A row that samples had computed all it had, so its token's position is its length then. Its place is counted
        # through the flat table: a pair of indices takes NumPy twice as long.
        self._flat_tokens[rows * self.max_model_len + places] = tokens

    # ---------------------------------------------------------------- checking

    def _forecast(self, step: SchedulerOutput) -> _Forecast:
        requests = self.requests
        forecast = _Forecast(
            live=requests.live.copy(),
            num_tokens=requests.num_tokens.copy(),
            num_computed_tokens=requests.num_computed_tokens.copy(),
            num_blocks=tuple(same.num_blocks.copy() for same in self.block_tables.sizes),
        )
        freed = step.freed_rows
        if len(freed):
            check_freed_rows(freed, requests.live)
            forecast.live[freed] = False
        admissions = step.admissions
        if admissions is not None:
            check_admissions(
                admissions,
                live=forecast.live,
                requests=requests,
                block_tables=self.block_tables,
                groups=self.groups,
                num_blocks=self.num_blocks,
                vocab_size=self.vocab_size,
            )
            rows = admissions.rows.astype(np.intp)
            forecast.live[rows] = True
            forecast.num_tokens[rows] = admissions.num_tokens
            forecast.num_computed_tokens[rows] = admissions.num_cached_tokens
            for counts, same in zip(forecast.num_blocks, self.block_tables.sizes, strict=True):
                counts[rows] = admissions.num_blocks[same.groups[0]]
        return forecast

    def _check_room(self, plan: StepPlan, lengths: Lengths) -> None:
        """Refuse to sample for a row that is full. Only a row that samples can reach max_model_len computed tokens."""
        if plan.max_seq_len >= self.max_model_len:
            row = int(plan.index_mapping[plan.seq_lens.argmax()])
            raise ProtocolError(
                f"step: row {row} has {lengths.num_tokens[row]} tokens and would sample one more, "
                f"max_model_len is {self.max_model_len}"
            )

    # ---------------------------------------------------------------- changing

    def _note_move(self, rows: np.ndarray) -> None:
        self._num_moves += 1
        self._moved_at[rows] = self._num_moves

    def _free(self, rows: np.ndarray) -> None:
        rows = rows.astype(np.intp)  # NumPy's own index type, which it need not convert again
        self._note_move(rows)
        self.requests.remove(rows)
        self.block_tables.remove(rows)
        if self.changes is not None:
            self.changes.add(table_changes.NUM_COMPUTED_TOKENS, rows)
            for size in range(len(self.block_tables.sizes)):
                self.changes.add(table_changes.num_blocks(size), rows)

    def _admit(self, admissions: Admissions) -> None:
        rows = admissions.rows.astype(np.intp)
        self._note_move(rows)
        self.requests.add(admissions)
        for size, same in enumerate(self.block_tables.sizes):
            counts = admissions.num_blocks[same.groups[0]]
            self.block_tables.replace(
                size, rows, counts, _stacked(admissions.block_ids, same.groups)
            )
            if self.changes is not None:
                self.changes.add(table_changes.block_table(size), *ragged_cells(rows, counts))
                self.changes.add(table_changes.num_blocks(size), rows)
        if self.changes is not None:
            self.changes.add(table_changes.TOKEN_IDS, *ragged_cells(rows, admissions.num_tokens))
            self.changes.add(table_changes.NUM_COMPUTED_TOKENS, rows)

    def _grow(
        self, size: int, rows: np.ndarray, counts: np.ndarray, grown: Sequence[np.ndarray]
    ) -> None:
        block_ids = _stacked(grown, self.block_tables.sizes[size].groups)
        cells = self.block_tables.append(size, rows, counts, block_ids)
        if self.changes is not None:
            self.changes.add(table_changes.block_table(size), *cells)
            self.changes.add(table_changes.num_blocks(size), rows)


def _stacked(ids: Sequence[np.ndarray], groups: Sequence[int]) -> np.ndarray:
    """The block ids of some groups, all of one length, as [groups, n]."""
    if len(groups) == 1:
        return ids[groups[0]][None]
    return np.stack([ids[group] for group in groups])
