"""The rank that died is named, not the one that noticed."""

from __future__ import annotations

from collections import deque

import numpy as np
from rowcast.cluster.first_cause import DEATH, FirstCause
from rowcast.scheduler.messages import StepResult, decode_report, encode_error, encode_result

RESET = encode_error(epoch=1, sequence=7, rank=0, text="Connection reset by peer")
DIED = encode_error(epoch=1, sequence=DEATH, rank=1, text="its process died")
RESULT = encode_result(StepResult(tokens=np.array([3], np.int32)), epoch=1, sequence=6)


class Inner:
    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.waited: list[float | None] = []

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, message: bytes) -> None:
        self.inbox.append(message)

    def close(self) -> None:
        self.inbox.clear()


class World:
    def __init__(self, hold_s: float = 2.0) -> None:
        self.now = 10.0
        self.inner = Inner()
        self.channel = FirstCause(
            self.inner, self.inner.waited.append, hold_s=hold_s, clock=lambda: self.now
        )

    def receive(self) -> bytes | None:
        return self.channel.receive(0)


def test_a_death_overtakes_the_error_it_caused() -> None:
    world = World()
    world.inner.inbox += [RESULT, RESET]
    assert world.receive() == RESULT
    assert world.receive() is None
    world.now += 1.0
    world.channel.wait(None)
    assert world.inner.waited == [1.0], "the loop must wake when the error is due"
    world.inner.inbox.append(DIED)
    received = world.receive()
    assert received is not None
    assert decode_report(received).rank == 1


def test_an_error_alone_is_told_when_its_time_is_over() -> None:
    world = World()
    world.inner.inbox += [RESET, RESET]
    assert world.receive() is None
    world.now += 1.99
    assert world.receive() is None
    world.now += 0.01
    assert world.receive() == RESET
    assert world.receive() == RESET
    assert world.receive() is None


def test_one_rank_alone_waits_for_nobody() -> None:
    world = World(hold_s=0.0)
    world.inner.inbox += [RESET]
    assert world.receive() == RESET
    world.channel.wait(None)
    assert world.inner.waited == [None]


def test_what_cannot_be_read_is_passed_on() -> None:
    world = World()
    world.inner.inbox += [b"\xc1 garbage"]
    assert world.receive() == b"\xc1 garbage"
