"""Who in this process uses its one Ray connection: whoever of us leaves last ends it.

Ray knows one connection a process, and a process whose connection ends under a call is ended by Ray. A connection that
was there before us belongs to who made it: we use it, and leave it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

connecting = threading.RLock()  # held while the connection is made, joined or left
_users: set[RaySession] = set()  # of a connection that we made


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RaySession:
    """One use of this process's connection. address: host:port, or `ray://host:port`.

    client_address: where another process may connect through Ray Client, when known.
    started_by_us: this call started the cluster.
    """

    address: str
    client_address: str | None = None
    started_by_us: bool = False

    def disconnect(self) -> None:
        """Leave; what runs in the cluster goes on. A second call does nothing."""
        with connecting:
            if self in _users:
                _users.remove(self)
                if not _users:
                    disconnect()


def made(session: RaySession) -> RaySession:
    """Note that the connection was made for this session; those of an earlier connection have nothing to leave."""
    with connecting:
        _users.clear()
        _users.add(session)
    return session


def joined(session: RaySession) -> RaySession:
    """Note that this session uses the connection that is there."""
    with connecting:
        if _users:
            _users.add(session)
    return session


def disconnect() -> None:
    """End the connection, whoever uses it."""
    import ray

    with connecting:
        _users.clear()
        ray.shutdown()
