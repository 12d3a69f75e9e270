"""Which of a dying group's errors is the cause: the death of a rank, not the broken collective of its neighbour.

When a rank's process dies, the others fail in their next collective and report that at once; that the process is gone
is known a little later. So an error report is held for a moment, and a death that is heard of meanwhile goes first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..scheduler.messages import Channel, ProtocolError, ResultKind, decode_report

# The sequence in the report of a death, which no frame has (a rank's own error names the frame it was at).
DEATH = 2**63 - 1


class FirstCause:
    """A channel that is `inner`, but for the order of error reports. `wait` is for whoever waits on it."""

    def __init__(
        self,
        inner: Channel,
        wait: Callable[[float | None], None],
        *,
        hold_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._wait = wait
        self._hold_s = hold_s
        self._clock = clock
        self._held: deque[bytes] = deque()
        self._until = 0.0

    def receive(self, timeout_s: float | None) -> bytes | None:
        while (message := self._inner.receive(timeout_s)) is not None:
            is_error, is_death = _kind(message)
            if is_death or not is_error or not self._hold_s:
                return message
            if not self._held:
                self._until = self._clock() + self._hold_s
            self._held.append(message)
        if self._held and self._clock() >= self._until:
            return self._held.popleft()
        return None

    def wait(self, timeout_s: float | None) -> None:
        if self._held:
            left = max(0.0, self._until - self._clock())
            timeout_s = left if timeout_s is None else min(timeout_s, left)
        self._wait(timeout_s)

    def send(self, message: bytes) -> None:
        self._inner.send(message)

    def close(self) -> None:
        self._inner.close()


def _kind(message: bytes) -> tuple[bool, bool]:
    """Whether it is an error report, and whether it tells of a death. What cannot be read is the loop's to judge."""
    try:
        report = decode_report(message)
    except ProtocolError:
        return False, False
    is_error = report.kind is ResultKind.ERROR
    return is_error, is_error and report.sequence == DEATH
