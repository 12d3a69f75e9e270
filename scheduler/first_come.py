"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .agreement import StepPlan
from .request import Request, RequestTable
from .waiting_queue import WaitingQueue, arrival


class FirstComeFirstServed:
    """Arrival order in everything; the newest running request gives way.

    Nobody overtakes: a head that does not fit blocks the queue until it does. So the oldest running request is never
    preempted in favour of another, and everyone's turn comes.
    """

    def __init__(self) -> None:
        self._waiting = WaitingQueue(arrival)

    @property
    def num_remembered(self) -> int:
        return len(self._waiting)

    def has_room(self, user: str, max_waiting: int) -> bool:
        return len(self._waiting) < max_waiting

    def enter(self, table: RequestTable, request: Request) -> None:
        """Nothing to note."""

    def add(self, request: Request) -> None:
        self._waiting.add(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def head(self) -> Request | None:
        return self._waiting.head()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Nothing to note."""

    def served(self, table: RequestTable, plan: StepPlan) -> None:
        """Nothing to note."""

    def leave(self, table: RequestTable, request: Request) -> None:
        """Nothing to note."""

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort(table.arrival[rows])]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(rows[np.argmax(table.arrival[rows])])
