"""The scheduler's loop: take what fronts and workers say, settle, schedule, broadcast, answer.

Owns the sequence of frames, the handshake and what a failure of the worker group means to requests. Takes channels and
a way to wait; knows neither Ray nor sockets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from . import front_messages
from .agreement import DIGEST_BYTES, disagreement
from .deliveries import Deliveries, join
from .door import QueueFull
from .front_messages import Abort, Ack, Outputs, RefusalReason, Refused, Register, Submit
from .late_ranks import RankProgress, who_is_late
from .messages import (
    Channel,
    ControlOperation,
    Mask,
    ProtocolError,
    ResultKind,
    StepResult,
    WorkerReport,
    decode_report,
    encode_control,
    encode_hello,
    encode_mask,
    encode_step,
    peek_report,
)
from .scheduler import Scheduler


class Recorder(Protocol):
    """Whoever keeps every counted frame and every result, in the order in which they passed."""

    def frame(self, sequence: int, message: bytes) -> None: ...

    def result(self, sequence: int, message: bytes) -> None: ...


class FrontsChannel(Protocol):
    """What carries messages between the scheduler and its fronts; front_id names the peer, also across reconnects."""

    def receive(self, timeout_s: float | None) -> tuple[bytes, bytes] | None:
        """Take the next (front_id, message); None when none came within timeout_s."""
        ...

    def send(self, front_id: bytes, message: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _SentStep:
    """A step whose result is awaited: its sequence, when it was sent, the digest that every rank must report."""

    sequence: int
    sent_at: float
    digest: int


class WorkerGroupError(RuntimeError):
    """The worker group cannot go on: one sentence says which rank and what. Live requests were already answered."""


class SchedulerLoop:
    """Runs a scheduler between fronts and one life (epoch) of a worker group.

    wait(timeout_s) blocks until a channel may have something, someone woke it, or the time is over; None waits for
    ever. recorder is shown every counted frame before it leaves and every result before it is used. ask_ranks is called
    when a step is past its deadline: how far is each rank, None for one that does not answer?
    Everything but `stop` and `snapshot` belongs to one thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        workers: Channel,
        fronts: FrontsChannel,
        wait: Callable[[float | None], None],
        epoch: int,
        num_ranks: int,
        hello_interval_s: float = 0.05,
        ready_timeout_s: float = 120.0,
        step_deadline_s: float = 120.0,
        bye_timeout_s: float = 5.0,
        recorder: Recorder | None = None,
        ask_ranks: Callable[[], Sequence[RankProgress | None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._fronts = fronts
        self._wait = wait
        self._epoch = epoch
        self._num_ranks = num_ranks
        self._hello_interval_s = hello_interval_s
        self._ready_timeout_s = ready_timeout_s
        self._step_deadline_s = step_deadline_s
        self._bye_timeout_s = bye_timeout_s
        self._recorder = recorder
        self._ask_ranks = ask_ranks
        self._clock = clock
        self._sequence = 0
        self._sent: deque[_SentStep] = deque()  # unsettled steps, oldest first
        self._unmasked = 0  # the sequence of the latest step while it waits for its mask, else 0
        self._deliveries: list[Deliveries] = []  # of this turn, sent at its end
        self._stopping = threading.Event()
        self._front_names: dict[bytes, str] = {}
        self._dropped_frames = 0
        self._bad_front_messages = 0

    # ------------------------------------------------------------ life

    def handshake(self) -> None:
        """Repeat hello until every rank has answered: only then is everyone sure to hear the first step.

        Raises: TimeoutError naming the ranks that did not answer; WorkerGroupError if one reports an error.
        """
        ready: set[int] = set()
        deadline = self._clock() + self._ready_timeout_s
        while True:
            self._workers.send(encode_hello(epoch=self._epoch))
            again = self._clock() + self._hello_interval_s
            while True:
                while (report := self._next_report()) is not None:
                    self._raise_if_lost(report)
                    if report.kind is ResultKind.RESULT:
                        raise WorkerGroupError("rank 0 sent a result before any step was sent")
                    ready.add(report.rank)
                if len(ready) == self._num_ranks:
                    return
                if (left := again - self._clock()) <= 0:
                    break
                self._wait(left)
            if self._clock() >= deadline:
                missing = [rank for rank in range(self._num_ranks) if rank not in ready]
                raise TimeoutError(
                    f"ranks {missing} did not answer hello within {self._ready_timeout_s:g} s; "
                    "see their logs, and whether they can reach this node"
                )

    def turn(self, timeout_s: float | None) -> bool:
        """Make one round; wait at most timeout_s for work, and only if there was none. True if something was done.

        Raises: WorkerGroupError if the group cannot go on; every live request has been answered then.
        """
        try:
            if self._work():
                return True
            self._wait(self._patience(timeout_s))
            return self._work()
        except Exception as error:
            self._refuse_all(str(error))
            raise

    def run(self) -> None:
        """Work until `stop`, then end every request, tell the workers to stop and wait shortly for their byes."""
        while not self._stopping.is_set():
            self.turn(None)
        self._refuse_all("the engine is stopping")
        self._sequence += 1
        self._send_counted(
            encode_control(ControlOperation.STOP, epoch=self._epoch, sequence=self._sequence)
        )
        gone: set[int] = set()
        deadline = self._clock() + self._bye_timeout_s
        while len(gone) < self._num_ranks and (left := deadline - self._clock()) > 0:
            while (report := self._next_report()) is not None:
                if report.kind in (ResultKind.BYE, ResultKind.ERROR):
                    gone.add(report.rank)
            if len(gone) < self._num_ranks:
                self._wait(left)

    def stop(self) -> None:
        """Ask `run` to end, from any thread. The caller wakes `wait` itself."""
        self._stopping.set()

    def snapshot(self) -> dict[str, int | str]:
        """Count what goes on, from any thread.

        prefix_cache_queries: tokens that requests came with at their first admission; prefix_cache_hits: those of them
        that were not computed.
        """
        scheduler = self._scheduler
        return {
            "policy": scheduler.config.scheduling_policy,
            "running": scheduler.num_running,
            "waiting": len(scheduler.waiting),
            "compiling": scheduler.num_compiling,
            "free_blocks": scheduler.pool.num_free,
            "usable_blocks": scheduler.pool.usable,
            "steps": scheduler.num_steps,
            "preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.memory.cache.stats.queries,
            "prefix_cache_hits": scheduler.memory.cache.stats.hits,
            "in_flight": scheduler.num_in_flight,
            "tokens_computed": scheduler.num_tokens_computed,
            "tokens_out": scheduler.num_tokens_out,
            "dropped_frames": self._dropped_frames,
            "bad_front_messages": self._bad_front_messages,
            "fronts": len(self._front_names),
        }

    # ------------------------------------------------------------ one round

    def _work(self) -> bool:
        # Aborts come before results, so that whoever was aborted gets no token after it. The next step leaves before
        # the last one's tokens do: the workers wait for it, the fronts have time.
        heard = self._take_front_messages()
        settled = self._take_reports()
        ended = self._scheduler.drain()
        if len(ended):
            self._deliveries.append(ended)
        issued = self._issue_steps()
        self._send_outputs()
        if self._scheduler.failed:
            self._refuse_failed()
        return heard or settled or issued

    def _patience(self, timeout_s: float | None) -> float | None:
        if not self._sent:
            return timeout_s
        left = max(0.0, self._sent[0].sent_at + self._step_deadline_s - self._clock())
        return left if timeout_s is None else min(timeout_s, left)

    def _take_reports(self) -> bool:
        did = False
        while (report := self._next_report()) is not None:
            self._raise_if_lost(report)
            if report.kind is ResultKind.RESULT:
                self._settle(report)
                did = True
        if self._sent and self._clock() - self._sent[0].sent_at >= self._step_deadline_s:
            raise WorkerGroupError(
                f"step {self._sent[0].sequence} has no result after {self._step_deadline_s:g} s; {self._who_is_late()}"
            )
        return did

    def _who_is_late(self) -> str:
        if self._ask_ranks is None:
            return "a rank hangs or is gone"
        return who_is_late(self._sent[0].sequence, self._ask_ranks())

    def _settle(self, report: WorkerReport) -> None:
        assert report.result is not None, "a result report without a result"
        if not self._sent or self._sent[0].sequence != report.sequence:
            expected = f"that of step {self._sent[0].sequence}" if self._sent else "none"
            raise WorkerGroupError(
                f"rank 0 sent the result of step {report.sequence}, expected {expected}"
            )
        if report.sequence == self._unmasked:
            raise WorkerGroupError(
                f"rank 0 sent the result of step {report.sequence}, which waits for its mask"
            )
        result = report.result
        self._check_agreement(self._sent[0], result)
        try:
            self._deliveries.append(self._scheduler.settle(result.tokens, result.extras))
        except ProtocolError as error:
            raise WorkerGroupError(f"rank 0, step {report.sequence}: {error}") from None
        self._sent.popleft()

    def _check_agreement(self, sent: _SentStep, result: StepResult) -> None:
        """Compare every rank's digest with the scheduler's, before a token of the step is taken in."""
        num_digests = len(result.digests) // DIGEST_BYTES
        if num_digests != (self._num_ranks if (result.tokens >= 0).any() else 0):
            raise WorkerGroupError(
                f"rank 0, step {sent.sequence}: the result carries {num_digests} digests, expected one of each of "
                f"{self._num_ranks} ranks, and none of a step that sampled nothing"
            )
        who = disagreement(sent.digest, result.digests)
        if who is not None:
            raise WorkerGroupError(
                f"{who} at step {sent.sequence}: what it was sent, holds in its tables, runs or sampled is not the "
                "same; the engine stops rather than go on with wrong results"
            )

    def _issue_steps(self) -> bool:
        did = bool(self._unmasked) and self._send_mask()
        while not self._unmasked and len(self._sent) < self._scheduler.config.depth:
            step = self._scheduler.schedule()
            if step is None:
                break
            self._sequence += 1
            frame = encode_step(step, epoch=self._epoch, sequence=self._sequence)
            self._send_counted(frame)
            digest = self._scheduler.digests.end(frame)
            self._sent.append(_SentStep(self._sequence, self._clock(), digest))
            if len(step.masked_rows):
                self._unmasked = self._sequence
                self._send_mask()
            did = True
        return did

    def _send_mask(self) -> bool:
        """Send the mask that the latest step waits for, if it can be made yet. No step leaves before it."""
        made = self._scheduler.make_mask()
        if made is None:
            return False
        rows, bits = made
        mask = Mask(step_sequence=self._unmasked, rows=rows, bits=bits)
        self._sequence += 1
        frame = encode_mask(mask, epoch=self._epoch, sequence=self._sequence)
        self._send_counted(frame)
        digest = self._scheduler.digests.end(frame)  # the ranks fold it into their step's too
        self._sent[-1] = replace(self._sent[-1], digest=digest)
        self._unmasked = 0
        return True

    def _send_counted(self, frame: bytes) -> None:
        if self._recorder is not None:
            self._recorder.frame(self._sequence, frame)
        self._workers.send(frame)

    def _send_outputs(self) -> None:
        if not self._deliveries:
            return
        for part in join(self._deliveries).by_front():
            outputs = Outputs(
                epoch=self._epoch,
                numbers=part.numbers,
                tokens=part.tokens,
                finish_codes=part.finish_codes,
                cached_numbers=part.cached_numbers,
                cached_tokens=part.cached_tokens,
                logprobs=part.logprobs,
                prompt_logprobs=part.prompt_logprobs,
            )
            assert isinstance(part.front, bytes)
            self._fronts.send(part.front, front_messages.encode(outputs))
        self._deliveries.clear()

    # ------------------------------------------------------------ workers

    def _next_report(self) -> WorkerReport | None:
        """Take the next report of this life; drop and count what is of another, or of nobody we know."""
        while (message := self._workers.receive(0)) is not None:
            epoch, rank = peek_report(message)
            if epoch != self._epoch:
                self._dropped_frames += 1
                continue
            try:
                report = decode_report(message)
            except ProtocolError as error:
                who = "a rank" if rank is None else f"rank {rank}"
                raise WorkerGroupError(f"{who} sent a bad frame: {error}") from None
            if report.rank >= self._num_ranks:
                raise WorkerGroupError(
                    f"a worker calls itself rank {report.rank}, expected 0 to {self._num_ranks - 1}"
                )
            if self._recorder is not None and report.kind is ResultKind.RESULT:
                self._recorder.result(report.sequence, message)
            return report
        return None

    def _raise_if_lost(self, report: WorkerReport) -> None:
        if report.kind is ResultKind.ERROR:
            raise WorkerGroupError(f"rank {report.rank} failed: {report.text}")
        if report.kind is ResultKind.BYE:
            raise WorkerGroupError(f"rank {report.rank} left without being told to")

    # ------------------------------------------------------------ fronts

    def _take_front_messages(self) -> bool:
        did = False
        while (received := self._fronts.receive(0)) is not None:
            self._take_front_message(*received)
            did = True
        return did

    def _take_front_message(self, front: bytes, message: bytes) -> None:
        try:
            decoded = front_messages.decode(message)
        except ProtocolError as error:
            self._bad_front_messages += 1
            number = front_messages.peek_submit_number(message)
            if number is not None:
                self._refuse_submit(front, number, RefusalReason.INVALID, str(error))
            return
        match decoded:
            case Register():
                self._register(front, decoded.front_name)
            case Submit():
                self._submit(front, decoded)
            case Abort():
                for number in decoded.numbers.tolist():
                    self._scheduler.abort(front, number)
            case Ack():
                self._scheduler.forget(front, decoded.numbers.tolist())
            case _:
                self._bad_front_messages += 1

    def _register(self, front: bytes, name: str) -> None:
        """Know a front. One that comes under a living one's name has taken its place: the clients submit again."""
        for other in [o for o, known in self._front_names.items() if known == name and o != front]:
            del self._front_names[other]
            self._scheduler.abort_front(other)
        self._front_names[front] = name

    def _submit(self, front: bytes, submit: Submit) -> None:
        try:
            self._scheduler.add(front, submit)
        except QueueFull as error:
            self._refuse_submit(front, submit.number, RefusalReason.OVERLOADED, str(error))
        except ValueError as error:
            self._refuse_submit(front, submit.number, RefusalReason.INVALID, str(error))

    def _refuse_submit(self, front: bytes, number: int, reason: RefusalReason, text: str) -> None:
        # A bad repeat must not end the live request of that number: its front would take the refusal for that one's.
        if not self._scheduler.is_live(front, number):
            self._refuse(front, number, reason, text)

    def _refuse(self, front: bytes, number: int, reason: RefusalReason, text: str) -> None:
        refused = Refused(number=number, reason=reason, text=text)
        self._fronts.send(front, front_messages.encode(refused))

    def _refuse_failed(self) -> None:
        """Tell the fronts which requests ended by themselves, and why."""
        failed, self._scheduler.failed = self._scheduler.failed, []
        for front, number, text in failed:
            assert isinstance(front, bytes)
            self._refuse(front, number, RefusalReason.INVALID, text)

    def _refuse_all(self, text: str) -> None:
        """Answer every live request that it is over; tokens that settled before go out first."""
        self._send_outputs()
        for front, number in self._scheduler.live():
            assert isinstance(front, bytes)
            self._refuse(front, number, RefusalReason.ENGINE_FAILED, text)
