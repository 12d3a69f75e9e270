"""A Ray head on this machine that outlives the process that started it: start, find, stop.

`ray.init()` alone would make a cluster that dies with its process, detached actors included. So the head is
`ray start --head --block` as a session of its own: Ctrl-C in our terminal does not reach it, and it is stopped by its
recorded pid alone. It runs with token authentication, because its ports listen on every interface of the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .state_file import HeadRecord, state_folder

if TYPE_CHECKING:
    import psutil

START_TIMEOUT_S = 60.0
_DEFAULT_CLIENT_PORT = 10001  # what people type after ray://
_DEFAULT_GCS_PORT = 6379
_FIRST_FREE_PORT, _LAST_FREE_PORT = 20_000, 22_999
_WORKER_PORTS = range(10_002, 20_000)  # Ray gives these to its own workers
_TEMP_PREFIX = "rowcast-ray-"
_OBJECT_STORE_BYTES = 256 * 2**20  # prompts and texts pass through it, weights never do


def _psutil() -> Any:
    """psutil comes with Ray, which puts its own copy on the path when none is installed."""
    import ray  # noqa: F401
    import psutil  # isort: skip

    return psutil


# ---------------------------------------------------------------- token


def token_file() -> Path:
    """Where Ray looks for the token when the environment names none."""
    return Path.home() / ".ray" / "auth_token"


def has_token() -> bool:
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")) or (
        token_file().is_file()
    )


def ensure_token() -> None:
    """Create Ray's token file unless there is a token. The token itself is never printed or logged."""
    if has_token():
        return
    path = token_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process was faster
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))  # 256 bits, as Ray's own generator


# ---------------------------------------------------------------- ports


def _is_free(port: int) -> bool:
    """Whether every interface of this machine can listen on the port."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.create_server(("", port), family=family, dualstack_ipv6=socket.has_ipv6):
            pass
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def _free_port(preferred: int | None, taken: set[int]) -> int:
    """The preferred port if it is free, else a free one that Ray uses for nothing else."""
    spread = _LAST_FREE_PORT + 1 - _FIRST_FREE_PORT
    drawn = [_FIRST_FREE_PORT + secrets.randbelow(spread) for _ in range(200)]
    for port in [*([] if preferred is None else [preferred]), *drawn]:
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    raise RuntimeError(f"found no free port between {_FIRST_FREE_PORT} and {_LAST_FREE_PORT}")


def check_client_port(port: int) -> None:
    """Refuse a port for Ray clients that cannot work.

    Raises: ValueError with one sentence.
    """
    if not 1024 <= port <= 65535:
        raise ValueError(f"the Ray client port must be between 1024 and 65535, got {port}")
    if port in _WORKER_PORTS or 23_000 <= port < 24_000:
        raise ValueError(
            f"port {port} is one that Ray gives to its own processes (10002 to 19999, 23000 to 23999); "
            "choose another Ray client port, such as 10001 or 20001"
        )
    if not _is_free(port):
        raise ValueError(f"port {port} is taken; choose another Ray client port, or leave it out")


# ---------------------------------------------------------------- start


def _ray_command() -> list[str]:
    beside = Path(sys.executable).parent / "ray"
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "ray.scripts.scripts"]


def _head_environment() -> dict[str, str]:
    environment = {**os.environ}
    environment.pop("RAY_ADDRESS", None)  # this head is new, whatever else the user has
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else SIGTERM waits half a minute
        # The client proxy forks while its gRPC threads run: with gRPC's fork handlers a child may die at birth.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    return environment


def start_head(
    name: str, *, client_port: int | None = None, record: Callable[[HeadRecord], None] | None = None
) -> HeadRecord:
    """Start a Ray head for engine `name` and wait until Ray clients can connect.

    record: called with the HeadRecord as soon as there is a process to stop.
    Raises: ValueError for a client port that cannot be had; RuntimeError with the log's last lines when Ray does not
        come up. Whatever was started is ended first, also on Ctrl-C.
    """
    if client_port is not None:
        check_client_port(client_port)
    ensure_token()
    with _one_start_at_a_time():
        for attempt in range(3):
            head, process = _spawn_head(name, client_port, use_defaults=attempt == 0)
            try:
                if record is not None:
                    record(head)
                _wait_until_up(head, process)
                return head
            except BaseException as error:
                stop_head(head)
                process.wait(5)
                # Someone may have taken a port between our look and Ray's bind: try again with others.
                if attempt == 2 or not isinstance(error, _PortTaken):
                    raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Let nobody else of this user choose ports before this head holds its own.

    gRPC listens with SO_REUSEPORT, so that two heads of one user that choose together get the same port without an
    error, and each connection goes to either. (Another user's head gets an error: that is tried again.)
    """
    path = Path(tempfile.gettempdir()) / f".rowcast-{os.getuid()}-ray-start.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # falls with its process, however that ends
        yield
    finally:
        os.close(descriptor)


class _PortTaken(RuntimeError):
    pass


# What Ray says when a port went to another head that started at the same moment. The last: it met the other's GCS, or
# its own was asked by the other.
_CLASHES = ("in use", "does not match persisted value", "Failed to connect to GCS")


