"""The most urgent first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .agreement import StepPlan
from .request import Request, RequestTable
from .waiting_queue import WaitingQueue


class Priority:
    """By the request's priority, the smaller the more urgent; among equals by arrival.

    It orders the waiting, and the prompts that share a step. A waiting request, however urgent, displaces no running
    one: it is next when a row and blocks are free. When blocks run out the least urgent running request gives way, the
    newest of equals. While urgent requests keep coming the others wait: that is what was asked for.
    """

    def __init__(self) -> None:
        self._waiting = WaitingQueue(_urgency)

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
        return rows[np.lexsort((table.arrival[rows], table.priority[rows]))]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(self.prompt_order(table, rows)[-1])


def _urgency(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
