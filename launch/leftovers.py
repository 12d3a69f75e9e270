"""What a Ray cluster that rowcast started consists of, to see afterwards that nothing of it is left.

Looks at this machine's own tables: processes, listening ports, shared memory, the cluster's folder. Ends nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from ..cluster.state_file import HeadRecord

_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """A running cluster's traces: processes, the ports they listen on, shared memory that they map, its folder.

    newest: when the newest of the processes began.
    """

    processes: tuple[psutil.Process, ...]
    ports: frozenset[int]
    shared_memory: frozenset[str]
    folder: str
    newest: float

    @classmethod
    def of(cls, head: HeadRecord) -> Footprint:
        processes: list[psutil.Process] = []
        ports: set[int] = set()
        shared: set[str] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(head.pid)
            processes = [parent, *parent.children(recursive=True)]
        began: list[float] = []  # by psutil's clock, which is not time.time()'s to the second
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                began.append(process.create_time())
                ports |= _ports(process.net_connections("tcp"))
                shared |= _mapped_shared_memory(process.pid)
        return cls(
            processes=tuple(processes),
            ports=frozenset(ports),
            shared_memory=frozenset(shared),
            folder=head.temp_dir,
            newest=max(began, default=0.0),
        )

    def left(self, timeout_s: float = 5.0) -> list[str]:
        """What is still there, a phrase each; empty when all is gone. Processes get timeout_s to finish dying."""
        _, alive = psutil.wait_procs(list(self.processes), timeout=timeout_s)
        left = [f"process {process.pid} ({_name(process)})" for process in alive]
        deadline = time.monotonic() + timeout_s
        while (open_ports := self._open_ports()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left += [f"port {port}" for port in sorted(open_ports)]
        left += [
            f"shared memory {path}" for path in sorted(self.shared_memory) if Path(path).exists()
        ]
        if Path(self.folder).exists():
            left.append(f"folder {self.folder}")
        return left

    def _open_ports(self) -> set[int]:
        """Those of the ports that somebody who may belong to the cluster listens on.

        A process that began after the cluster's newest is a stranger who got a port that had become free.
        """
        return _ports(
            connection
            for connection in psutil.net_connections("tcp")
            if not _began_after(connection.pid, self.newest)
        ) & set(self.ports)


def _began_after(pid: int | None, moment: float) -> bool:
    if pid is None:
        return False
    try:
        return psutil.Process(pid).create_time() > moment
    except psutil.NoSuchProcess:
        return True  # gone meanwhile, and its port with it


def _ports(connections: Iterable[Any]) -> set[int]:
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def _mapped_shared_memory(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:  # no Linux, or the process is gone
        return set()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if _SHARED_MEMORY in line}
    # A file that was unlinked when it was made leaves nothing whatever happens.
    return {path for path in paths if path.startswith(_SHARED_MEMORY) and "(deleted)" not in path}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "just gone"
