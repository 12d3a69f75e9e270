"""A Ray head of our own: what it leaves, what it never kills, and which ports and tokens it takes."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rowcast.cluster import attach, local_ray, state_file
from rowcast.cluster.state_file import EngineRecord, HeadRecord
from rowcast.tests.cluster.support import family_of


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return


def record(**changes: object) -> HeadRecord:
    head = HeadRecord(
        pid=1,
        start_time=1.0,
        address="127.0.0.1:6379",
        client_address="ray://127.0.0.1:10001",
        temp_dir="/tmp/rowcast-ray-none",
        log_file="/tmp/none",
    )
    return replace(head, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- a real head


def test_a_head_comes_up_with_a_token_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a session of its own, refuses who has no token, and its processes, folder and memory are gone after."""
    shared_memory = set(os.listdir("/dev/shm"))
    known: list[HeadRecord] = []
    head = local_ray.start_head("t", record=known.append)
    try:
        assert known == [head], "known as soon as there is a process to stop"
        family = family_of(head.pid)
        assert len(family) > 4
        assert os.getsid(head.pid) == head.pid, "Ctrl-C in our terminal does not reach it"
        token = local_ray.token_file()
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert token.read_text() not in Path(head.log_file).read_text()
        environment = psutil.Process(head.pid).environ()
        assert environment["RAY_AUTH_MODE"] == "token"
        assert token.read_text() not in environment.values()
        assert local_ray.can_connect(head.client_address)
        assert local_ray.is_running(head)
    finally:
        local_ray.stop_head(head)
    assert not [process for process in family if process.is_running()]
    assert not Path(head.temp_dir).exists()
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert not local_ray.can_connect(head.address)
    assert not local_ray.is_running(head)
    local_ray.stop_head(head)  # twice is fine


