"""Random, truncated and bit-flipped frames through the worker's loop: the one protocol exception, tables untouched."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.messages import (
    ProtocolError,
    SchedulerOutput,
    StepResult,
    encode_step,
)
from rowcast.tests.worker.steps import digest, make_state, request, row_arrays, step
from rowcast.tests.worker.toy_scheduler import churned
from rowcast.worker.loop import WorkerLoop
from rowcast.worker.state import WorkerState

EPOCH = 2**60  # as long on the wire as time_ns is
NUM_FRAMES = 100_000


class Mouth:
    """A channel that gives one message and forgets every report."""

    message: bytes = b""

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.message

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class Tables:
    """An executor that is nothing but the tables."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self.applied = 0

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
        self.state.apply(step)
        self.applied += 1
        return StepResult(tokens=np.empty(0, np.int32))


class Snapshot:
    """Everything the tables hold, to put back when a mutated frame turned out to be a valid one."""

    def __init__(self, state: WorkerState) -> None:
        self._arrays = {name: array.copy() for name, array in row_arrays(state).items()}
        self._request_ids = list(state.requests.request_ids)
        requests = state.requests
        self._asked = dict(requests.features), dict(requests.asking), set(requests.penalized)
        self.digest = digest(state)

    def restore(self, state: WorkerState) -> None:
        for name, array in row_arrays(state).items():
            array[...] = self._arrays[name]
        state.requests.request_ids[:] = self._request_ids
        features, asking, penalized = self._asked
        state.requests.features, state.requests.asking = dict(features), dict(asking)
        state.requests.penalized = set(penalized)


def valid_next_frames(count: int) -> list[bytes]:
    """Frames that the tables of `churned(5, 60)` would take: the same history, another whim each time."""
    frames = []
    for whim in range(count):
        toy, _ = churned(5, 60)
        toy.random.seed(whim)
        frames.append(encode_step(toy.next_step(), epoch=EPOCH, sequence=1))
    return frames


def with_other_number(frame: bytes, generator: random.Random) -> bytes:
    """Right in its form, wrong in one number of one list: what only the check against the tables can find."""
    values = msgpack.unpackb(frame, strict_map_key=False)
    lists = [(values, place) for place in range(4, len(values))]
    lists += [
        (inner, place) for inner in (values[5], values[9]) for place in range(len(inner or ()))
    ]
    lists = [(holder, place) for holder, place in lists if isinstance(holder[place], bytes)]
    holder, place = generator.choice(lists)
    numbers = bytearray(holder[place])
    if not numbers or generator.random() < 0.2:
        numbers += generator.choice((-1, 0, 1, 3, 2**31 - 1)).to_bytes(4, "little", signed=True)
    else:
        at = generator.randrange(len(numbers) // 4) * 4
        number = generator.choice((-1, 0, 1, 2, 7, generator.randrange(-(2**31), 2**31)))
        numbers[at : at + 4] = number.to_bytes(4, "little", signed=True)
    holder[place] = bytes(numbers)
    return msgpack.packb(values)


def mutate(frame: bytes, generator: random.Random) -> bytes:
    kind = generator.randrange(8)
    if kind == 0:
        return generator.randbytes(generator.randrange(200))
    if kind == 1:
        return frame[: generator.randrange(len(frame))]
    if kind >= 6:
        return with_other_number(frame, generator)
    changed = bytearray(frame)
    if kind == 2:
        changed += generator.randbytes(generator.randint(1, 8))
    elif kind == 3:  # somewhere in the middle, a piece is lost
        at = generator.randrange(len(frame))
        del changed[at : at + generator.randint(1, 8)]
    elif kind == 4:
        changed[generator.randrange(len(frame))] = generator.randrange(256)
    else:
        for _ in range(generator.randint(1, 3)):
            bit = generator.randrange(8 * len(frame))
            changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_frame_does_anything_but_raise_the_protocol_error():
    """100,000 of them. A worker that takes half a frame, or dies of anything else, breaks its whole group."""
    _, state = churned(5, 60)
    before = Snapshot(state)
    channel, executor, generator = Mouth(), Tables(state), random.Random(11)
    frames = valid_next_frames(40)
    assert len(set(frames)) > 20
    refused = 0
    for number in range(NUM_FRAMES):
        channel.message = mutate(frames[number % len(frames)], generator)
        loop = WorkerLoop(executor, channel, rank=0, epoch=EPOCH)
        taken = executor.applied
        try:
            loop.turn(0)
        except ProtocolError:
            refused += 1
            assert loop.stopped
            assert digest(state) == before.digest, channel.message.hex()
        else:
            if executor.applied > taken:  # a valid step after all: another temperature, say
                before.restore(state)
    assert digest(state) == before.digest
    assert NUM_FRAMES * 0.7 < refused < NUM_FRAMES  # most are refused, and some reach the tables
    for frame in frames:  # unharmed, they all are taken
        channel.message = frame
        WorkerLoop(executor, channel, rank=0, epoch=EPOCH).turn(0)
        before.restore(state)


int32s = st.lists(st.integers(-3, 9) | st.integers(-(2**31), 2**31 - 1), max_size=4).map(
    lambda numbers: np.array(numbers, "<i4").tobytes()
)
anything = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
)
field = int32s | int32s | st.binary(max_size=9) | anything | st.lists(int32s | anything, max_size=3)
groups = st.lists(int32s, min_size=2, max_size=2)
admitted = st.lists(field, min_size=12, max_size=12) | field
bodies = st.tuples(int32s, admitted, int32s, int32s, int32s, groups, field) | st.lists(
    field, max_size=8
)


@pytest.fixture(scope="module")
def tables() -> tuple[WorkerState, Snapshot]:
    _, state = churned(5, 60)
    return state, Snapshot(state)


@settings(max_examples=300, deadline=None, database=None)
@given(body=bodies)
def test_no_shape_of_body_does_anything_but_raise_the_protocol_error(
    tables: tuple[WorkerState, Snapshot], body: list | tuple
):
    state, before = tables
    channel, executor = Mouth(), Tables(state)
    channel.message = msgpack.packb([1, EPOCH, 1, 1, *body])
    try:
        WorkerLoop(executor, channel, rank=0, epoch=EPOCH).turn(0)
    except ProtocolError:
        assert digest(state) == before.digest
    else:
        assert executor.applied == 1
        before.restore(state)


@pytest.mark.parametrize("column", ["rows", "num_tokens", "token_ids", "num_blocks", "block_ids"])
@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
def test_extreme_numbers_in_an_admission_are_refused(column: str, value: int):
    """A length of 2**31 - 1 must not be summed, allocated or indexed with on the way to its refusal."""
    state = make_state(16)
    before = digest(state)
    wrong = step(request(1, range(20), [3], cached=16), request(2, range(9), [4]), pause=[])
    assert wrong.admissions is not None
    target = getattr(wrong.admissions, column)
    (target[0] if isinstance(target, tuple) else target)[0] = value
    channel = Mouth()
    channel.message = encode_step(wrong, epoch=EPOCH, sequence=1)
    with pytest.raises(ProtocolError):
        WorkerLoop(Tables(state), channel, rank=0, epoch=EPOCH).turn(0)
    assert digest(state) == before


PROGRAM = """
from rowcast.tests.worker.steps import digest
from rowcast.tests.worker.toy_scheduler import churned
print(digest(churned(9, 120)[1]).hex())
"""


def test_ranks_agree_on_every_row_whatever_their_hash_seed():
    """W-15: string hashing is salted per process; an order taken from a set would differ between ranks."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {digest(churned(9, 120)[1]).hex()}
