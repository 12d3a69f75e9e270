"""An engine's life, for whoever types or scripts it: connect, start, status, stop.

Everything an engine consists of is found again by name (actors `<name>/...` in namespace `rowcast`, one placement
group, one state file), so `stop_engine` also clears what a start that was broken off at any point has left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import placement
from .attach import connect
from .config import RAY_NAMESPACE, STOPPED, EngineSpec
from .local_ray import can_connect, is_running, stop_head
from .ray_session import RaySession, disconnect
from .state_file import EngineRecord, read_record, remove_record, write_record

__all__ = [
    "STOPPED",
    "EngineFailed",
    "EngineInfo",
    "RaySession",
    "connect",
    "engine_status",
    "start_engine",
    "stop_engine",
    "wait_engine",
]

_CALL_TIMEOUT_S = 30.0
_GONE_TIMEOUT_S = 10.0


class EngineFailed(RuntimeError):
    """The engine could not start, or is over: one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """A running engine. address is for this machine's drivers, client_address for Ray clients anywhere.

    stages: what the start consisted of, with seconds.
    """

    name: str
    model_name: str
    address: str
    client_address: str | None
    stages: tuple[tuple[str, float], ...]
    status: dict[str, Any]


def start_engine(
    spec: EngineSpec,
    session: RaySession,
    on_stage: Callable[[str, float], None] | None = None,
    *,
    on_wait: Callable[[str], None] | None = None,
    on_load: Callable[[float], None] | None = None,
) -> EngineInfo:
    """Bring an engine up and return when it takes requests.

    on_stage(stage, seconds): each stage as it is done. on_wait(sentence): what the start waits for, now and then.
    on_load(share): how much of the weights is loaded.
    Raises: ValueError for what the user has to change (a second engine of the same name, a model that does not fit);
        TimeoutError or EngineFailed otherwise. Whatever was made by this call is taken down first, on Ctrl-C too.
    """
    name = spec.cluster.name
    _refuse_second(name)
    stages: list[tuple[str, float]] = []

    def done(stage: str, seconds: float) -> None:
        stages.append((stage, seconds))
        if on_stage is not None:
            on_stage(stage, seconds)

    began = time.monotonic()
    try:
        reserved = placement.create(
            name,
            device=spec.worker.get("device", "auto"),
            num_ranks=spec.cluster.tensor_parallel_size,
            timeout_s=spec.cluster.placement_timeout_s,
            on_wait=on_wait,
        )
    except placement.GroupExists:
        raise ValueError(_taken(name)) from None
    try:
        done("reserve resources", time.monotonic() - began)
        scheduler = _create_scheduler(spec, reserved, done)
        _follow(scheduler, done, on_load)
        status = _get(scheduler.status.remote())
        record = read_record(name)
        head = record.head if record is not None else None
        if head is not None and not is_running(head):
            head = None
        write_record(
            EngineRecord(name=name, address=session.address, head=head, model_name=spec.model_name)
        )
    except _NameTaken:
        placement.remove_group(reserved.group)
        raise ValueError(_taken(name)) from None
    except BaseException:
        if _is_of(name, reserved):
            _take_down(name)
        else:
            placement.remove_group(reserved.group)
        raise
    return EngineInfo(
        name=name,
        model_name=spec.model_name,
        address=session.address,
        client_address=session.client_address,
        stages=tuple(stages),
        status=status,
    )


def engine_status(name: str = "default", address: str | None = None) -> dict[str, Any]:
    """What the engine does now: state, model, counts of requests and blocks, fronts' clients.

    Raises: ValueError when there is no such engine, or no Ray at the address.
    """
    session = _reach(name, address)
    try:
        scheduler = _actor(f"{name}/scheduler")
        if scheduler is None:
            raise ValueError(_unknown(name, session))
        import ray.exceptions

        try:
            status = _get(scheduler.status.remote())
        except ray.exceptions.RayActorError:
            raise ValueError(
                f"engine {name!r} is ending, or its scheduler died; clear up with `rowcast stop`"
            ) from None
        front = _actor(f"{name}/front-0")
        info: dict[str, Any] = {}
        if front is not None:
            with contextlib.suppress(ray.exceptions.RayActorError):  # it may end right now
                info = _get(front.info.remote())
        return status | {
            "clients": info.get("clients", 0),
            "mailbox_requests": info.get("requests", 0),
            "address": session.address,
            "client_address": session.client_address,
        }
    finally:
        session.disconnect()


