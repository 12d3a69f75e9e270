"""The worker's loop: order of frames, what is reported, and how it stops."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from rowcast.scheduler.messages import (
    ControlOperation,
    Mask,
    ProtocolError,
    ResultKind,
    SchedulerOutput,
    StepResult,
    WorkerReport,
    decode_report,
    encode_control,
    encode_hello,
    encode_mask,
    encode_step,
)
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.worker.loop import WorkerLoop

EPOCH = 1_000


class Queue:
    """A channel in one process: frames in, reports out."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.reports: list[WorkerReport] = []

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.frames.popleft() if self.frames else None

    def send(self, message: bytes) -> None:
        self.reports.append(decode_report(message))

    def close(self) -> None: ...


class StateExecutor:
    """Applies steps to real tables and samples row + 500, without a model."""

    def __init__(self) -> None:
        self.state = make_state()
        self.launches = 0
        self.frames: list[bytes] = []

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
        plan = self.state.apply(step)
        self.frames.append(frame)
        if plan.num_reqs:
            self.launches += 1
        tokens = np.where(plan.samples, plan.index_mapping + 500, -1).astype(np.int32)
        self.state.commit(plan, tokens)
        return StepResult(tokens=tokens)


def make_loop(rank: int = 0, executor: object = None) -> tuple[WorkerLoop, Queue]:
    queue = Queue()
    loop = WorkerLoop(executor or StateExecutor(), queue, rank=rank, epoch=EPOCH)  # type: ignore[arg-type]
    return loop, queue


def frame(sequence: int, body: SchedulerOutput | None = None, epoch: int = EPOCH) -> bytes:
    return encode_step(body or step(), epoch=epoch, sequence=sequence)


def drain(loop: WorkerLoop) -> None:
    while loop.turn(0):
        pass


def test_every_hello_is_answered_and_none_is_counted():
    """The first ones may be lost on either way: a worker that answered once only would never be heard."""
    loop, queue = make_loop(rank=3)
    queue.frames += [encode_hello(epoch=EPOCH)] * 3 + [frame(1), encode_hello(epoch=EPOCH)]
    drain(loop)
    assert [(report.kind, report.rank) for report in queue.reports] == [(ResultKind.READY, 3)] * 4
    assert loop.sequence == 1


def test_steps_in_order_give_results_in_order():
    loop, queue = make_loop()
    queue.frames += [
        frame(1, step(request(2, [1, 2, 3]), run={2: 3}, grow=[[7]])),
        frame(2),
        frame(3, step(free=[2])),
    ]
    drain(loop)
    assert [report.sequence for report in queue.reports] == [1, 2, 3]
    tokens = [report.result.tokens.tolist() for report in queue.reports if report.result]
    assert tokens == [[502], [502], []]


def test_the_executor_gets_the_bytes_of_the_frame():
    """The digest covers what arrived, not what was made of it."""
    executor = StateExecutor()
    loop, queue = make_loop(executor=executor)
    sent = [frame(1, step(request(2, [1, 2, 3]), run={2: 3}, grow=[[7]])), frame(2)]
    queue.frames += sent
    drain(loop)
    assert executor.frames == sent


def test_how_far_a_rank_is_can_be_read_in_the_middle_of_a_step():
    seen = []

    class Slow(StateExecutor):
        def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
            seen.append((loop.sequence, loop.done))
            return super().execute(step, frame)

    loop, queue = make_loop(executor=Slow())
    queue.frames += [frame(1), frame(2)]
    drain(loop)
    assert seen == [(1, 0), (2, 1)]
    assert (loop.sequence, loop.done) == (2, 2)


