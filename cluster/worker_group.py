"""One life of the worker group, seen from the scheduler: its sockets, the scheduler's loop in a thread, who watches it.

Knows the ranks as Ray actors whose `run` returns when told to stop. Does not make them or kill them
(`scheduler_actor.py`), and decides nothing (`scheduler/`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions
import zmq

from ..scheduler.grammars import Grammars
from ..scheduler.kv_groups import KVGroupSpec
from ..scheduler.late_ranks import RankProgress
from ..scheduler.loop import SchedulerLoop, WorkerGroupError
from ..scheduler.messages import encode_error
from ..scheduler.recording import Life, Recorder
from ..scheduler.scheduler import Scheduler
from .channel import GroupAddresses, PublishPullChannel, RouterFronts, Waiter, report_once
from .config import EngineSpec
from .first_cause import DEATH, FirstCause
from .text import TextProcessor

_HOLD_ERROR_S = 2.0  # Ray tells of a process's death within a second
_ASK_TIMEOUT_S = 3.0  # for a rank to say how far it is; its answer takes milliseconds


class WorkerGroup:
    """`start`, then `stop`. host: the address that ranks and fronts reach the scheduler by.

    on_failure: called once, in the loop's thread, when a group that had started is over. Every request was answered.
    """

    def __init__(
        self,
        spec: EngineSpec,
        groups: tuple[KVGroupSpec, ...],
        num_blocks: int,
        host: str,
        *,
        on_failure: Callable[[Exception], None],
        recorder: Recorder | None = None,
    ) -> None:
        self._spec = spec
        self._recorder = recorder
        self._grammars = Grammars(
            TextProcessor(spec.model_dir).tokenizer_json,
            vocab_size=spec.scheduler.vocab_size,
            eos_token_ids=spec.scheduler.eos_token_ids,
            wake=self._wake,
        )
        self._scheduler = Scheduler(spec.scheduler, groups, num_blocks, grammars=self._grammars)
        self._host = host
        self._on_failure = on_failure
        self._context = zmq.Context()
        self._loop: SchedulerLoop | None = None
        self._waiter: Waiter | None = None
        self._addresses: GroupAddresses | None = None
        self._workers: Sequence[Any] = ()
        self.fronts_address = ""
        self.epoch = time.time_ns()
        self._bound = threading.Event()
        self._joined = threading.Event()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler-loop", daemon=True)

    def start(self, workers: Sequence[Any]) -> None:
        """Bind, let the ranks connect, and return when every one of them has answered hello."""
        self._workers = workers
        self._thread.start()
        self._bound.wait()
        self._raise_failure()
        runs = [worker.run.remote(self._addresses, self.epoch) for worker in workers]
        threading.Thread(target=self._watch, args=(runs,), name="watch", daemon=True).start()
        self._joined.wait()
        self._raise_failure()

    def stop(self, timeout_s: float) -> None:
        if not self._joined.is_set():
            # The handshake listens to the ranks alone.
            self._report_death(0, "the engine was stopped while it started")
        self._stopping.set()
        if self._loop is not None and self._waiter is not None:
            self._loop.stop()
            self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        """Let the loop look about it, from any thread."""
        if self._waiter is not None:
            self._waiter.wake()

    def snapshot(self) -> dict[str, Any]:
        loop = self._loop
        return {} if loop is None else loop.snapshot()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        """The loop's thread: makes every socket of it, uses them, closes them."""
        workers = fronts = waiter = None
        try:
            workers = PublishPullChannel(self._context, self._host)
            fronts = RouterFronts(self._context, self._host)
            waiter = Waiter(self._context, workers, fronts)
            cluster = self._spec.cluster
            num_ranks = cluster.tensor_parallel_size
            first = FirstCause(workers, waiter.wait, hold_s=_HOLD_ERROR_S if num_ranks > 1 else 0.0)
            loop = SchedulerLoop(
                self._scheduler,
                workers=first,
                fronts=fronts,
                wait=first.wait,
                epoch=self.epoch,
                num_ranks=num_ranks,
                ready_timeout_s=cluster.ready_timeout_s,
                step_deadline_s=cluster.step_deadline_s,
                recorder=self._recorder,
                ask_ranks=self._ask_ranks,
            )
            self._addresses, self.fronts_address = workers.addresses, fronts.address
            self._loop, self._waiter = loop, waiter
            self._bound.set()
            if self._recorder is not None:
                self._recorder.life(
                    Life.of(
                        self._scheduler,
                        epoch=self.epoch,
                        model=self._spec.model_name,
                        world_size=num_ranks,
                    )
                )
            loop.handshake()
            self._joined.set()
            loop.run()
        except Exception as error:
            # Before the group has joined, the one who waits for it raises this.
            self._failure = error if isinstance(error, WorkerGroupError) else _explained(error)
            if self._joined.is_set():
                self._on_failure(self._failure)
        finally:
            self._bound.set()
            self._joined.set()
            self._grammars.close()
            for closable in (waiter, workers, fronts):
                if closable is not None:
                    closable.close()

    def _ask_ranks(self) -> list[RankProgress | None]:
        """Ask each rank how far it is: over Ray, and not in the thread that may hang. None for one that is silent."""
        calls = [worker.progress.remote() for worker in self._workers]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ASK_TIMEOUT_S)
        progress: list[RankProgress | None] = [None] * len(calls)
        for call in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # it died meanwhile
                progress[calls.index(call)] = RankProgress(*ray.get(call))
        return progress

    def _watch(self, runs: list[Any]) -> None:
        """Tell the loop, by the socket it listens to anyway, when a rank's process ends without having said why."""
        pending = list(runs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            for run in done:
                try:
                    ray.get(run)
                except ray.exceptions.RayTaskError:
                    pass  # the rank has reported this itself
                except ray.exceptions.RayError as error:
                    self._report_death(runs.index(run), death_of(error))

    def _report_death(self, rank: int, text: str) -> None:
        if self._stopping.is_set() or self._addresses is None:
            return
        message = encode_error(epoch=self.epoch, sequence=DEATH, rank=rank, text=text)
        report_once(self._context, self._addresses, message)


def _explained(error: Exception) -> Exception:
    """A failure of our own loop, told apart from what a rank or the user did."""
    if isinstance(error, TimeoutError):
        return error
    return RuntimeError(f"the scheduler failed: {type(error).__name__}: {error}")


def death_of(error: ray.exceptions.RayError) -> str:
    """Why an actor is no more, without Ray's page of advice."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "its node ran out of memory"
    return "its process died (killed, crashed, or out of memory; the node's Ray logs may say which)"