def wait_engine(name: str, timeout_s: float) -> str | None:
    """Wait, connected, until the engine ends, and say why; None when it still runs after timeout_s.

    Returns: `STOPPED` when someone stopped it; any other sentence is a failure.
    """
    import ray
    import ray.exceptions

    scheduler = _actor(f"{name}/scheduler")
    if scheduler is None:
        return STOPPED
    try:
        # The scheduler itself gives up in time: a call that only we gave up would go on there.
        return ray.get(scheduler.ended.remote(timeout_s), timeout=timeout_s + _CALL_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError:
        return f"the scheduler of engine {name!r} died"


def stop_engine(name: str = "default", address: str | None = None) -> bool:
    """End an engine and all that is left of it, and its Ray head if rowcast started that. Twice is fine.

    Returns: whether there was anything to end.
    Raises: ValueError when an address was given and there is no Ray at it.
    """
    record = read_record(name)
    head = record.head if record is not None else None
    ours = head is not None and is_running(head)
    if head is not None and not ours:
        stop_head(head)  # it died: clear what it left
        remove_record(name)
        if address is None:
            return True
    if record is None and address is None and not _may_attach():
        return False
    found = False
    try:
        session = _reach(name, address)
    except ValueError:
        if address is not None and not ours:
            raise
        # The cluster does not answer (any more); a head of ours can still be ended.
    else:
        try:
            found = _take_down(name)
        finally:
            if ours:
                disconnect()  # a driver does not survive the cluster under it
            else:
                session.disconnect()
    if ours and head is not None:
        stop_head(head)
    remove_record(name)
    return found or record is not None


# ---------------------------------------------------------------- start


class _NameTaken(Exception):
    pass


def _refuse_second(name: str) -> None:
    if _actor(f"{name}/scheduler") is not None:
        raise ValueError(_taken(name))


def _taken(name: str) -> str:
    return (
        f"an engine named {name!r} is on this Ray cluster already; give this one another --name, or end that one "
        f"with `rowcast stop --name {name}`"
    )


def _create_scheduler(
    spec: EngineSpec, reserved: placement.Placement, done: Callable[[str, float], None]
) -> Any:
    """Make the scheduler actor, on rank 0's node. Its name is what settles a race of two starts."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from .scheduler_actor import SchedulerActor, scheduler_name

    began = time.monotonic()
    actor: Any = SchedulerActor
    try:
        scheduler = actor.options(
            name=scheduler_name(spec.cluster.name),
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(reserved.node_ids[0], soft=True),
        ).remote(spec, reserved)
    except ValueError as error:
        if "already" in str(error):
            raise _NameTaken from None
        raise
    _get(scheduler.begin.remote())
    done("start the scheduler", time.monotonic() - began)
    return scheduler


def _is_of(name: str, reserved: placement.Placement) -> bool:
    """Whether the scheduler of that name is the one that this start made, however far it came."""
    import ray.exceptions

    scheduler = _actor(f"{name}/scheduler")
    if scheduler is None:
        return False
    try:
        return _get(scheduler.group_id.remote()) == reserved.group.id.hex()
    except (ray.exceptions.RayError, TimeoutError):
        return True  # it died under us; only its name is left


def _follow(
    scheduler: Any,
    done: Callable[[str, float], None],
    on_load: Callable[[float], None] | None,
) -> None:
    """Pass the scheduler's stages on until it is ready.

    Raises: ValueError or EngineFailed with the sentence it ended with.
    """
    import ray.exceptions

    seen = 0
    while True:
        try:
            progress = _get(scheduler.progress.remote(seen, 0.5))
        except ray.exceptions.RayActorError:
            raise EngineFailed("the scheduler died while the engine started") from None
        for stage, seconds in progress["stages"]:
            done(stage, seconds)
        seen += len(progress["stages"])
        if on_load is not None:
            on_load(progress["loaded"])
        if progress["state"] == "ready":
            return
        if progress["state"] != "starting":
            kind, text = progress["error"] or ("engine", "the engine was stopped while it started")
            raise ValueError(text) if kind == "user" else EngineFailed(text)


# ---------------------------------------------------------------- stop


def _take_down(name: str) -> bool:
    """End the engine's actors and remove its placement group; whether there was anything. Connected already."""
    import ray.exceptions

    found = False
    scheduler = _actor(f"{name}/scheduler")
    if scheduler is not None:
        found = True
        # It tells the ranks to stop; if it cannot, they are killed all the same.
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            _get(scheduler.stop.remote())
    # The scheduler last: while it lives its name keeps a new engine of the same name away.
    names = sorted(_actor_names(name), key=lambda full: full == f"{name}/scheduler")
    for full in names:
        actor = _actor(full)
        if actor is not None:
            found = True
            ray.kill(actor, no_restart=True)
    group = placement.find_group(name)
    if group is not None:
        found = True
        placement.remove_group(group)
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline and (
        _actor_names(name) or placement.find_group(name) is not None
    ):
        time.sleep(0.05)
    return found


def _all_actor_names() -> list[str]:
    from ray.util import list_named_actors

    entries: list[Any] = list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in entries if entry["namespace"] == RAY_NAMESPACE]


def _actor_names(name: str) -> list[str]:
    return [full for full in _all_actor_names() if full.startswith(f"{name}/")]


def _actor(full_name: str) -> Any:
    """The actor's handle, or None."""
    import ray

    with contextlib.suppress(ValueError):
        return ray.get_actor(full_name, namespace=RAY_NAMESPACE)
    return None


def _get(reference: Any) -> Any:
    import ray
    import ray.exceptions

    try:
        return ray.get(reference, timeout=_CALL_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(
            f"the engine's scheduler did not answer within {_CALL_TIMEOUT_S:g} s; end the engine with `rowcast stop`"
        ) from None


# ---------------------------------------------------------------- where


def _may_attach() -> bool:
    import os

    return bool(os.environ.get("RAY_ADDRESS"))


def _reach(name: str, address: str | None) -> RaySession:
    """Connect to the cluster of an engine that is there: the address given, else where its file says."""
    record = read_record(name)
    if address is not None or record is None or not record.address:
        return connect(address, name=name, start=False)
    head = record.head
    # The port closes first when a head ends, its process goes last.
    if (head is not None and not is_running(head)) or not can_connect(record.address):
        raise ValueError(
            f"nothing answers at {record.address}, where engine {name!r} ran; if that Ray cluster is gone, "
            f"clear up with `rowcast stop --name {name}`"
        )
    session = connect(record.address, name=name)
    return session if head is None else replace(session, client_address=head.client_address)


def _unknown(name: str, session: RaySession) -> str:
    others = sorted(
        full.removesuffix("/scheduler")
        for full in _all_actor_names()
        if full.endswith("/scheduler")
    )
    known = f"; there is {', '.join(others)} (--name)" if others else ""
    return f"no engine named {name!r} runs on the Ray cluster at {session.address}{known}"
