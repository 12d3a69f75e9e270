"""The look for what a cluster has left: it must see each kind of leftover, or the demo's last line means nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rowcast.cluster.state_file import HeadRecord
from rowcast.launch.leftovers import Footprint

# A parent with a child that listens on a port and maps a file in shared memory.
CHILD = """
import mmap, os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.truncate(handle, 4096)
mapped = mmap.mmap(handle, 4096)
print(server.getsockname()[1], flush=True)
time.sleep(100)
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}, sys.argv[1]])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Footprint, int, Path]]:
    """Stands for a Ray head: the process, its footprint, the child's port and its shared memory."""
    shared = Path(f"/dev/shm/rowcast-test-{time.time_ns()}")
    folder = tmp_path / "ray"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(shared)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    head = HeadRecord(
        pid=process.pid, start_time=0, address="", client_address="", temp_dir=str(folder), log_file=""
    )  # fmt: skip
    footprint = Footprint.of(head)
    yield process, footprint, port, shared
    for one in footprint.processes:
        if one.is_running():
            one.kill()
    process.wait()
    shared.unlink(missing_ok=True)


def test_the_footprint_has_the_processes_ports_and_shared_memory(cluster):
    process, footprint, port, shared = cluster
    assert process.pid in {one.pid for one in footprint.processes}
    assert len(footprint.processes) == 2
    assert footprint.ports == {port}
    assert footprint.shared_memory == {str(shared)}


def test_each_leftover_is_named(cluster):
    process, footprint, port, shared = cluster
    child = next(one for one in footprint.processes if one.pid != process.pid)
    process.kill()
    process.wait()
    left = footprint.left(timeout_s=0.3)
    assert any(phrase.startswith(f"process {child.pid} ") for phrase in left)
    assert f"port {port}" in left
    assert f"shared memory {shared}" in left
    assert f"folder {footprint.folder}" in left
    child.kill()
    psutil.wait_procs([child], timeout=5)
    assert footprint.left(0.3) == [f"shared memory {shared}", f"folder {footprint.folder}"]
    shared.unlink()
    Path(footprint.folder).rmdir()
    assert footprint.left(0.3) == []


def test_a_stranger_who_got_the_port_afterwards_is_no_leftover(cluster):
    """Another Ray head takes 6379 the moment it is free."""
    process, footprint, port, shared = cluster
    for one in footprint.processes:
        one.kill()
    process.wait()
    psutil.wait_procs(footprint.processes, timeout=5)
    program = f"""
import socket, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", {port}))
server.listen()
print("up", flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"up\n"
        left = footprint.left(timeout_s=0.3)
        stranger.kill()
    assert left == [f"shared memory {shared}", f"folder {footprint.folder}"]
