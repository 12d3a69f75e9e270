"""Fair share between users: who was served least comes first.

Each user has a counter of the tokens that the engine served him, and the next request is the oldest of the waiting user
whose counter is lowest. A user who sends a thousand requests so waits for himself, and one who sends a single request
gets a row as soon as one is free.

What counts: a prompt token that is computed 1, an output token 2 (it takes a pass of its own, and its request holds its
blocks all the while). A prompt token found in the prefix cache is free, and so is what is computed again after a
preemption: that was not the user's choice. The prompt is charged when its request is admitted, so that two users who
come at the same moment get rows in turn and not one of them all; what an aborted request left uncomputed is given back.

Counters compare users while someone waits, and only then:
- a user of whom nothing waited is lifted to the least served of those who wait: having asked for less than his share
  saves up nothing;
- while nobody waits everyone gets what he asks for, whatever that is, so that nobody is owed anything. The next request
  starts the counters again, from what each user's running requests have got.
A user with nothing unfinished is forgotten. A queue that is full refuses those who wait in it already; someone of whom
nothing waits still finds a place, up to twice the queue: else one user could keep all others out at the door.

Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), which
charges prompts and outputs in the same way; the preemption rules and the new start are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .agreement import StepPlan
from .request import Request, RequestTable
from .waiting_queue import WaitingQueue, arrival

PROMPT_TOKEN = 1
OUTPUT_TOKEN = 2
_NOBODY = np.iinfo(np.int64).max  # beyond every arrival and every counter


@dataclass(kw_only=True, slots=True)
class _User:
    """Someone with unfinished requests. index: his place in the columns."""

    index: int
    num_unfinished: int = 0
    waiting: WaitingQueue = field(default_factory=lambda: WaitingQueue(arrival))


class FairShare:
    """The least served user first, and his oldest request; the most served user's newest request gives way.

    Requests that name no user are one user together. Columns by user index, int64: _served, the counter; _oldest, the
    arrival of the oldest waiting request, _NOBODY where none waits.
    """

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._by_index: list[_User | None] = []
        self._free_indices: list[int] = []
        self._served = np.zeros(0, np.int64)
        self._oldest = np.zeros(0, np.int64)
        self._num_waiting = 0

    @property
    def num_users(self) -> int:
        """Count those with something unfinished: nobody else is remembered."""
        return len(self._users)

    @property
    def num_remembered(self) -> int:
        return self._num_waiting + len(self._users)

    def tokens_served(self, user: str) -> int:
        """The counter of a user with something unfinished."""
        return int(self._served[self._users[user].index])

    # ------------------------------------------------------------ a request's life

    def has_room(self, user: str, max_waiting: int) -> bool:
        known = self._users.get(user)
        waits = known is not None and len(known.waiting) > 0
        return self._num_waiting < (max_waiting if waits else 2 * max_waiting)

    def enter(self, table: RequestTable, request: Request) -> None:
        if not self._num_waiting:
            self._start_again(table)
        user = self._users.get(request.user)
        if user is None:
            user = self._users[request.user] = self._new_user()
        user.num_unfinished += 1
        request.user_index = user.index
        if self._num_waiting and not user.waiting:
            least = self._served[self._oldest != _NOBODY].min()
            self._served[user.index] = max(self._served[user.index], least)

    def add(self, request: Request) -> None:
        user = self._users[request.user]
        user.waiting.add(request)
        self._num_waiting += 1
        self._oldest[user.index] = min(self._oldest[user.index], request.arrival)

    def remove(self, request: Request) -> None:
        user = self._users[request.user]
        user.waiting.remove(request)
        self._num_waiting -= 1
        head = user.waiting.head()
        self._oldest[user.index] = _NOBODY if head is None else head.arrival

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        if not request.num_preemptions:
            num_computed = max(0, request.num_prompt_tokens - num_cached_tokens)
            self._served[request.user_index] += PROMPT_TOKEN * num_computed

    def served(self, table: RequestTable, plan: StepPlan) -> None:
        rows = plan.index_mapping[plan.samples]
        num_outputs = np.bincount(table.user_index[rows], minlength=len(self._served))
        self._served += OUTPUT_TOKEN * num_outputs

    def leave(self, table: RequestTable, request: Request) -> None:
        if request.row >= 0 and not request.num_preemptions:
            left = request.num_prompt_tokens - int(table.num_computed_tokens[request.row])
            self._served[request.user_index] -= PROMPT_TOKEN * max(0, left)
        user = self._users[request.user]
        user.num_unfinished -= 1
        if not user.num_unfinished:
            del self._users[request.user]
            self._by_index[user.index] = None
            self._served[user.index] = 0
            self._free_indices.append(user.index)

    # ------------------------------------------------------------ the order

    def head(self) -> Request | None:
        if not self._num_waiting:
            return None
        served = np.where(self._oldest == _NOBODY, _NOBODY, self._served)
        least = np.flatnonzero(served == served.min())
        user = self._by_index[least[np.argmin(self._oldest[least])]]
        assert user is not None, "a user who waits was forgotten"
        return user.waiting.head()

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for user in self._users.values():
            yield from user.waiting

    def prompt_order(self, table: RequestTable, rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort((table.arrival[rows], self._served[table.user_index[rows]]))]

    def victim(self, table: RequestTable) -> int:
        rows = np.flatnonzero(table.live)
        return int(self.prompt_order(table, rows)[-1])

    # ------------------------------------------------------------ counters

    def _start_again(self, table: RequestTable) -> None:
        rows = np.flatnonzero(table.live)
        num_prompt_tokens = table.num_prompt_tokens[rows]
        num_outputs = table.num_tokens[rows] - num_prompt_tokens
        num_computed = np.maximum(0, num_prompt_tokens - table.num_cached_tokens[rows])
        charges = PROMPT_TOKEN * num_computed + OUTPUT_TOKEN * num_outputs
        # Weights of bincount are float64: exact up to 2**53, which no table's tokens reach.
        sums = np.bincount(table.user_index[rows], charges, minlength=len(self._served))
        self._served = sums.astype(np.int64)

    def _new_user(self) -> _User:
        if self._free_indices:
            user = _User(index=self._free_indices.pop())
            self._by_index[user.index] = user
            return user
        user = _User(index=len(self._by_index))
        self._by_index.append(user)
        if user.index == len(self._served):
            room = max(16, user.index)
            self._served = np.concatenate((self._served, np.zeros(room, np.int64)))
            self._oldest = np.concatenate((self._oldest, np.full(room, _NOBODY)))
        return user
