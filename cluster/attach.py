"""Connect this process to a Ray cluster, as an ordinary driver or through Ray Client (`ray://`), or say why not.

Ray itself takes 20 to 30 seconds and several pages to say that a token is missing. So each address is asked first, with
one call that answers in milliseconds; what it refuses becomes one sentence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .config import RAY_NAMESPACE
from .local_ray import (
    can_connect,
    has_token,
    is_running,
    split_address,
    start_head,
    stop_head,
)
from .ray_session import RaySession, connecting, joined, made
from .state_file import (
    EngineRecord,
    HeadRecord,
    known_engines,
    read_record,
    records_locked,
    remove_record,
    write_record,
)

OnStage = Callable[[str, float], None]

_PROBE_TIMEOUT_S = 4.0
_CLIENT_ATTEMPTS = 3
_RECONNECT = "RAY_CLIENT_RECONNECT_GRACE_PERIOD"
_RECONNECT_S = 5  # Ray's own 30 s are how long a stream would hang when the cluster is gone
_DIED_AT_BIRTH = ("client server failed", "session that has already been cleaned up")


def connect(
    address: str | None,
    *,
    name: str = "default",
    start: bool = True,
    client_port: int | None = None,
    on_stage: OnStage | None = None,
) -> RaySession:
    """Attach to the Ray cluster that the user means, or (start) start a local one.

    address: host:port, `ray://host:port`, "auto" (RAY_ADDRESS, else engine `name`'s own head, else the one Ray finds on
        this machine), or None: RAY_ADDRESS, else engine `name`'s own head, else a new one if `start`.
    Raises: ValueError with one sentence when there is no usable Ray at the address.
    """
    with connecting:
        return _connect(address, name, start, client_port, on_stage)


def _connect(
    address: str | None,
    name: str,
    start: bool,
    client_port: int | None,
    on_stage: OnStage | None,
) -> RaySession:
    began = time.monotonic()
    _use_token_if_there_is_one()
    if (session := _existing_connection(address)) is not None:
        return joined(session)
    _quiet()
    wanted, origin = address, "the address given"
    if address in (None, "auto") and (wanted := os.environ.get("RAY_ADDRESS") or None):
        origin = "RAY_ADDRESS"
    if wanted not in (None, "auto"):
        session = RaySession(
            address=wanted, client_address=wanted if wanted.startswith("ray://") else None
        )
        _join(wanted, origin)
    elif (record := read_record(name)) is not None and record.head and is_running(record.head):
        if not can_connect(record.head.address):
            raise ValueError(_busy(name))
        session = RaySession(address=record.head.address, client_address=record.head.client_address)
        _join(record.head.address, f"the Ray head of engine {name!r}")
    elif address == "auto":
        session = RaySession(address=_find_local())
        _join(session.address, "Ray on this machine")
    elif start:
        return made(_start(name, client_port, on_stage))
    else:
        others = ", ".join(known_engines())
        known = f" ({others} {'is' if ',' not in others else 'are'}: see --name)" if others else ""
        raise ValueError(
            f"engine {name!r} is not known on this machine{known} and no Ray address was given; start one with "
            "`rowcast serve MODEL`, or name its cluster with --address or RAY_ADDRESS"
        )
    if on_stage is not None:
        on_stage("connect to Ray", time.monotonic() - began)
    return made(session)


def _start(name: str, client_port: int | None, on_stage: OnStage | None) -> RaySession:
    began = time.monotonic()
    _use_token(force=True)
    head = None
    with contextlib.ExitStack() as lock:
        lock.enter_context(records_locked())
        if (old := read_record(name)) is not None and old.head is not None:
            if is_running(old.head):  # since this call looked
                raise ValueError(_busy(name))
            stop_head(old.head)  # it is dead; this clears what it left

        def record(head: HeadRecord) -> None:
            write_record(EngineRecord(name=name, address=head.address, head=head))
            lock.close()  # whoever looks now sees it

        try:
            head = start_head(name, client_port=client_port, record=record)
            if on_stage is not None:
                on_stage("start Ray", time.monotonic() - began)
            began = time.monotonic()
            _join(head.address, "the Ray just started")
        except BaseException:
            if head is not None:
                stop_head(head)
            remove_record(name)
            raise
    if on_stage is not None:
        on_stage("connect to Ray", time.monotonic() - began)
    return RaySession(address=head.address, client_address=head.client_address, started_by_us=True)


def _busy(name: str) -> str:
    return (
        f"engine {name!r} is being started or stopped by another process; wait for that, choose another name, "
        f"or end it with `rowcast stop --name {name}`"
    )


# ---------------------------------------------------------------- token and noise


def _use_token_if_there_is_one() -> None:
    if "RAY_AUTH_MODE" not in os.environ and has_token():
        _use_token()


def _use_token(*, force: bool = False) -> None:
    """Turn token authentication on for this process. Ray has read the mode by now if it is loaded: it reads again."""
    if force or "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    from ray import _raylet

    core: Any = _raylet  # compiled: a type checker sees nothing of it

    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _quiet() -> None:
    """Keep Ray's own chatter out of our user's terminal: its log files have it all.

    Ray Client prints the cluster's logs through the second one, and sets levels again whenever it connects.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    for noisy in ("ray.client_builder", "ray.util.client.logsclient", "ray.util.client.dataclient"):
        logging.getLogger(noisy).disabled = True
    # Ray Client warns of 10 MB sent in all, ever. A long list of prompts is more, and goes in batches.
    warnings.filterwarnings("ignore", message="More than 10MB", module="ray.util.client")
    import ray._private.worker as core

    # A driver prints "(raylet) A worker died ..." to stdout, whatever log_to_driver says. We say it in one sentence.
    core.print_to_stdstream = _say_nothing


