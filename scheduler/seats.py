"""Who holds a row, who waits for one, and who has left his with steps in flight.

Owns the free rows, the queue's comings and goings, and every change of a request's status but its first. Decides
nobody's turn: `scheduler.py` says who is seated or preempted, and why.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from .kv_memory import KVMemory, Offer
from .policy import Policy
from .publishing import Publisher
from .records import Records
from .request import Request, RequestStatus, RequestTable


class Seats:
    """The rows of one table. num_preemptions counts since the start."""

    def __init__(
        self, table: RequestTable, waiting: Policy, memory: KVMemory, records: Records
    ) -> None:
        self.publisher = Publisher(memory.cache, memory.blocks, table)
        self.num_preemptions = 0
        self._table = table
        self._waiting = waiting
        self._memory = memory
        self._records = records
        self._free = list(range(len(table.live)))  # a heap: the lowest row first
        self._freed: list[int] = []  # that the workers were not told of yet
        self._detached: dict[int, Request] = {}  # by generation: off its row with steps in flight
        self._generations = 0

    @property
    def num_detached(self) -> int:
        """Count the requests that have left their row with steps in flight."""
        return len(self._detached)

    @property
    def any_free(self) -> bool:
        """Tell whether a row is vacant."""
        return bool(self._free)

    @property
    def any_freed(self) -> bool:
        """Tell whether the workers have not heard of a vacated row."""
        return bool(self._freed)

    def take_freed(self) -> np.ndarray:
        """Name the rows that were vacated since the last call, for the workers: [n] int32, ascending."""
        freed, self._freed = self._freed, []
        return np.array(sorted(freed), np.int32)

    def queue(self, request: Request) -> None:
        """Let a new request wait."""
        self._waiting.enter(self._table, request)
        self._waiting.add(request)

    def seat(self, request: Request, offer: Offer) -> None:
        """Take a request out of the queue and give it a row, with what the cache has of it."""
        num_cached, is_resumed = offer.hit.num_tokens, request.generation > 0
        self._waiting.remove(request)
        self._waiting.admitted(request, num_cached)
        self._generations += 1
        request.generation = self._generations
        request.row = heapq.heappop(self._free)
        request.status = RequestStatus.RUNNING
        self._table.occupy(request.row, request, num_cached)
        self._memory.seat(request.row, offer)
        if self._memory.caching:
            self.publisher.seat(request.row, request)
            self._memory.cache.record(len(request.tokens), num_cached, resumed=is_resumed)

    def end(self, requests: Sequence[Request]) -> None:
        """Take everything back from requests, whatever their state; tokens still in flight will be dropped."""
        rows = []
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                rows.append(request.row)
            elif request.status is RequestStatus.WAITING:
                self._waiting.remove(request)
            self._waiting.leave(self._table, request)
            if self._detached.pop(request.generation, None) is not None:
                self._memory.let_go(request)
            request.status = RequestStatus.FINISHED
        if rows:
            self._memory.release(rows)
            self._vacate(rows)

    def free_rows_that_end(self) -> None:
        """Take back rows whose token in flight is their last by length; that token is delivered when it comes."""
        for row in np.flatnonzero(self._table.num_tokens >= self._table.end_len).tolist():
            self._detach(row, RequestStatus.ENDING)

    def preempt(self, row: int) -> None:
        """Take row and blocks from a running request and queue it again with the tokens it has."""
        request = self._detach(row, RequestStatus.WAITING)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)

    def _detach(self, row: int, status: RequestStatus) -> Request:
        """Take a row back before the steps that ran it have settled; their tokens still belong to its request.

        A request that is ENDING keeps its blocks until then, so that they can be published.
        """
        request = self._table.occupant(row)
        request.num_in_flight = self._records.num_of(row, request.generation)
        if request.num_in_flight:
            self._detached[request.generation] = request
        if status is RequestStatus.ENDING and self._memory.caching:
            self._memory.hold(row, request)
        else:
            self._memory.release([row])
        self._table.save_tokens(row)
        self._vacate([row])
        request.status = status
        return request

    def _vacate(self, rows: list[int]) -> None:
        self._table.vacate(rows)
        self._freed.extend(rows)
        for row in rows:
            heapq.heappush(self._free, row)

    def settle_late(self, generation: int, start: int, end: int) -> Request | None:
        """Settle a step of an occupant that has left its row since: it computed the tokens start .. end.

        Returns: its request, None if that has ended.
        """
        request = self._detached.get(generation)
        if request is None:
            return None
        if request.held_blocks:
            self.publisher.publish_held(request, start, end)
        request.num_in_flight -= 1
        if not request.num_in_flight:
            del self._detached[generation]
            self._memory.let_go(request)
        return request