class Device:
    """Launches steps and is asked for their results later; `log` tells in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails_at = 0
        self.looks = 0  # how often a step is not ready yet

    def execute(self, step: SchedulerOutput, frame: bytes) -> SimpleNamespace:
        number = len([entry for entry in self.log if entry.startswith("launch")]) + 1
        self.log.append(f"launch {number}")

        def result() -> StepResult:
            self.log.append(f"wait {number}")
            if number == self.fails_at:
                raise RuntimeError("the model computed NaN")
            return StepResult(tokens=i32(number))

        def ready() -> bool:
            self.looks -= 1
            return self.looks < 0

        return SimpleNamespace(result=result, ready=ready)


def test_steps_that_are_here_are_launched_before_the_first_is_waited_for():
    """A-08: the device goes from step to step without the host; results still come in order."""
    device = Device()
    loop, queue = make_loop(executor=device)
    queue.frames += [frame(1), frame(2)]
    drain(loop)
    assert device.log == ["launch 1", "launch 2", "wait 1", "wait 2"]
    tokens = [report.result.tokens.tolist() for report in queue.reports if report.result]
    assert tokens == [[1], [2]]
    assert [report.sequence for report in queue.reports] == [1, 2]
    queue.frames.append(frame(3))
    assert loop.turn(None)
    assert (loop.sequence, loop.done) == (3, 2)
    queue.frames.append(frame(4))
    assert loop.turn(None)
    assert device.log[4:] == ["launch 3", "launch 4"]
    drain(loop)
    assert (loop.sequence, loop.done) == (4, 4)


def test_a_frame_that_comes_while_a_step_runs_is_launched_behind_it():
    """A device that waits for the host between two steps is idle for as long as a frame travels."""
    device = Device()
    device.looks = 99
    loop, queue = make_loop(executor=device)
    receive, waited = queue.receive, []

    def late(timeout_s: float | None) -> bytes | None:
        waited.append(timeout_s)
        if len(waited) == 5:
            queue.frames.append(frame(2))
        return receive(timeout_s)

    queue.receive = late  # type: ignore[method-assign]
    queue.frames.append(frame(1))
    assert loop.turn(None)
    assert loop.turn(None)
    assert device.log == ["launch 1", "launch 2"]
    assert waited[:2] == [None, 0]
    assert all(0 < timeout_s < 0.01 for timeout_s in waited[2:] if timeout_s is not None)
    assert loop.turn(None)  # as many as the scheduler sends: now the oldest is waited for
    assert device.log[2:] == ["wait 1"]
    assert len(waited) == 6


def test_a_turn_with_a_step_under_way_does_not_wait_for_frames():
    waited = []
    device = Device()
    loop, queue = make_loop(executor=device)
    receive = queue.receive
    queue.receive = lambda timeout_s: waited.append(timeout_s) or receive(timeout_s)  # type: ignore[method-assign]
    queue.frames.append(frame(1))
    assert loop.turn(None)
    assert loop.turn(None)
    assert not loop.turn(0.5)
    assert waited == [None, 0, 0.5]


def test_a_step_that_fails_on_the_device_is_named_by_its_own_sequence():
    device = Device()
    device.fails_at = 1
    loop, queue = make_loop(rank=1, executor=device)
    queue.frames += [frame(1), frame(2)]
    with pytest.raises(RuntimeError, match="NaN"):
        drain(loop)
    (report,) = queue.reports
    assert (report.kind, report.sequence) == (ResultKind.ERROR, 1)
    assert loop.stopped


def test_stop_waits_for_the_steps_under_way():
    device = Device()
    loop, queue = make_loop(executor=device)
    queue.frames += [
        frame(1),
        frame(2),
        encode_control(ControlOperation.STOP, epoch=EPOCH, sequence=3),
    ]
    drain(loop)
    kinds = [report.kind for report in queue.reports]
    assert kinds == [ResultKind.RESULT, ResultKind.RESULT, ResultKind.BYE]
    assert loop.done == 3


def test_only_rank_0_reports_results():
    loop, queue = make_loop(rank=1)
    queue.frames.append(frame(1, step(request(2, [1]), grow=[[7]])))
    drain(loop)
    assert queue.reports == []
    assert loop.sequence == 1


def test_a_step_with_zero_tokens_updates_the_tables_and_launches_nothing():
    """S22: nothing runs, one row ends; the update still counts and the result is empty."""
    executor = StateExecutor()
    loop, queue = make_loop(executor=executor)
    queue.frames += [frame(1, step(request(2, [1]), pause=[2])), frame(2, step(free=[2]))]
    drain(loop)
    assert executor.launches == 0
    assert not executor.state.requests.live.any()
    assert [report.result.tokens.tolist() for report in queue.reports if report.result] == [[], []]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [(6, "expected 5 got 6"), (4, "expected 5 got 4"), (1, "expected 5 got 1")],
)
def test_a_gap_or_a_repeat_stops_the_rank_and_says_which(second: int, sentence: str):
    """W13: with deltas, one lost message corrupts every table after it silently."""
    executor = StateExecutor()
    loop, queue = make_loop(rank=1, executor=executor)
    queue.frames += [frame(1, step(request(2, [1]), grow=[[7]])), frame(2), frame(3), frame(4)]
    drain(loop)
    computed = int(executor.state.requests.num_computed_tokens[2])
    queue.frames.append(frame(second))
    with pytest.raises(ProtocolError, match=sentence):
        loop.turn(0)
    report = queue.reports[-1]
    assert (report.kind, report.rank, report.sequence) == (ResultKind.ERROR, 1, second)
    assert sentence in report.text
    assert executor.state.requests.num_computed_tokens[2] == computed
    queue.frames.append(frame(5))
    assert not loop.turn(0)  # it is over: nothing more is taken, not even the right one
    assert (len(queue.reports), len(queue.frames)) == (1, 1)


def test_control_and_step_frames_share_one_sequence():
    loop, queue = make_loop()
    queue.frames += [frame(1), encode_control(ControlOperation.STOP, epoch=EPOCH, sequence=3)]
    with pytest.raises(ProtocolError, match="control frame out of order: expected 2 got 3"):
        drain(loop)


def test_frames_of_an_older_epoch_are_dropped_and_counted():
    """W13: a scheduler that was replaced may still have something in a socket."""
    loop, queue = make_loop()
    queue.frames += [
        encode_hello(epoch=EPOCH - 1),
        frame(9, epoch=EPOCH - 1),
        encode_control(ControlOperation.STOP, epoch=EPOCH - 500, sequence=1),
        frame(1),
    ]
    drain(loop)
    assert loop.dropped_frames == 3
    assert (loop.sequence, loop.stopped) == (1, False)
    assert [report.kind for report in queue.reports] == [ResultKind.RESULT]


def test_a_frame_of_a_newer_epoch_stops_the_rank():
    loop, queue = make_loop()
    queue.frames.append(encode_hello(epoch=EPOCH + 1))
    with pytest.raises(ProtocolError, match="epoch 1001, this rank lives in epoch 1000"):
        loop.turn(0)
    assert queue.reports[-1].kind is ResultKind.ERROR


def test_stop_is_answered_with_bye():
    loop, queue = make_loop(rank=2)
    queue.frames += [
        frame(1),
        encode_control(ControlOperation.STOP, epoch=EPOCH, sequence=2),
        frame(3),
    ]
    loop.run()
    report = queue.reports[-1]
    assert (report.kind, report.rank, report.sequence) == (ResultKind.BYE, 2, 2)
    assert len(queue.frames) == 1
    assert not loop.turn(0)


class MaskedExecutor(StateExecutor):
    """Samples a masked step when its mask is here."""

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult | MaskedExecutor:
        if not len(step.masked_rows):
            return super().execute(step, frame)
        self.step = step
        return self

    def take_mask(self, mask: Mask, frame: bytes) -> StepResult:
        self.frames.append(frame)
        return super().execute(self.step, b"")


def mask_frame(sequence: int, step_sequence: int) -> bytes:
    mask = Mask(step_sequence=step_sequence, rows=i32(1), bits=np.ones((1, 2), np.int32))
    return encode_mask(mask, epoch=EPOCH, sequence=sequence)


MASKED = step(request(1, [5]), masked=[1], grow=[[3]])


def test_a_masked_step_has_its_result_once_its_mask_is_here():
    loop, queue = make_loop(executor=MaskedExecutor())
    queue.frames.append(frame(1, MASKED))
    drain(loop)
    assert (queue.reports, loop.sequence, loop.done) == ([], 1, 0)
    queue.frames += [mask_frame(2, 1), frame(3)]
    drain(loop)
    assert [(r.sequence, r.result.tokens.tolist()) for r in queue.reports] == [
        (1, [501]),
        (3, [501]),
    ]
    assert loop.done == 3


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([frame(1), mask_frame(2, 1)], "mask of step 1, expected none"),
        ([frame(1, MASKED), mask_frame(2, 7)], "mask of step 7, expected that of step 1"),
        ([frame(1, MASKED), mask_frame(2, 1), mask_frame(3, 1)], "mask of step 1, expected none"),
        ([frame(1, MASKED), frame(2)], "step frame 2 came before the mask of step 1"),
        ([frame(1, MASKED), mask_frame(3, 1)], "mask frame out of order: expected 2 got 3"),
    ],
)
def test_a_mask_belongs_between_its_step_and_the_next(frames: list[bytes], sentence: str):
    """Sampled by another step's mask, or by none, a row would go its own way without a word."""
    loop, queue = make_loop(executor=MaskedExecutor())
    queue.frames += frames
    with pytest.raises(ProtocolError, match=sentence):
        drain(loop)
    assert queue.reports[-1].text.startswith(sentence)


