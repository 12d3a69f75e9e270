"""Who comes first: the order of the waiting, of prompts that share a step, and who gives way.

A policy owns its waiting queue, because some orders (fair share) change while requests wait. It knows nothing of blocks
and budgets: `scheduler.py` asks for the head, and takes it only if it fits. What it must know of a request's life it is
told, in this order:

    enter -> add -> remove -> admitted -> served, once a step -> leave
              ^__________________________________|   a preempted request is added again, and not entered again

A request that ends while it waits is removed and leaves. Which policy there is by which name: `make_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from .agreement import StepPlan
from .config import SCHEDULING_POLICIES
from .fair_share import FairShare
from .first_come import FirstComeFirstServed
from .priority import Priority
from .request import Request, RequestTable

__all__ = ["FairShare", "FirstComeFirstServed", "Policy", "Priority", "make_policy"]


class Policy(Protocol):
    """What the scheduler asks of an order, and tells it."""

    @property
    def num_remembered(self) -> int:
        """Count everything that is kept of requests and users; 0 when all is over."""
        ...

    def has_room(self, user: str, max_waiting: int) -> bool:
        """Tell whether one more request of this user may wait. max_waiting: how many the queue is made for."""
        ...

    def enter(self, table: RequestTable, request: Request) -> None:
        """Hear of a new request, once and before its first `add`; its arrival is set. May set its user_index."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted and keeps its place."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out of the queue, wherever it stands: it gets a row, or it has ended."""
        ...

    def head(self) -> Request | None:
        """Name who is next; nobody overtakes a head that does not fit."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Go through the waiting."""
        ...

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Hear that a request that was just removed gets a row. num_cached_tokens: tokens of it that the prefix cache
        holds, so that they are not computed; also after a preemption (`request.num_preemptions` tells)."""
        ...

    def served(self, table: RequestTable, plan: StepPlan) -> None:
        """Hear what a step that is issued runs, once a step, while all of its requests hold their rows."""
        ...

    def leave(self, table: RequestTable, request: Request) -> None:
        """Hear that a request is over, once. It waits no more; a row that it holds is still its own."""
        ...

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        """Order rows that have more than one uncomputed token: who takes from the token budget first."""
        ...

    def victim(self, table: RequestTable) -> int:
        """Choose the row that is preempted when blocks run out. Asked only while a row is live."""
        ...


_POLICIES: dict[str, Callable[[], Policy]] = dict(
    zip(SCHEDULING_POLICIES, (FirstComeFirstServed, Priority, FairShare), strict=True)
)


def make_policy(name: str) -> Policy:
    """Make the policy of that name, with an empty queue; the config has checked the name."""
    return _POLICIES[name]()
