"""Who comes first: the order of the waiting, of prompts that share a step, and who gives way.

A policy owns its waiting queue, because some orders (fair share) change while requests wait. It knows nothing of blocks
and budgets: `scheduler.py` asks for the head, and takes it only if it fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from .request import Request, RequestTable


class Policy(Protocol):
    """What the scheduler asks of an order."""

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted and keeps its place."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out of the queue, wherever it stands."""
        ...

    def head(self) -> Request | None:
        """Name who is next; nobody overtakes a head that does not fit."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """Order rows that have more than one uncomputed token: who takes from the token budget first."""
        ...

    def victim(self, table: RequestTable) -> int:
        """Choose the row that is preempted when blocks run out. Asked only while a row is live."""
        ...


class FirstComeFirstServed:
    """Arrival order in everything; the newest running request gives way.

    Nobody overtakes: a head that does not fit blocks the queue until it does. So the oldest running request is never
    preempted in favour of another, and everyone's turn comes.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # by arrival, which is unique

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        place = bisect_left(self._waiting, request.arrival, key=_arrival)
        assert self._waiting[place] is request, f"{request.request_id} does not wait"
        del self._waiting[place]

    def head(self) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort(table.arrival[rows])]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(rows[np.argmax(table.arrival[rows])])


def _arrival(request: Request) -> int:
    return request.arrival