def _say_nothing(data: Any, ignore_prefix: bool) -> None:
    """Stands in for Ray's printing of the cluster's events."""


# ---------------------------------------------------------------- connections


def _existing_connection(address: str | None) -> RaySession | None:
    """The connection this process already has: Ray allows one.

    Raises: ValueError if the user asks for another cluster than that one.
    """
    import ray
    from ray.util.client import ray as ray_client

    if ray_client.is_connected():
        worker: Any = ray_client.get_context().client_worker
        current = worker._conn_str
        current = f"ray://{current}"
    elif ray.is_initialized():
        current = ray.get_runtime_context().gcs_address
    else:
        return None
    if address not in (None, "auto", current) and not _same_place(address, current):
        raise ValueError(
            f"this process is connected to Ray at {current}, so it cannot also use {address}; "
            "call ray.shutdown() first, or leave the address out"
        )
    return RaySession(
        address=current,
        client_address=current if current.startswith("ray://") else None,
    )


def _same_place(first: str, second: str) -> bool:
    """Whether two addresses may mean one cluster: the same port, and of hosts only both names are known."""
    return (
        first.startswith("ray://") == second.startswith("ray://")
        and split_address(first)[1] == split_address(second)[1]
    )


def _find_local() -> str:
    """The cluster that `ray start` on this machine recorded last, else the only one that runs here."""
    import ray._private.services as services

    recorded = services.find_bootstrap_address(None)
    if recorded and can_connect(recorded):
        return recorded
    found = sorted(services.find_gcs_addresses())
    if not found:
        raise ValueError(
            "found no Ray on this machine; start one with `ray start --head`, let `rowcast serve` start it, "
            "or give an address"
        )
    if len(found) > 1:
        raise ValueError(
            f"several Ray clusters run here ({', '.join(found)}); say which with an address"
        )
    return found[0]


