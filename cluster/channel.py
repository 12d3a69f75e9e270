"""The sockets between scheduler, workers and fronts: ZeroMQ, whole messages, never pickle.

    scheduler PUB  -> worker SUB      frames (`scheduler/messages.py`)
    worker PUSH    -> scheduler PULL  reports (the same)
    front DEALER  <-> scheduler ROUTER  (`scheduler/front_messages.py`)

Only the scheduler binds, on the one address its workers and fronts reach it by. Knows nothing of what messages say.
A socket belongs to one thread; `Waiter.wake` is the one call here that any thread may make. Everything blocks in poll.

High-water marks are 0 because a PUB above its mark drops in silence, and a step lost is a group lost; what bounds the
queues is the scheduler, which leaves at most `depth` steps unanswered. LINGER is 0: no exit hangs on a dead peer.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

# Above any message of these kinds that this engine makes; a peer that announces more is cut off before a byte is kept.
MAX_FRAME_BYTES = 512 * 2**20
MAX_REPORT_BYTES = 64 * 2**20
MAX_FRONT_MESSAGE_BYTES = 64 * 2**20

# Outside Ray's worker ports (10002 to 19999), its client servers (23000 to 23999) and Linux' own choice (from 32768).
FIRST_PORT, LAST_PORT = 24_000, 32_000

_HANDSHAKE_MS = 10_000
_SEND_TIMEOUT_MS = 10_000
_LAST_WORDS_MS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAddresses:
    """Where one life of a worker group meets: `tcp://host:port` of the scheduler's PUB and PULL sockets."""

    publish: str
    report: str


def _new_socket(context: zmq.Context, kind: int, *, max_message_bytes: int) -> zmq.Socket:
    """Make a socket with the options that all of ours share. Keys (CurveZMQ) are to be set here, before any bind."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, max_message_bytes),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.SNDTIMEO, _SEND_TIMEOUT_MS),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 2_000),
        # A host that vanished without a word is noticed by the kernel within about a minute.
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    return socket


def _bind(socket: zmq.Socket, host: str) -> str:
    """Bind to a free port of one address of this machine and say where.

    Raises: ValueError for an address that means all interfaces; zmq.ZMQError when no port is free.
    """
    if host in ("", "*", "0.0.0.0", "::"):
        raise ValueError(f"a control socket must be bound to one address, got {host!r}")
    endpoint = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    socket.setsockopt(zmq.IPV6, int(":" in host))
    port = socket.bind_to_random_port(endpoint, FIRST_PORT, LAST_PORT)
    return f"{endpoint}:{port}"


def _connect(socket: zmq.Socket, address: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.connect(address)


def _milliseconds(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000)


def _is_readable(socket: zmq.Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _poll(socket: zmq.Socket, timeout_s: float | None) -> bool:
    """Wait until the socket can be read, or timeout_s is over."""
    if timeout_s == 0:
        return _is_readable(socket)
    return bool(socket.poll(_milliseconds(timeout_s), zmq.POLLIN))


class PublishPullChannel:
    """The scheduler's side of one worker group: broadcasts frames, takes reports."""

    def __init__(self, context: zmq.Context, host: str):
        self._publish = _new_socket(context, zmq.PUB, max_message_bytes=MAX_REPORT_BYTES)
        self._pull = _new_socket(context, zmq.PULL, max_message_bytes=MAX_REPORT_BYTES)
        self.addresses = GroupAddresses(
            publish=_bind(self._publish, host), report=_bind(self._pull, host)
        )
        self.readable = self._pull
        self.dropped_messages = 0

    def receive(self, timeout_s: float | None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while _poll(self._pull, _rest(deadline, timeout_s)):
            parts = self._pull.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 1:
                return parts[0]
            self.dropped_messages += 1
        return None

    def send(self, message: bytes) -> None:
        if len(message) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a frame of {len(message)} bytes is above the workers' limit of {MAX_FRAME_BYTES}; "
                "lower max_num_seqs or max_model_len"
            )
        self._publish.send(message)

    def close(self) -> None:
        self._publish.close()
        self._pull.close()


def _rest(deadline: float | None, timeout_s: float | None) -> float | None:
    """What is left of a time-out after something useless came in; 0 stays the cheap, exact 0."""
    if deadline is None or timeout_s == 0:
        return timeout_s
    return max(0.0, deadline - time.monotonic())


