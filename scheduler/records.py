"""The steps that were issued and have not settled: who ran in them, and what their result may be."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from .agreement import StepPlan
from .messages import ProtocolError
from .request import RequestTable


class RowFacts(NamedTuple):
    """What settling needs of rows, and stays true as long as their occupants hold them.

    Shapes, [n]: front_index, end_len int32; numbers int64; first_cells intp, where each begins in the flat token table.
    """

    front_index: np.ndarray
    numbers: np.ndarray
    end_len: np.ndarray
    first_cells: np.ndarray

    @classmethod
    def of(cls, table: RequestTable, rows: np.ndarray) -> RowFacts:
        """Gather them; rows [n] intp."""
        return cls(
            front_index=table.front_index[rows],
            numbers=table.number[rows],
            end_len=table.end_len[rows],
            first_cells=rows * table.token_ids.shape[1],
        )


class Occupants:
    """Who holds a batch's rows; the same object in the steps between which nobody comes or goes.

    Shapes: generations [num_reqs] int64. version: the table's.
    """

    __slots__ = ("_columns", "generations", "version")

    def __init__(self, table: RequestTable, rows: np.ndarray) -> None:
        self.version = table.version
        self.generations = table.generation[rows]
        self._columns: RowFacts | None = None

    def columns(self, table: RequestTable, rows: np.ndarray) -> RowFacts:
        """Say what settling needs of the batch's rows, all of which they hold still: gathered once for all steps."""
        if self._columns is None:
            self._columns = RowFacts.of(table, rows)
        return self._columns


class StepRecord(NamedTuple):
    """An issued step that has not settled."""

    plan: StepPlan
    occupants: Occupants

    def held(self, table: RequestTable) -> np.ndarray | None:
        """Tell whose occupant of then holds the row still: [num_reqs] bool, None for everyone."""
        if self.occupants.version == table.version:
            return None
        held = table.generation[self.plan.batch.rows] == self.occupants.generations
        return None if np.count_nonzero(held) == len(held) else held


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
            or latest.occupants.version != table.version
        ):
            occupants = Occupants(table, plan.batch.rows)
        else:
            occupants = latest.occupants
        self._latest = StepRecord(plan, occupants)
        self._steps.append(self._latest)

    def previous_plan(self, table: RequestTable) -> StepPlan | None:
        """Name the plan of the latest step, if nobody has come or gone since."""
        latest = self._latest
        return None if latest is None or latest.occupants.version != table.version else latest.plan

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