def _join(address: str, origin: str) -> None:
    """Probe, then ray.init.

    Raises: ValueError with one sentence.
    """
    _probe(address, origin)
    import ray

    if address.startswith("ray://"):
        _join_as_client(address, origin)
        return
    try:
        ray.init(
            address=address,
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except Exception as error:
        ray.shutdown()
        raise ValueError(_sentence(error, address, origin)) from error


def _join_as_client(address: str, origin: str) -> None:
    import ray
    from ray.util.client import ray as ray_client
    from ray.util.client.logsclient import LogstreamClient

    # Leaving waits for the log stream, which a server that never came up keeps open for half a minute.
    LogstreamClient.close = _close_log_stream
    for attempt in range(_CLIENT_ATTEMPTS):
        try:
            with _reconnect_soon():
                ray.init(address=address, namespace=RAY_NAMESPACE)
            worker: Any = ray_client.get_context().client_worker
            worker.log_client.disable_logs()
            return
        except Exception as error:
            with contextlib.suppress(Exception):  # half a connection: Ray may not know it
                ray.shutdown()
            # The proxy starts a server for each client, and on a busy machine that one now and then dies at birth.
            if attempt + 1 < _CLIENT_ATTEMPTS and any(
                sign in str(error) for sign in _DIED_AT_BIRTH
            ):
                continue
            raise ValueError(_sentence(error, address, origin)) from error


@contextlib.contextmanager
def _reconnect_soon() -> Iterator[None]:
    """Ray Client reads here how long a broken connection may take to come back; what the user set stays."""
    if _RECONNECT in os.environ:
        yield
        return
    os.environ[_RECONNECT] = str(_RECONNECT_S)
    try:
        yield
    finally:
        os.environ.pop(_RECONNECT, None)


def _close_log_stream(self: Any) -> None:
    """Stands in for Ray's: the same, but the thread (a daemon) is not waited for."""
    self.request_queue.put(None)
    self.log_thread.join(timeout=0.5)


def _probe(address: str, origin: str) -> None:
    """Ask what listens at the address.

    Raises: ValueError with one sentence: nobody, not Ray, a wrong port of Ray, or a token that it does not accept.
    """
    host, port = split_address(address)
    if not can_connect(address, _PROBE_TIMEOUT_S):
        remedy = (
            "unset RAY_ADDRESS, or start Ray there"
            if origin == "RAY_ADDRESS"
            else ("start it with `ray start --head`, or leave the address out to start a local one")
        )
        raise ValueError(f"nothing answers at {address} ({origin}); {remedy}")
    import grpc
    import ray.exceptions
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import (
        gcs_service_pb2,
        gcs_service_pb2_grpc,
        ray_client_pb2,
        ray_client_pb2_grpc,
    )

    gcs: Any = gcs_service_pb2  # generated: a type checker sees nothing of these two
    client: Any = ray_client_pb2
    is_client = address.startswith("ray://")
    channel: Any = init_grpc_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        if is_client:
            request = client.ClusterInfoRequest(type=client.ClusterInfoType.PING)
            stub: Any = ray_client_pb2_grpc.RayletDriverStub(channel)
            stub.ClusterInfo(request, timeout=_PROBE_TIMEOUT_S)
        else:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            reply = stub.CheckAlive(gcs.CheckAliveRequest(), timeout=_PROBE_TIMEOUT_S)
            if reply.ray_version and reply.ray_version != ray.__version__:
                raise ValueError(
                    f"the cluster at {address} runs Ray {reply.ray_version} and this process Ray {ray.__version__}; "
                    f"install ray=={reply.ray_version} here"
                )
    except ray.exceptions.AuthenticationError:
        raise ValueError(
            f"RAY_AUTH_MODE=token is set and there is no token; {_WHERE_TOKENS_LIVE}"
        ) from None
    except grpc.RpcError as error:
        raise ValueError(_refusal(error, address)) from None
    finally:
        channel.close()


_WHERE_TOKENS_LIVE = (
    "put the cluster's token into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH, "
    "or set RAY_AUTH_TOKEN"
)


def _refusal(error: Any, address: str) -> str:
    import grpc

    code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        mode = os.environ.get("RAY_AUTH_MODE")
        if not has_token():
            return f"the Ray cluster at {address} wants a token and there is none here; {_WHERE_TOKENS_LIVE}"
        if mode != "token":
            return f"the Ray cluster at {address} wants a token; set RAY_AUTH_MODE=token (it is {mode!r})"
        return f"the Ray cluster at {address} has another token than this process; {_WHERE_TOKENS_LIVE}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        other = (
            "the cluster's own port: leave out ray://"
            if address.startswith("ray://")
            else f"a port for Ray clients: write ray://{address}"
        )
        return f"Ray answers at {address}, but not as asked; it may be {other}"
    return f"what listens at {address} does not answer as Ray does; check the port"


def _sentence(error: Exception, address: str, origin: str) -> str:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        start = text.find("ersion mismatch") - 1
        return (
            f"cannot use the Ray cluster at {address}: {text[start : start + 300].rstrip('. ')}; "
            "install the cluster's versions of Ray and Python here"
        )
    return f"cannot connect to Ray at {address} ({origin}): {text[-300:] or type(error).__name__}"