class SubscribePushChannel:
    """A worker's side: frames in, reports out."""

    def __init__(self, context: zmq.Context, addresses: GroupAddresses):
        self._subscribe = _new_socket(context, zmq.SUB, max_message_bytes=MAX_FRAME_BYTES)
        self._push = _new_socket(context, zmq.PUSH, max_message_bytes=MAX_REPORT_BYTES)
        self._subscribe.setsockopt(zmq.SUBSCRIBE, b"")
        _connect(self._subscribe, addresses.publish)
        _connect(self._push, addresses.report)

    def receive(self, timeout_s: float | None) -> bytes | None:
        if not _poll(self._subscribe, timeout_s):
            return None
        return self._subscribe.recv(zmq.NOBLOCK)

    def send(self, message: bytes) -> None:
        self._push.send(message)

    def close(self) -> None:
        self._subscribe.close()
        # The last report says why this rank stops: it gets a second to leave.
        self._push.close(linger=_LAST_WORDS_MS)


def report_once(context: zmq.Context, addresses: GroupAddresses, message: bytes) -> None:
    """Send one report on a worker's behalf, from any thread: who watches a process knows of its death first."""
    push = _new_socket(context, zmq.PUSH, max_message_bytes=MAX_REPORT_BYTES)
    _connect(push, addresses.report)
    push.send(message)
    push.close(linger=_LAST_WORDS_MS)


class RouterFronts:
    """The scheduler's side of all fronts. A front's id is the routing id that it chose; see `FrontDealer`."""

    def __init__(self, context: zmq.Context, host: str):
        self._router = _new_socket(context, zmq.ROUTER, max_message_bytes=MAX_FRONT_MESSAGE_BYTES)
        # A front that is gone is an error here, not silence; one that reconnects takes its id over.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = _bind(self._router, host)
        self.readable = self._router
        self.dropped_messages = 0

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while _poll(self._router, _rest(deadline, timeout_s)):
            parts = self._router.recv_multipart(zmq.NOBLOCK)
            if len(parts) == 2:
                return parts[0], parts[1]
            self.dropped_messages += 1
        return None

    def send(self, front_id: bytes, message: bytes) -> None:
        """Send to one front; what is for a front that left is counted and dropped."""
        try:
            self._router.send_multipart([front_id, message])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.dropped_messages += 1

    def close(self) -> None:
        # What it says last is why each request ended.
        self._router.close(linger=_LAST_WORDS_MS)


class FrontDealer:
    """A front's side, for an event loop: all calls from that loop's thread."""

    def __init__(self, context: zmq.asyncio.Context, address: str, front_id: bytes):
        dealer: Any = _new_socket(context, zmq.DEALER, max_message_bytes=MAX_FRONT_MESSAGE_BYTES)
        self._dealer: zmq.asyncio.Socket = dealer
        self._dealer.setsockopt(zmq.ROUTING_ID, front_id)
        _connect(self._dealer, address)

    async def receive(self) -> bytes:
        while True:
            parts = await self._dealer.recv_multipart()
            if len(parts) == 1:
                return parts[0]

    async def send(self, message: bytes) -> None:
        await self._dealer.send(message)

    def close(self) -> None:
        self._dealer.close()


class Waiter:
    """Sleep until one of the channels can be read or another thread calls `wake`."""

    def __init__(self, context: zmq.Context, *channels: PublishPullChannel | RouterFronts):
        address = f"inproc://wake-{id(self)}"
        self._woken = context.socket(zmq.PAIR)
        self._waker = context.socket(zmq.PAIR)
        for socket in (self._woken, self._waker):
            socket.setsockopt(zmq.LINGER, 0)
        self._woken.bind(address)
        self._waker.connect(address)
        self._lock = threading.Lock()  # makes the one sending socket everybody's, one at a time
        self._closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        for channel in channels:
            self._poller.register(channel.readable, zmq.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        self._poller.poll(_milliseconds(timeout_s))
        while _is_readable(self._woken):
            self._woken.recv(zmq.NOBLOCK)

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._waker.send(b"")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._waker.close()
        self._woken.close()