def test_stop_gives_up_a_step_that_waits_for_its_mask():
    """The scheduler stops between a step and its mask when the engine is told to."""
    loop, queue = make_loop(executor=MaskedExecutor())
    stop = encode_control(ControlOperation.STOP, epoch=EPOCH, sequence=2)
    queue.frames += [frame(1, MASKED), stop]
    loop.run()
    assert [report.kind for report in queue.reports] == [ResultKind.BYE]


def test_what_an_executor_raises_is_reported_in_one_line_and_raised_whole():
    class Broken:
        def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult:
            raise MemoryError("KV cache:\n  needs 3 GiB\n  has 1 GiB")

    loop, queue = make_loop(rank=1, executor=Broken())
    queue.frames.append(frame(1))
    with pytest.raises(MemoryError, match="needs 3 GiB"):
        loop.run()
    (report,) = queue.reports
    assert (report.kind, report.rank, report.sequence) == (ResultKind.ERROR, 1, 1)
    assert report.text == "MemoryError: KV cache: needs 3 GiB has 1 GiB"


def test_a_step_that_does_not_fit_the_tables_is_reported():
    loop, queue = make_loop()
    queue.frames.append(frame(1, step(free=[3])))
    with pytest.raises(ProtocolError, match="row 3 must be live"):
        loop.turn(0)
    assert queue.reports[-1].text == "step: freed_rows: row 3 must be live, it is free already"


def test_a_dead_channel_does_not_hide_the_error():
    class Deaf(Queue):
        def send(self, message: bytes) -> None:
            raise OSError("socket closed")

    channel = Deaf()
    loop = WorkerLoop(StateExecutor(), channel, rank=0, epoch=EPOCH)
    channel.frames.append(frame(2))
    with pytest.raises(ProtocolError, match="expected 1 got 2") as caught:
        loop.turn(0)
    assert "socket closed" in caught.value.__notes__[0]


def test_tables_and_loop_need_no_torch():
    """They are tested in milliseconds, and the control plane's benchmark measures nothing else."""
    program = (
        "import sys\n"
        "import rowcast.worker.loop, rowcast.worker.state\n"
        "assert not {'torch', 'numba', 'triton', 'ray', 'zmq'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
