"""What policies have in common whose order never changes while requests wait: one sorted queue, nothing to count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .agreement import StepPlan
from .request import Request, RequestTable
from .waiting_queue import WaitingQueue


class FixedOrder:
    """The waiting of a policy (`policy.py`), by a key that is unique and stays. Who gives way is the policy's own."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._waiting = WaitingQueue(key)

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
