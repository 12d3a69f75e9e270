"""Who is known: unfinished requests by front and number, their ids and submit keys, ended ones until acknowledged.

Owns every dictionary that a request's life leaves an entry in, so that one place shows that nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .request import Request

Owner = tuple[int, int]  # front index, number
Key = tuple[bytes, int]  # submit key, n-index


class Registry:
    """Maps what fronts say to requests. Fronts are numbered as they are first heard of; no number comes twice."""

    def __init__(self) -> None:
        self.fronts: dict[int, Hashable] = {}
        self._num_fronts_ever = 0
        self._index_of_front: dict[Hashable, int] = {}
        self._live: dict[Owner, Request] = {}
        self._live_ids: dict[str, set[Key]] = {}  # request_id -> the keys that use it
        self._owners: dict[Key, Owner] = {}  # unfinished, or not acknowledged
        self._unacknowledged: dict[Owner, Key] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """Go through the unfinished requests in the order in which they came."""
        return iter(self._live.values())

    @property
    def num_entries(self) -> int:
        """Count all that is remembered of requests; 0 once all have ended and were acknowledged."""
        return len(self._live) + len(self._live_ids) + len(self._owners) + len(self._unacknowledged)

    def front_index(self, front: Hashable) -> int:
        """Number a front, a new one too."""
        index = self._index_of_front.get(front)
        if index is None:
            index = self._index_of_front[front] = self._num_fronts_ever
            self.fronts[index] = front
            self._num_fronts_ever += 1
        return index

    def find(self, front: Hashable, number: int) -> Request | None:
        """Find an unfinished request."""
        return self._live.get((self._index_of_front.get(front, -1), number))

    def owner(self, key: Key) -> Owner | None:
        """Say under which front and number a submit key is known, unfinished or not acknowledged."""
        return self._owners.get(key)

    def check_new(self, request: Request) -> None:
        """Raises: ValueError if the number was used, or another live request has this request_id."""
        owner = (request.front_index, request.number)
        if owner in self._live or owner in self._unacknowledged:
            raise ValueError(
                f"request {request.request_id}: its front has used number {request.number} already"
            )
        submit_key = request.key[0]
        if any(key[0] != submit_key for key in self._live_ids.get(request.request_id, ())):
            raise ValueError(
                f"request {request.request_id}: a live request has this id; wait for its end or choose another id"
            )

    def enter(self, request: Request) -> None:
        """Know a request from now on."""
        owner = (request.front_index, request.number)
        self._live[owner] = request
        self._owners[request.key] = owner
        self._live_ids.setdefault(request.request_id, set()).add(request.key)

    def leave(self, request: Request) -> None:
        """Count a request as ended; its key stays known until its front acknowledges."""
        owner = (request.front_index, request.number)
        del self._live[owner]
        self._unacknowledged[owner] = request.key
        keys = self._live_ids[request.request_id]
        keys.remove(request.key)
        if not keys:
            del self._live_ids[request.request_id]

    def forget(self, front: Hashable, number: int) -> None:
        """Drop the key of an ended request. What is live or unknown is ignored."""
        key = self._unacknowledged.pop((self._index_of_front.get(front, -1), number), None)
        if key is not None:
            del self._owners[key]

    def forget_front(self, front: Hashable) -> int | None:
        """Drop a front whose requests have all ended, and their keys; returns its index, None if it is unknown."""
        index = self._index_of_front.pop(front, None)
        if index is None:
            return None
        del self.fronts[index]
        for owner in [owner for owner in self._unacknowledged if owner[0] == index]:
            del self._owners[self._unacknowledged.pop(owner)]
        return index

    def of_front(self, front: Hashable) -> list[Request]:
        """List a front's unfinished requests."""
        index = self._index_of_front.get(front, -1)
        return [request for request in self._live.values() if request.front_index == index]
