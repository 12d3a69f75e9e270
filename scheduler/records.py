"""The steps that were issued and have not settled: who ran in them, and what their result may be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .agreement import StepPlan
from .messages import ProtocolError
from .request import RequestTable


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchColumns:
    """What stays true of a batch's rows while nobody comes or goes; shared by the steps in which that holds.

    Shapes, [num_reqs]: generations int64 name who holds each row; front_index, end_len int32; numbers int64;
        first_cells intp, where each row begins in the flat token table. version: the table's.
    """

    version: int
    generations: np.ndarray
    front_index: np.ndarray
    numbers: np.ndarray
    end_len: np.ndarray
    first_cells: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """An issued step that has not settled.

    columns: what the table said of the batch's rows then.
    """

    plan: StepPlan
    columns: BatchColumns

    def held(self, table: RequestTable) -> np.ndarray | None:
        """Tell whose occupant of then holds the row still: [num_reqs] bool, None for everyone."""
        if self.columns.version == table.version:
            return None
        held = table.generation[self.plan.batch.rows] == self.columns.generations
        return None if held.all() else held


class Records:
    """Unsettled steps, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._latest: StepRecord | None = None  # also when it has settled

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> StepRecord:
        assert self._steps, "no step is in flight"
        return self._steps[0]

    def add(self, plan: StepPlan, table: RequestTable) -> None:
        """Remember a step that is being issued."""
        latest = self._latest
        if (
            latest is None
            or latest.plan.batch is not plan.batch
            or latest.columns.version != table.version
        ):
            columns = _columns(plan.batch.rows, table)
        else:
            columns = latest.columns
        self._latest = StepRecord(plan=plan, columns=columns)
        self._steps.append(self._latest)

    def previous_plan(self, table: RequestTable) -> StepPlan | None:
        """Name the plan of the latest step, if nobody has come or gone since."""
        latest = self._latest
        return None if latest is None or latest.columns.version != table.version else latest.plan

    def settle(self) -> StepRecord:
        """Forget the oldest: its result is here."""
        return self._steps.popleft()

    def num_in_flight(self, table: RequestTable) -> np.ndarray:
        """Count the unsettled steps that ran each row's present occupant: [max_num_seqs] int32."""
        counts = np.zeros(len(table.live), np.int32)
        for record in self._steps:
            held, rows = record.held(table), record.plan.batch.rows
            counts[rows if held is None else rows[held]] += 1
        return counts


def _columns(rows: np.ndarray, table: RequestTable) -> BatchColumns:
    return BatchColumns(
        version=table.version,
        generations=table.generation[rows],
        front_index=table.front_index[rows],
        numbers=table.number[rows],
        end_len=table.end_len[rows],
        first_cells=rows * table.token_ids.shape[1],
    )


def check_tokens(tokens: np.ndarray, plan: StepPlan, vocab_size: int) -> None:
    """Refuse a result that its step cannot have: one token for each row that sampled, -1 for the others.

    Raises: ProtocolError saying what is wrong.
    """
    if len(tokens) != plan.num_reqs:
        raise ProtocolError(
            f"the result carries {len(tokens)} tokens, its step ran {plan.num_reqs} requests"
        )
    sampled = tokens if plan.batch.all_sample else tokens[plan.samples]
    if (
        len(sampled) and int(sampled.view(np.uint32).max()) >= vocab_size
    ):  # a negative one is very high
        outside = sampled[(sampled < 0) | (sampled >= vocab_size)][0]
        raise ProtocolError(
            f"the result carries token {outside}, expected one in [0, {vocab_size})"
        )
    if len(sampled) < plan.num_reqs and (tokens[~plan.samples] != -1).any():
        raise ProtocolError("the result carries a token for a row that did not sample")
