"""Sockets between the loops: nothing lost, nothing believed, nobody but the right interface."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio
from rowcast.cluster.channel import (
    MAX_FRONT_MESSAGE_BYTES,
    FrontDealer,
    PublishPullChannel,
    RouterFronts,
    SubscribePushChannel,
    Waiter,
    report_once,
)
from rowcast.scheduler.messages import (
    ControlOperation,
    ProtocolError,
    ResultKind,
    SchedulerOutput,
    StepResult,
    decode_report,
    encode_control,
    encode_error,
    encode_hello,
    encode_step,
    peek_report,
)
from rowcast.worker.loop import WorkerLoop

HOST = "127.0.0.1"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class CountingExecutor:
    """Remembers what it ran; sleeps before its first step."""

    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s = sleep_s
        self.seen: list[int] = []

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
        if not self.seen:
            time.sleep(self.sleep_s)
        self.seen.append(int(step.freed_rows[0]))
        return StepResult(tokens=step.freed_rows)


def join(channel: PublishPullChannel, ranks: int, epoch: int = 1) -> None:
    """Repeat hello until every rank has answered."""
    ready: set[int] = set()
    deadline = time.monotonic() + 10
    while len(ready) < ranks:
        assert time.monotonic() < deadline, f"only {ready} answered"
        channel.send(encode_hello(epoch=epoch))
        while (message := channel.receive(0.02)) is not None:
            if (
                peek_report(message)[0] == epoch
            ):  # as the scheduler's loop: what else comes is dropped
                ready.add(decode_report(message).rank)


def step(number: int) -> bytes:
    return encode_step(
        SchedulerOutput(freed_rows=np.array([number], np.int32)), epoch=1, sequence=number
    )


class Ranks:
    """Worker loops in threads, each with sockets of its own."""

    def __init__(self, addresses: Any, executors: list[CountingExecutor], epoch: int = 1) -> None:
        self.loops: list[WorkerLoop] = []
        self.errors: dict[int, Exception] = {}
        self._context = zmq.Context()
        self._threads = [
            threading.Thread(target=self._run, args=(rank, executor, addresses, epoch))
            for rank, executor in enumerate(executors)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, executor: CountingExecutor, addresses: Any, epoch: int) -> None:
        channel = SubscribePushChannel(self._context, addresses)
        loop = WorkerLoop(executor, channel, rank=rank, epoch=epoch)
        self.loops.append(loop)
        try:
            loop.run()
        except Exception as error:
            self.errors[rank] = error
        finally:
            channel.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank still runs"
        self._context.term()


def test_nothing_is_lost_before_every_rank_joined(context: zmq.Context) -> None:
    """W13: a PUB drops what is sent before a subscription is live; hello is repeated until all have answered."""
    channel = PublishPullChannel(context, HOST)
    executors = [CountingExecutor(), CountingExecutor()]
    ranks = Ranks(channel.addresses, executors)
    join(channel, 2)
    for number in range(1, 51):
        channel.send(step(number))
    channel.send(encode_control(ControlOperation.STOP, epoch=1, sequence=51))
    ranks.join()
    assert [e.seen for e in executors] == [list(range(1, 51))] * 2
    assert not ranks.errors
    channel.close()


def test_2000_frames_reach_a_rank_that_sleeps(context: zmq.Context) -> None:
    """W13: above its high-water mark (1,000 by default) a PUB drops in silence."""
    channel = PublishPullChannel(context, HOST)
    executors = [CountingExecutor(), CountingExecutor(sleep_s=2.0)]
    ranks = Ranks(channel.addresses, executors)
    join(channel, 2)
    for number in range(1, 2001):
        channel.send(step(number))
    channel.send(encode_control(ControlOperation.STOP, epoch=1, sequence=2001))
    ranks.join()
    assert executors[1].seen == list(range(1, 2001))
    assert {loop.sequence for loop in ranks.loops} == {2001}, "all ranks at the same frame"
    results = 0
    while (message := channel.receive(0.1)) is not None:
        results += decode_report(message).kind is ResultKind.RESULT
    assert results == 2000
    channel.close()


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([step(1), step(3)], "expected 2 got 3"),
        ([step(1), step(2), step(2)], "expected 3 got 2"),
    ],
    ids=["gap", "repeat"],
)
def test_a_gap_and_a_repeat_stop_the_rank(
    context: zmq.Context, frames: list[bytes], text: str
) -> None:
    """W13: with deltas, one lost message corrupts state in silence."""
    channel = PublishPullChannel(context, HOST)
    ranks = Ranks(channel.addresses, [CountingExecutor()])
    join(channel, 1)
    for frame in frames:
        channel.send(frame)
    ranks.join()
    assert isinstance(ranks.errors[0], ProtocolError)
    assert text in str(ranks.errors[0])
    texts = []
    while (message := channel.receive(1.0)) is not None:
        report = decode_report(message)
        texts.append(report.text)
        if report.kind is ResultKind.ERROR:
            break
    assert text in texts[-1], "the scheduler hears of it before the rank is gone"
    channel.close()


def test_an_older_epoch_is_dropped(context: zmq.Context) -> None:
    channel = PublishPullChannel(context, HOST)
    executor = CountingExecutor()
    ranks = Ranks(channel.addresses, [executor], epoch=2)
    join(channel, 1, epoch=2)
    channel.send(step(1))  # of epoch 1
    channel.send(encode_control(ControlOperation.STOP, epoch=2, sequence=1))
    ranks.join()
    assert executor.seen == []
    assert ranks.loops[0].dropped_frames == 1
    channel.close()


def test_sockets_listen_on_the_one_address_alone(context: zmq.Context) -> None:
    """R16: a control socket on all interfaces is remote code execution waiting to happen."""
    channel = PublishPullChannel(context, HOST)
    fronts = RouterFronts(context, HOST)
    ports = {
        port_of(a) for a in (channel.addresses.publish, channel.addresses.report, fronts.address)
    }
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    assert listening == {(HOST, port) for port in ports}
    assert all(24_000 <= port < 32_000 for port in ports), "Ray's worker ports are 10002 to 19999"
    channel.close()
    fronts.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_an_address_that_means_every_interface_is_refused(context: zmq.Context, host: str) -> None:
    with pytest.raises(ValueError, match="must be bound to one address"):
        PublishPullChannel(context, host)


GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\x00NULL" + bytes(48)


def bad_peer(port: int, data: bytes) -> bytes:
    """Send bytes to a port as a stranger would; what came back before it hung up."""
    with socket.create_connection((HOST, port), 2) as stranger:
        stranger.sendall(data)
        stranger.settimeout(0.3)
        received = b""
        try:
            while chunk := stranger.recv(4096):
                received += chunk
        except (TimeoutError, ConnectionError):
            pass
    return received


def ready_command(socket_type: bytes) -> bytes:
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return b"\x04" + bytes([len(body)]) + body


def test_garbage_on_every_port_hurts_nobody(context: zmq.Context) -> None:
    """R16: random bytes, a pickle, a truncated frame and one that announces 1 GB; then real peers are served."""
    channel = PublishPullChannel(context, HOST)
    fronts = RouterFronts(context, HOST)
    before = psutil.Process().memory_info().rss
    for address, kind in (
        (channel.addresses.publish, b"SUB"),
        (channel.addresses.report, b"PUSH"),
        (fronts.address, b"DEALER"),
    ):
        hello = GREETING + ready_command(kind)
        for data in (
            np.random.default_rng(3).bytes(4096),
            pickle.dumps({"a": 1}),
            hello + b"\x00\xff" + b"x" * 17,  # a frame cut short
            hello + b"\x02" + struct.pack(">Q", 2**30) + b"y" * 1000,  # 1 GB to come
        ):
            bad_peer(port_of(address), data)
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    executor = CountingExecutor()
    ranks = Ranks(channel.addresses, [executor])
    join(channel, 1)
    channel.send(step(1))
    channel.send(encode_control(ControlOperation.STOP, epoch=1, sequence=2))
    ranks.join()
    assert executor.seen == [1]
    dealer = context.socket(zmq.DEALER)
    dealer.connect(fronts.address)
    dealer.send(b"hello")
    messages = []
    while not messages or messages[-1] != b"hello":  # bytes that look like ZMTP 1.0 come through
        received = fronts.receive(5)
        assert received is not None, f"a real front was not heard, only {messages}"
        messages.append(received[1])
    dealer.close(linger=0)
    channel.close()
    fronts.close()


def test_a_message_of_several_parts_is_counted_and_dropped(context: zmq.Context) -> None:
    fronts = RouterFronts(context, HOST)
    channel = PublishPullChannel(context, HOST)
    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    dealer.connect(fronts.address)
    push.connect(channel.addresses.report)
    dealer.send_multipart([b"", b"x"])
    dealer.send(b"whole")
    push.send_multipart([b"a", b"b"])
    push.send(b"whole")
    received = fronts.receive(5)
    assert received is not None
    assert received[1] == b"whole"
    assert channel.receive(5) == b"whole"
    assert (fronts.dropped_messages, channel.dropped_messages) == (1, 1)
    dealer.close(linger=0)
    push.close(linger=0)
    channel.close()
    fronts.close()


def test_a_front_message_above_the_limit_ends_that_peer_alone(context: zmq.Context) -> None:
    fronts = RouterFronts(context, HOST)
    big, good = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for dealer in (big, good):
        dealer.connect(fronts.address)
    big.send(bytes(MAX_FRONT_MESSAGE_BYTES + 1))
    good.send(b"fine")
    received = fronts.receive(5)
    assert received is not None
    assert received[1] == b"fine"
    big.close(linger=0)
    good.close(linger=0)
    fronts.close()


def test_sending_to_a_front_that_left_is_counted_and_never_blocks(context: zmq.Context) -> None:
    fronts = RouterFronts(context, HOST)
    fronts.send(b"nobody", b"text")
    assert fronts.dropped_messages == 1
    fronts.close()


def test_wait_wakes_for_a_message_a_call_and_the_time(context: zmq.Context) -> None:
    channel = PublishPullChannel(context, HOST)
    waiter = Waiter(context, channel)
    began = time.monotonic()
    waiter.wait(0.05)
    assert time.monotonic() - began >= 0.045

    timer = threading.Timer(0.05, waiter.wake)
    timer.start()
    waiter.wait(None)  # for ever, if wake did nothing
    timer.join()

    message = encode_error(epoch=1, sequence=0, rank=1, text="gone")
    threading.Timer(0.05, report_once, (context, channel.addresses, message)).start()
    waiter.wait(None)
    assert channel.receive(0) == message
    waiter.close()
    waiter.wake()  # after the end: nothing happens
    channel.close()


def test_waking_from_many_threads_is_safe(context: zmq.Context) -> None:
    """A ZeroMQ socket belongs to one thread: the lock in wake is what makes this allowed."""
    waiter = Waiter(context)
    threads = [
        threading.Thread(target=lambda: [waiter.wake() for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    waiter.wait(None)
    for thread in threads:
        thread.join()
    waiter.wait(0.0)
    waiter.close()


def test_a_waiting_side_uses_no_cpu(context: zmq.Context) -> None:
    """R07: no busy loop while idle."""
    channel = PublishPullChannel(context, HOST)
    fronts = RouterFronts(context, HOST)
    waiter = Waiter(context, channel, fronts)
    began = time.process_time()
    waiter.wait(1.0)
    assert time.process_time() - began < 0.2
    for closable in (waiter, channel, fronts):
        closable.close()


def test_a_front_and_the_scheduler_talk_both_ways(context: zmq.Context) -> None:
    fronts = RouterFronts(context, HOST)

    async def front() -> bytes:
        own = zmq.asyncio.Context()
        dealer = FrontDealer(own, fronts.address, b"default/front-0")
        await dealer.send(b"submit")
        answer = await asyncio.wait_for(dealer.receive(), 5)
        dealer.close()
        own.term()
        return answer

    def scheduler() -> None:
        received = fronts.receive(5)
        assert received == (b"default/front-0", b"submit")
        fronts.send(received[0], b"outputs")

    thread = threading.Thread(target=scheduler)
    thread.start()
    assert asyncio.run(front()) == b"outputs"
    thread.join()
    fronts.close()
