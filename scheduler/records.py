"""The steps that were issued and have not settled: who ran in them, and what their result may be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .agreement import StepPlan
from .messages import ProtocolError
from .request import RequestTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """An issued step that has not settled.

    Shapes: rows [num_reqs] intp, the plan's; generations [num_reqs] int64 name who held each of them then.
    version: the table's, then: while it is the same, everyone still holds his row.
    """

    plan: StepPlan
    rows: np.ndarray
    generations: np.ndarray
    version: int

    def held(self, table: RequestTable) -> np.ndarray | None:
        """Tell whose occupant of then holds the row still: [num_reqs] bool, None for everyone."""
        if self.version == table.version:
            return None
        held = table.generation[self.rows] == self.generations
        return None if held.all() else held

    def ran(self, row: int, generation: int) -> bool:
        """Tell whether this step ran this occupant of a row."""
        places = np.flatnonzero(self.rows == row)
        return len(places) == 1 and int(self.generations[places[0]]) == generation


class Records:
    """Unsettled steps, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> StepRecord:
        assert self._steps, "no step is in flight"
        return self._steps[0]

    def add(self, plan: StepPlan, table: RequestTable) -> StepRecord:
        """Remember a step that is being issued."""
        rows = plan.index_mapping.astype(np.intp)  # NumPy gathers several times faster by it
        generations = table.generation[rows]
        record = StepRecord(plan=plan, rows=rows, generations=generations, version=table.version)
        self._steps.append(record)
        return record

    def settle(self) -> StepRecord:
        """Forget the oldest: its result is here."""
        return self._steps.popleft()

    def num_of(self, row: int, generation: int) -> int:
        """Count the unsettled steps that ran this occupant of a row."""
        return sum(record.ran(row, generation) for record in self._steps)


def check_tokens(tokens: np.ndarray, plan: StepPlan, vocab_size: int) -> None:
    """Refuse a result that its step cannot have: one token for each row that sampled, -1 for the others.

    Raises: ProtocolError saying what is wrong.
    """
    if len(tokens) != plan.num_reqs:
        raise ProtocolError(
            f"the result carries {len(tokens)} tokens, its step ran {plan.num_reqs} requests"
        )
    sampled = tokens[plan.samples]
    if len(sampled) and not (int(sampled.min()) >= 0 and int(sampled.max()) < vocab_size):
        outside = sampled[(sampled < 0) | (sampled >= vocab_size)][0]
        raise ProtocolError(
            f"the result carries token {outside}, expected one in [0, {vocab_size})"
        )
    if len(sampled) < plan.num_reqs and (tokens[~plan.samples] != -1).any():
        raise ProtocolError("the result carries a token for a row that did not sample")
