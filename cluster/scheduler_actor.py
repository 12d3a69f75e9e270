"""The scheduler as a Ray actor: brings one worker group up, runs the scheduler's loop in a thread, watches the ranks.

Loads no torch. Ray calls start, watch and stop the engine; requests and tokens come and go by socket alone, in the
loop's thread. When a rank dies or reports an error every request ends with a sentence, the other ranks are killed (a
survivor may be blocked in a collective, so it is never joined), and the engine stays `failed` until it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from .. import __version__
from ..scheduler.kv_groups import KVGroupSpec, agree_on_groups, describe_groups
from ..scheduler.recording import Recorder, open_recorder
from .config import RAY_NAMESPACE, STOPPED, EngineSpec
from .front import FrontActor, FrontConfig
from .network import LOOPBACK, meeting_host
from .placement import Placement, remove_group
from .worker_actor import WorkerActor
from .worker_group import WorkerGroup, death_of

_ACTOR_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_LOOK_S = 0.25


def scheduler_name(engine_name: str) -> str:
    return f"{engine_name}/scheduler"


def front_name(engine_name: str) -> str:
    return f"{engine_name}/front-0"


def worker_name(engine_name: str, rank: int) -> str:
    return f"{engine_name}/worker-{rank}"


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=16)  # pyright: ignore[reportCallIssue]
class SchedulerActor:
    """`begin`, then `progress` until ready or failed; `status` and `stop` at any time.

    State goes starting -> ready -> failed or stopped; or starting -> failed.
    """

    def __init__(self, spec: EngineSpec, placement: Placement) -> None:
        self._spec = spec
        self._placement = placement
        self._lock = threading.Condition()
        self._state = "starting"
        self._error: tuple[str, str] | None = None  # "user" or "engine", the sentence
        self._stages: list[tuple[str, float]] = []
        self._loaded = 0.0
        self._workers: list[Any] = []
        self._front: Any = None
        self._group: WorkerGroup | None = None
        self._recorder: Recorder | None = None
        self._ready_at = 0.0
        self._pids = {"scheduler": os.getpid()}

    # ------------------------------------------------------------ what others call

    def begin(self) -> None:
        """Start bringing the group up; returns at once."""
        handle = ray.get_runtime_context().current_actor
        threading.Thread(target=self._bring_up, args=(handle,), name="bring-up").start()

    def progress(self, num_seen: int, timeout_s: float) -> dict[str, Any]:
        """Wait until there are more than num_seen stages done or the start is over, at most timeout_s."""
        with self._lock:
            self._lock.wait_for(
                lambda: len(self._stages) > num_seen or self._state != "starting", timeout_s
            )
            return {
                "state": self._state,
                "stages": self._stages[num_seen:],
                "loaded": self._loaded,
                "error": self._error,
            }

    def status(self) -> dict[str, Any]:
        """What `rowcast status` shows."""
        with self._lock:
            status: dict[str, Any] = {
                "name": self._spec.cluster.name,
                "model": self._spec.model_name,
                "state": self._state,
                "error": None if self._error is None else self._error[1],
                "tensor_parallel_size": self._spec.cluster.tensor_parallel_size,
                "device": self._placement.device,
                "pids": dict(self._pids),
                "stages": list(self._stages),
                "uptime_s": time.monotonic() - self._ready_at if self._ready_at else 0.0,
            }
            group = self._group
        if group is not None:
            status |= group.snapshot()
        if self._recorder is not None:
            status["recording"] = self._recorder.describe()
        return status

    def ended(self, timeout_s: float | None = None) -> str | None:
        """Block until the engine is no more and say why; None when it still runs after timeout_s.

        Whoever waits holds one of this actor's threads even after giving up: only the front may wait for ever.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._state in ("failed", "stopped"), timeout_s):
                return None
            return self._error[1] if self._error is not None else STOPPED

    def stop(self) -> None:
        """End all requests, let the ranks say bye, end the ranks and the front. Twice is fine."""
        with self._lock:
            group = self._group
            if self._state == "starting":
                self._error = ("engine", "the engine was stopped while it started")
            if self._state != "failed":
                self._state = "stopped"
            self._lock.notify_all()
        if group is not None:
            group.stop(_STOP_TIMEOUT_S)
        self._kill_ranks()

    def group_id(self) -> str:
        """The placement group that this scheduler was made for: tells whose start it belongs to."""
        return self._placement.group.id.hex()

    def loaded_modules(self) -> list[str]:
        """Names of this process's modules: a test looks for torch among them."""
        import sys

        return sorted(sys.modules)

    # ------------------------------------------------------------ start

    def _bring_up(self, handle: Any) -> None:
        try:
            self._start_in_order(handle)
        except _Stopped:
            self._kill_ranks()
        except Exception as error:
            self._fail(error)

    def _start_in_order(self, handle: Any) -> None:
        spec, num_ranks = self._spec, self._spec.cluster.tensor_parallel_size
        if (
            spec.record is not None
        ):  # first: a file that cannot be written to is known before a model is loaded
            self._recorder = open_recorder(spec.record)
        ranks = f"{num_ranks} worker{'s' if num_ranks > 1 else ''}"

        began = time.monotonic()
        self._workers = [self._create_worker(rank) for rank in range(num_ranks)]
        facts = self._each("describe", timeout_s=_ACTOR_START_TIMEOUT_S)
        _check_versions(facts)
        self._pids |= {f"worker-{rank}": fact["pid"] for rank, fact in enumerate(facts)}
        host, hosts = self._hosts([fact["node_ip"] for fact in facts])
        self._done(f"start {ranks}", began)

        began = time.monotonic()
        groups, num_blocks = self._load(host, hosts)
        self._done(f"load {spec.model_name} on {ranks}", began)

        began = time.monotonic()
        self._each("allocate", num_blocks, timeout_s=spec.cluster.load_timeout_s)
        self._done(f"allocate {describe_groups(groups)}, and warm up", began)

        began = time.monotonic()
        group = WorkerGroup(
            spec, groups, num_blocks, host, on_failure=self._fail, recorder=self._recorder
        )
        with self._lock:
            self._group = group
        self._check_not_stopped()
        group.start(self._workers)
        self._front = self._create_front(groups, num_blocks, group.fronts_address)
        pid: Any = ray.get(self._front.start.remote(handle), timeout=_ACTOR_START_TIMEOUT_S)
        self._pids["front-0"] = pid
        threading.Thread(target=self._watch_front, name="watch-front", daemon=True).start()
        self._done("connect workers and front", began, state="ready")

    def _hosts(self, worker_ips: Sequence[str]) -> tuple[str, list[str]]:
        """The address that everyone reaches the scheduler by, and each rank's own."""
        host = meeting_host(ray.util.get_node_ip_address(), worker_ips)
        return host, [LOOPBACK if host == LOOPBACK else ip for ip in worker_ips]

    def _load(self, host: str, hosts: list[str]) -> tuple[tuple[KVGroupSpec, ...], int]:
        timeout_s = self._spec.cluster.load_timeout_s
        address = None
        if len(self._workers) > 1:
            port = ray.get(self._workers[0].pick_port.remote(hosts[0]), timeout=timeout_s)
            address = f"[{hosts[0]}]:{port}" if ":" in hosts[0] else f"{hosts[0]}:{port}"
        loads = [
            worker.load.remote(address, own_host, timeout_s)
            for worker, own_host in zip(self._workers, hosts, strict=True)
        ]
        loaded = self._gather(loads, timeout_s, "load", self._note_loaded)
        specs, counts = zip(*loaded, strict=True)
        return agree_on_groups(specs, counts)

    def _note_loaded(self) -> None:
        shares = [worker.share_loaded.remote() for worker in self._workers]
        with contextlib.suppress(ray.exceptions.RayError):  # whoever died is found by its load
            share = min(ray.get(shares, timeout=1.0))
            with self._lock:
                self._loaded = share

    def _create_worker(self, rank: int) -> Any:
        placement = self._placement
        fields = {**self._spec.worker, "device": placement.device}
        amounts: dict[str, Any] = {
            "num_cpus": placement.bundle.get("CPU", 0),
            "num_gpus": placement.bundle.get("GPU", 0),
        }
        strategy = PlacementGroupSchedulingStrategy(
            placement.group, placement_group_bundle_index=rank
        )
        worker: Any = WorkerActor  # Ray's decorator hides `options` from type checkers
        return worker.options(
            name=worker_name(self._spec.cluster.name, rank),
            namespace=RAY_NAMESPACE,
            scheduling_strategy=strategy,
            **amounts,
        ).remote(rank, len(placement.node_ids), fields)

    def _create_front(self, groups: tuple[KVGroupSpec, ...], num_blocks: int, address: str) -> Any:
        spec, name = self._spec, front_name(self._spec.cluster.name)
        # On this node: the address may be loopback.
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        front: Any = FrontActor
        return front.options(
            name=name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",  # it outlives a scheduler that dies, to tell its clients
            scheduling_strategy=node,
        ).remote(
            FrontConfig(
                engine_name=spec.cluster.name,
                front_name=name,
                model_name=spec.model_name,
                model_dir=spec.model_dir,
                scheduler_address=address,
                scheduler=spec.scheduler,
                groups=groups,
                num_blocks=num_blocks,
                mailbox_idle_s=spec.cluster.mailbox_idle_s,
            )
        )

    def _each(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        calls = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        return self._gather(calls, timeout_s, method)

    def _gather(
        self, calls: list[Any], timeout_s: float, what: str, meanwhile: Any = None
    ) -> list[Any]:
        """Every rank's answer, in rank order. The first failure counts: the others may wait for the one that failed.

        Raises: ValueError or RuntimeError naming the rank; TimeoutError naming those that did not answer.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        pending = list(calls)
        while pending:
            self._check_not_stopped()
            done, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
            for call in done:
                rank = calls.index(call)
                try:
                    answers[rank] = ray.get(call)
                except ray.exceptions.RayError as error:
                    raise _named(rank, error) from None
            if pending and time.monotonic() > deadline:
                missing = [rank for rank in range(len(calls)) if rank not in answers]
                raise TimeoutError(f"ranks {missing} did not {what} within {timeout_s:g} s")
            if pending and not done and meanwhile is not None:
                meanwhile()
        return [answers[rank] for rank in range(len(calls))]

    def _done(self, stage: str, began: float, state: str | None = None) -> None:
        with self._lock:
            self._check_not_stopped()
            self._stages.append((stage, time.monotonic() - began))
            if state is not None:
                self._state = state
                self._ready_at = time.monotonic()
            self._lock.notify_all()

    def _check_not_stopped(self) -> None:
        if self._state != "starting":
            raise _Stopped

    # ------------------------------------------------------------ end

    def _fail(self, error: Exception) -> None:
        """The engine is over. What its ranks hold is given back; `stop` does the rest."""
        kind = "user" if isinstance(error, ValueError) else "engine"
        with self._lock:
            if self._state in ("failed", "stopped"):
                return
            self._state = "failed"
            self._error = (kind, str(error) or type(error).__name__)
            self._lock.notify_all()
        self._kill_ranks()
        remove_group(self._placement.group)

    def _watch_front(self) -> None:
        """An engine without its front can be reached by nobody: it is over, not ready."""
        try:
            ray.get(self._front.stay.remote())
        except ray.exceptions.RayError as error:
            name = self._spec.cluster.name
            self._fail(
                RuntimeError(
                    f"the front of engine {name!r} is gone: {death_of(error)}; start it again"
                )
            )

    def _kill_ranks(self) -> None:
        for worker in self._workers:
            ray.kill(worker, no_restart=True)


class _Stopped(Exception):
    pass


def _named(rank: int, error: ray.exceptions.RayError) -> Exception:
    """What a rank's call failed with, in one sentence; the user's mistakes stay ValueErrors."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        text = " ".join(str(cause).split()) or type(cause).__name__
        # What Ray raises is a mixture of its error and the cause's own type.
        if isinstance(cause, ValueError):
            return ValueError(text)
        return RuntimeError(f"rank {rank} failed: {type(cause).__name__}: {text[:1000]}")
    return RuntimeError(f"rank {rank} failed: {death_of(error)}")


def _check_versions(facts: list[dict[str, Any]]) -> None:
    own = {"rowcast": __version__, "python": platform.python_version()}
    for rank, fact in enumerate(facts):
        for package, version in own.items():
            if fact[package] != version:
                raise ValueError(
                    f"rank {rank} at {fact['node_ip']} has {package} {fact[package]}, the scheduler's node "
                    f"{version}; install the same on every node"
                )
