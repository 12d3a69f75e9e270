"""Frames in, results out: the plain loop of one rank. It takes a channel and knows neither Ray nor sockets.

Owns the order of frames (epoch and sequence) and what is reported when. Knows nothing of tables or models: an executor
carries out a step. A rank that meets anything wrong says so once and stops; it never guesses and goes on.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from ..scheduler.messages import (
    Channel,
    ControlOperation,
    Frame,
    FrameKind,
    Mask,
    ProtocolError,
    SchedulerOutput,
    StepResult,
    decode_frame,
    encode_bye,
    encode_error,
    encode_ready,
    encode_result,
)

_MAX_REASON = 2_000
_LOOK_S = 0.001  # while a step runs on a device and its successor is not here: steps take longer, frames come sooner


class Pending(Protocol):
    """A step that was launched on a device."""

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Wait for it. Called once, in step order."""
        ...


class Unmasked(Protocol):
    """A step that is carried out, or launched, up to its sampling."""

    def take_mask(self, mask: Mask, frame: bytes) -> StepResult | Pending:
        """Sample. frame is the message that brought the mask, for the digest.

        Raises: ProtocolError if the mask does not fit the step.
        """
        ...


class Executor(Protocol):
    """What carries out a step: `ModelRunner`, or a fake in tests."""

    def execute(self, step: SchedulerOutput, frame: bytes) -> StepResult | Pending | Unmasked:
        """Carry out a step, or launch it; frame is the message that brought it, for the digest.

        Returns: Unmasked if the step has masked rows, and never otherwise.
        """
        ...


class WorkerLoop:
    """One rank's loop over one life (epoch) of the worker group.

    Frames of an older epoch are dropped and counted in `dropped_frames`; `sequence` is that of the last frame taken,
    `done` that of the last one carried out. Other threads may read them. depth: as the scheduler's.
    """

    def __init__(
        self, executor: Executor, channel: Channel, *, rank: int, epoch: int, depth: int = 2
    ) -> None:
        self._executor = executor
        self._channel = channel
        self.rank = rank
        self.epoch = epoch
        self._depth = depth
        self.sequence = 0
        self.done = 0
        self.dropped_frames = 0
        self.stopped = False
        self._sequence_seen = 0  # of the frame in hand, for the error report
        self._pending: deque[tuple[int, Pending]] = (
            deque()
        )  # launched steps by sequence, oldest first
        self._unmasked: tuple[int, Unmasked] | None = None  # the step that waits for its mask

    def run(self) -> None:
        """Serve until told to stop. Raises whatever stopped it otherwise, after reporting it."""
        while not self.stopped:
            self.turn(None)

    def turn(self, timeout_s: float | None) -> bool:
        """Take one frame, waiting at most timeout_s (None: as long as it takes); False when none came.

        While a step is under way on a device the turn waits for the next frame, to launch it behind that step, or for
        the step's end, whichever comes first; with timeout_s 0, for its end.

        Raises: ProtocolError for a frame that does not belong here, or what the executor raised. Either was reported to
            the scheduler in one sentence first, and the loop is over.
        """
        if self.stopped:
            return False
        message = self._next_message(timeout_s)
        if message is None and not self._pending:
            return False
        self._sequence_seen = self.sequence
        try:
            if message is None:
                self._finish_oldest()
            else:
                self._take(decode_frame(message), message)
        except Exception as error:
            self.stopped = True
            self._report(error)
            raise
        return True

    def _next_message(self, timeout_s: float | None) -> bytes | None:
        if not self._pending:
            return self._channel.receive(timeout_s)
        message = self._channel.receive(0)
        if timeout_s == 0 or len(self._pending) >= self._depth:
            return message
        while message is None and not self._pending[0][1].ready():
            message = self._channel.receive(_LOOK_S)
        return message

    def _take(self, frame: Frame, message: bytes) -> None:
        if frame.epoch < self.epoch:
            self.dropped_frames += 1
            return
        if frame.epoch > self.epoch:
            raise ProtocolError(
                f"{frame.kind.name.lower()} frame of epoch {frame.epoch}, this rank lives in epoch "
                f"{self.epoch}; it belongs to a group that has been replaced"
            )
        if frame.kind is FrameKind.HELLO:
            self._channel.send(encode_ready(epoch=self.epoch, rank=self.rank))
            return
        self._sequence_seen = frame.sequence
        expected = self.sequence + 1
        if frame.sequence != expected:
            why = "frames were lost" if frame.sequence > expected else "that one was taken already"
            raise ProtocolError(
                f"{frame.kind.name.lower()} frame out of order: expected {expected} got "
                f"{frame.sequence}; {why}"
            )
        self.sequence = frame.sequence
        body = frame.body
        if isinstance(body, SchedulerOutput):
            if self._unmasked is not None:
                raise ProtocolError(
                    f"step frame {frame.sequence} came before the mask of step {self._unmasked[0]}"
                )
            outcome = self._executor.execute(body, message)
            if len(body.masked_rows):
                self._unmasked = frame.sequence, cast(Unmasked, outcome)
            else:
                self._note(frame.sequence, cast("StepResult | Pending", outcome))
        elif isinstance(body, Mask):
            self._take_mask(body, message)
        else:
            assert body is ControlOperation.STOP, body  # a step that waits for its mask is given up
            while self._pending:
                self._finish_oldest()
            self.stopped = True
            self.done = frame.sequence
            self._channel.send(
                encode_bye(epoch=self.epoch, sequence=frame.sequence, rank=self.rank)
            )

    def _take_mask(self, mask: Mask, message: bytes) -> None:
        waiting, expected = self._unmasked, "none"
        if waiting is not None:
            expected = f"that of step {waiting[0]}"
        if waiting is None or mask.step_sequence != waiting[0]:
            raise ProtocolError(f"mask of step {mask.step_sequence}, expected {expected}")
        sequence, step = waiting
        outcome = step.take_mask(mask, message)
        self._unmasked = None
        self._note(sequence, outcome)

    def _note(self, sequence: int, outcome: StepResult | Pending) -> None:
        if isinstance(outcome, StepResult):
            self._deliver(sequence, outcome)
        else:
            self._pending.append((sequence, outcome))

    def _finish_oldest(self) -> None:
        sequence, step = self._pending.popleft()
        self._sequence_seen = sequence
        self._deliver(sequence, step.result())

    def _deliver(self, sequence: int, result: StepResult) -> None:
        if self.rank == 0:
            self._channel.send(encode_result(result, epoch=self.epoch, sequence=sequence))
        self.done = sequence

    def _report(self, error: Exception) -> None:
        """Send the one error report. A channel that cannot carry it must not hide what went wrong."""
        try:
            self._channel.send(
                encode_error(
                    epoch=self.epoch,
                    sequence=self._sequence_seen,
                    rank=self.rank,
                    text=_one_sentence(error),
                )
            )
        except Exception as send_error:
            error.add_note(f"rank {self.rank} could not report this either: {send_error!r}")


def _one_sentence(error: Exception) -> str:
    """What went wrong on one line; the full traceback stays with the exception in this process."""
    reason = " ".join(str(error).split())[:_MAX_REASON]
    if isinstance(error, ProtocolError):
        return reason
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
