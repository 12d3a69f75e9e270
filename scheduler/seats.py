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
from .records import Records, StepRecord
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
    def num_free(self) -> int:
        """Count the vacant rows."""
        return len(self._free)

    @property
    def any_freed(self) -> bool:
        """Tell whether the workers have not heard of a vacated row."""
        return bool(self._freed)

    def take_freed(self) -> np.ndarray:
        """Name the rows that were vacated since the last call, for the workers: [n] int32, ascending."""
        freed, self._freed = self._freed, []
        return np.array(sorted(freed), np.int32)

    def enter(self, request: Request) -> None:
        """Hear of a new request."""
        self._waiting.enter(self._table, request)

    def queue(self, request: Request) -> None:
        """Let a new request wait for a row."""
        request.status = RequestStatus.WAITING
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
            self._detached.pop(request.generation, None)
            request.status = RequestStatus.FINISHED
        self._memory.let_go(requests)
        if rows:
            self.publisher.flush()
            self._memory.release(rows)
            self._vacate(rows)

    def free_rows_that_end(self) -> None:
        """Take back rows whose token in flight is their last by length; that token is delivered when it comes."""
        rows = (self._table.num_tokens >= self._table.end_len).nonzero()[0]
        if len(rows):
            self._detach(rows, RequestStatus.ENDING)

    def preempt(self, rows: np.ndarray) -> None:
        """Take row and blocks from running requests and queue them again with the tokens they have."""
        for request in self._detach(rows, RequestStatus.WAITING):
            request.num_preemptions += 1
            self._waiting.add(request)
        self.num_preemptions += len(rows)

    def _detach(self, rows: np.ndarray, status: RequestStatus) -> list[Request]:
        """Take rows back before the steps that ran them have settled; their tokens still belong to their requests.

        A request that is ENDING keeps its blocks until then, so that they can be published.
        """
        self.publisher.flush()
        table, named = self._table, rows.tolist()
        requests = [table.occupant(row) for row in named]
        num_in_flight = self._records.num_in_flight(table)[rows].tolist()
        for request, count in zip(requests, num_in_flight, strict=True):
            request.num_in_flight = count
            request.status = status
            if count:
                self._detached[request.generation] = request
            table.save_tokens(request.row)
        if status is RequestStatus.ENDING and self._memory.caching:
            self._memory.hold(named, requests)
        else:
            self._memory.release(named)
        self._vacate(named)
        return requests

    def _vacate(self, rows: list[int]) -> None:
        self._table.vacate(rows)
        self._freed.extend(rows)
        for row in rows:
            heapq.heappush(self._free, row)

    def settle_late(
        self, record: StepRecord, batch_indices: np.ndarray
    ) -> list[tuple[int, Request]]:
        """Settle a step of occupants that have left their rows since.

        Returns: those whose requests have not ended, as (batch_index, request).
        """
        late, last = [], []
        columns = (
            batch_indices,
            record.occupants.generations[batch_indices],
            record.plan.num_computed_tokens[batch_indices],
            record.plan.seq_lens[batch_indices],
        )
        for batch_index, generation, start, end in zip(*(c.tolist() for c in columns), strict=True):
            request = self._detached.get(generation)
            if request is None:
                continue
            if request.held_blocks:
                self.publisher.publish_held(request, start, end)
            request.num_in_flight -= 1
            if not request.num_in_flight:
                del self._detached[generation]
                last.append(request)
            late.append((batch_index, request))
        self._memory.let_go(last)
        return late