def _spawn_head(
    name: str, client_port: int | None, *, use_defaults: bool
) -> tuple[HeadRecord, subprocess.Popen[bytes]]:
    taken: set[int] = set()
    gcs = _free_port(_DEFAULT_GCS_PORT if use_defaults else None, taken)
    client = client_port or _free_port(_DEFAULT_CLIENT_PORT if use_defaults else None, taken)
    agent = _free_port(None, taken)
    temp_dir = tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir="/tmp")  # short: unix sockets lie in it
    log_file = state_folder() / f"{name}-ray.log"
    options = [
        "start --head --block --disable-usage-stats --include-dashboard=false",
        # Without the log monitor no worker's output is pushed to whoever connects; the files stay.
        "--include-log-monitor=false --log-style=record --log-color=false",
        f"--port={gcs} --ray-client-server-port={client} --dashboard-agent-listen-port={agent}",
        f"--object-store-memory={_OBJECT_STORE_BYTES} --temp-dir={temp_dir}",
    ]
    with open(log_file, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        process = subprocess.Popen(
            [*_ray_command(), *" ".join(options).split()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_head_environment(),
            cwd="/",
            start_new_session=True,
        )
    try:
        head = HeadRecord(
            pid=process.pid,
            start_time=_psutil().Process(process.pid).create_time(),
            address=f"127.0.0.1:{gcs}",
            client_address=f"ray://127.0.0.1:{client}",
            temp_dir=temp_dir,
            log_file=str(log_file),
        )
    except BaseException:  # Ctrl-C, or it ended at once: nobody knows of it yet
        process.kill()
        raise
    return head, process


def _wait_until_up(head: HeadRecord, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        log = Path(head.log_file).read_text(errors="replace")
        if process.poll() is not None:
            kind = _PortTaken if any(text in log for text in _CLASHES) else RuntimeError
            raise kind(
                f"Ray ended with exit code {process.returncode} while starting; see {head.log_file}: "
                + " / ".join(log.strip().splitlines()[-3:])
            )
        if "Ray runtime started" in log and can_connect(head.client_address):
            _check_ports_are_ours(head)
            return
        time.sleep(0.05)
    raise RuntimeError(f"Ray did not come up within {START_TIMEOUT_S:.0f} s; see {head.log_file}")


def _check_ports_are_ours(head: HeadRecord) -> None:
    """Two heads that start at once can both have a port: gRPC listens with SO_REUSEPORT, and connections go to either.

    Raises: _PortTaken if anybody else listens at one of the head's ports.
    """
    psutil = _psutil()
    ours = {process.pid for process in _family(psutil.Process(head.pid))}
    ports = {split_address(address)[1] for address in (head.address, head.client_address)}
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
        if listens and connection.pid not in ours:
            raise _PortTaken(f"port {connection.laddr.port} is taken by another process too")


def can_connect(address: str, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens at host:port or ray://host:port."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except OSError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `ray://host:port` or `[v6]:port`.

    Raises: ValueError for anything else.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"a Ray address is host:port, ray://host:port or auto, got {address!r}")
    return host.strip("[]"), int(port)


# ---------------------------------------------------------------- stop


def is_running(head: HeadRecord) -> bool:
    """Whether that very process still runs: the pid alone could be another's by now."""
    return _process_of(head) is not None


def _process_of(head: HeadRecord) -> psutil.Process | None:
    psutil = _psutil()
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(head.pid)
        if (
            abs(process.create_time() - head.start_time) < 1.0
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            return process
    return None


def stop_head(head: HeadRecord) -> None:
    """End the head, everything it started, and its files. Doing so twice is fine.

    Its processes are looked for while it still runs (its descendants, and all of its session), because those that
    outlive their parent cannot be told from strangers afterwards.
    """
    psutil = _psutil()
    process = _process_of(head)
    known = set(_family(process)) if process is not None else set()
    known |= set(_users_of(head.temp_dir))
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline and is_running(head):
            known |= set(_family(process))
            time.sleep(0.05)
        known.add(process)
    known |= set(_users_of(head.temp_dir))  # what it started while we looked
    _, alive = psutil.wait_procs(list(known), timeout=2)
    for straggler in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            straggler.kill()
    psutil.wait_procs(alive, timeout=5)
    if _is_ours(head.temp_dir):
        shutil.rmtree(head.temp_dir, ignore_errors=True)


def _is_ours(temp_dir: str) -> bool:
    return Path(temp_dir).name.startswith(_TEMP_PREFIX)


def _family(process: psutil.Process) -> list[psutil.Process]:
    psutil = _psutil()
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _users_of(temp_dir: str) -> list[psutil.Process]:
    """Processes whose command line names the head's own folder: what is left when the head itself was killed.

    A folder that is not of our making has none: "" or "/" in a damaged file is in every command line.
    """
    if not _is_ours(temp_dir):
        return []
    psutil = _psutil()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and any(
                temp_dir in argument for argument in process.cmdline()
            ):
                found.append(process)
    return found