def test_two_heads_that_start_at_once_have_ports_of_their_own() -> None:
    """gRPC listens with SO_REUSEPORT: both would have 10001, and each connection would go to either."""
    heads: list[HeadRecord] = []
    threads = [
        threading.Thread(target=lambda name=name: heads.append(local_ray.start_head(name)))
        for name in ("one", "two")
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        addresses = {a for head in heads for a in (head.address, head.client_address)}
        assert len(addresses) == 4
        assert all(local_ray.is_running(head) for head in heads)
    finally:
        for head in heads:
            local_ray.stop_head(head)


def test_a_start_that_is_broken_off_leaves_nothing() -> None:
    """Ctrl-C a moment after the process began: its children are found by its folder."""
    known: list[HeadRecord] = []

    def interrupt(head: HeadRecord) -> None:
        known.append(head)
        time.sleep(1.5)  # by now it has children of its own
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local_ray.start_head("t", record=interrupt)
    (head,) = known
    assert not local_ray.is_running(head)
    assert local_ray._users_of(head.temp_dir) == []
    assert not Path(head.temp_dir).exists()


def test_a_head_that_was_killed_leaves_children_which_stop_finds() -> None:
    folder = Path(f"/tmp/rowcast-ray-test-{os.getpid()}")
    folder.mkdir()
    program = "import time; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", program, f"--session={folder}/s"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.readline()  # for a moment after exec a process has no command line to be found by
    local_ray.stop_head(record(pid=child.pid, start_time=1.0, temp_dir=str(folder)))
    assert not psutil.pid_exists(child.pid)
    child.wait(5)
    child.stdout.close()
    assert not folder.exists()


# ---------------------------------------------------------------- what is never killed


def test_another_process_of_the_same_pid_is_left_alone() -> None:
    """A pid is used again after a while: its start time tells."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        start = psutil.Process(child.pid).create_time()
        assert local_ray.is_running(record(pid=child.pid, start_time=start))
        stranger = record(pid=child.pid, start_time=start - 1000)
        assert not local_ray.is_running(stranger)
        local_ray.stop_head(stranger)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("folder", ["", "/", "/tmp", str(Path(sys.executable).parent)])
def test_a_folder_that_is_not_ours_has_no_processes(folder: str) -> None:
    """Of a damaged file: "" is in every command line, and `rowcast stop` ends what it finds."""
    assert local_ray._users_of(folder) == []


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    local_ray.stop_head(record(pid=2**22 + 1, temp_dir=str(precious)))
    assert precious.exists()


# ---------------------------------------------------------------- ports and token


@pytest.mark.parametrize("port", [10_002, 19_999, 23_500])
def test_a_port_of_rays_own_processes_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="gives to its own processes"):
        local_ray.check_client_port(port)


@pytest.mark.parametrize("port", [0, 80, 70_000])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="between 1024 and 65535"):
        local_ray.check_client_port(port)


def test_a_taken_port_is_refused_and_a_preferred_one_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken"):
            local_ray.start_head("t", client_port=port)
        taken: set[int] = set()
        other = local_ray._free_port(port, taken)
        assert other != port
        assert other not in local_ray._WORKER_PORTS
        assert taken == {other}


def test_the_token_is_made_once_and_kept() -> None:
    local_ray.ensure_token()
    token = local_ray.token_file().read_text()
    assert len(token) == 64
    local_ray.ensure_token()
    assert local_ray.token_file().read_text() == token


def test_a_token_in_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    local_ray.ensure_token()
    assert not local_ray.token_file().exists()


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":6379", "host:0", "host:70000", "ray://host", "http://host:6379"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        local_ray.split_address(address)


def test_addresses_are_split() -> None:
    assert local_ray.split_address("ray://10.0.0.4:10001") == ("10.0.0.4", 10001)
    assert local_ray.split_address("[::1]:6379") == ("::1", 6379)


# ---------------------------------------------------------------- the state file


def test_a_record_is_kept_for_its_owner_alone_and_comes_back() -> None:
    kept = EngineRecord(name="a", address="h:1", head=record(), model_name="m")
    state_file.write_record(kept)
    path = state_file.state_folder() / "a.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert state_file.read_record("a") == kept
    assert state_file.read_record("b") is None
    state_file.remove_record("a")
    state_file.remove_record("a")
    assert list(state_file.state_folder().iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "a"}', '{"head": {"pid": 1}}'])
def test_a_broken_record_is_named(text: str) -> None:
    (state_file.state_folder() / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json"):
        state_file.read_record("a")


def test_an_unknown_engine_is_told_with_those_that_this_machine_knows() -> None:
    """What a killed process left under a name that was made up for it could not be found by `rowcast status`."""
    with pytest.raises(ValueError, match="engine 't' is not known on this machine and"):
        attach.connect(None, name="t", start=False)
    state_file.write_record(EngineRecord(name="llm-1.a", address="127.0.0.1:1"))
    state_file.write_record(EngineRecord(name="b", address="127.0.0.1:1"))
    with pytest.raises(
        ValueError, match=r"not known on this machine \(b, llm-1.a are: see --name\)"
    ):
        attach.connect(None, name="t", start=False)


def test_of_two_starts_of_one_name_at_once_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found no head and started one; the file of the second hid the first, which nobody could stop any more."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    own = psutil.Process()
    started: list[str] = []

    def start_head(name: str, *, record: Callable[[HeadRecord], None], **_: object) -> HeadRecord:
        started.append(name)
        time.sleep(0.3)
        record(head_record)
        time.sleep(0.3)
        raise RuntimeError("enough")

    head_record = record(pid=own.pid, start_time=own.create_time())
    monkeypatch.setattr(attach, "start_head", start_head)
    # The threads stand for two processes, which have no lock in common.
    monkeypatch.setattr(attach, "connecting", contextlib.nullcontext())
    ends: list[str] = []

    def start() -> None:
        try:
            attach.connect(None, name="t")
        except (RuntimeError, ValueError) as error:
            ends.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert started == ["t"]
    assert "enough" in ends
    assert any("engine 't' is being started or stopped by another process" in end for end in ends)


def test_a_state_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was "[Errno 20] Not a directory", of which nobody knows what to do."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot write .*file/rowcast: .*; set XDG_STATE_HOME"):
        state_file.read_record("t")
