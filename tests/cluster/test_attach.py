"""Whom we attach to, and the one sentence for each reason why not, within seconds and without noise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rowcast.cluster import attach
from rowcast.tests.cluster.support import Cluster

SCRIPT = """
import sys, time
from rowcast.cluster import attach
try:
    session = attach.connect(sys.argv[1] or None, name=sys.argv[2], start=False)
except ValueError as error:
    print("refused:", error)
else:
    import ray
    @ray.remote(num_cpus=0)
    def noise():
        print("noise")
        return 1
    ray.get(noise.remote())
    session.disconnect()
    print("joined:", session.address)
"""


SHARED = """
import sys, threading
import ray
from rowcast.cluster import attach
address, found = sys.argv[1], []
def use():
    session = attach.connect(address, start=False)
    found.append(ray.cluster_resources()["CPU"] > 0)
    session.disconnect()
first, second = attach.connect(address, start=False), attach.connect(address, start=False)
threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads]
first.disconnect()
first.disconnect()
[thread.join() for thread in threads]
assert found == [True] * 4, found
second.disconnect()
assert not ray.is_initialized()
ray.init(address=address, logging_level="CRITICAL", log_to_driver=False)
attach.connect(address, start=False).disconnect()
print("the user's own connection is left:", ray.is_initialized())
"""


def attempt(address: str, *, name: str = "t", **environment: str) -> str:
    """Connect in a fresh process; what it said on stdout. Nothing else may be said, and not slowly."""
    began = time.monotonic()
    variables = {**os.environ, **environment}
    variables = {key: value for key, value in variables.items() if value != "(unset)"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, address, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables,
        cwd="/",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1, done.stdout
    if done.stdout.startswith("refused"):
        assert time.monotonic() - began < 10
    return done.stdout.strip()


@pytest.fixture(params=["driver", "client"])
def address(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    return cluster.session.address if request.param == "driver" else cluster.client_address


NO_TOKEN = {"HOME": "/nonexistent"}


def test_the_right_token_joins(address: str) -> None:
    """R12: the file is enough, whatever RAY_AUTH_MODE says, as long as it says nothing else."""
    assert attempt(address, RAY_AUTH_MODE="(unset)").startswith("joined:")


def test_a_token_in_the_environment_joins(address: str) -> None:
    token = (Path.home() / ".ray" / "auth_token").read_text()
    assert attempt(address, RAY_AUTH_MODE="(unset)", RAY_AUTH_TOKEN=token, **NO_TOKEN).startswith(
        "joined:"
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RAY_AUTH_MODE": "(unset)", **NO_TOKEN}, "wants a token and there is none here"),
        (
            {"RAY_AUTH_MODE": "token", **NO_TOKEN},
            "RAY_AUTH_MODE=token is set and there is no token",
        ),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}, "has another token"),
        ({"RAY_AUTH_MODE": "disabled"}, "set RAY_AUTH_MODE=token (it is 'disabled')"),
    ],
    ids=["none", "none with mode", "wrong", "disabled"],
)
def test_what_is_wrong_with_the_token_is_said(
    address: str, environment: dict[str, str], sentence: str
) -> None:
    """R12: Ray itself takes 20 to 30 s and pages."""
    said = attempt(address, **environment)
    assert said.startswith("refused:")
    assert sentence in said
    assert "a" * 64 not in said


def test_auto_and_nothing_find_the_engines_own_head(cluster: Cluster) -> None:
    assert attempt("auto") == f"joined: {cluster.session.address}"
    assert attempt("") == f"joined: {cluster.session.address}"


def test_ray_address_is_followed_and_a_stale_one_named(cluster: Cluster) -> None:
    followed = attempt("", name="other", RAY_ADDRESS=cluster.session.address)
    assert followed == f"joined: {cluster.session.address}"
    stale = attempt("auto", RAY_ADDRESS=f"127.0.0.1:{unused_port()}")
    assert "nothing answers at" in stale
    assert "unset RAY_ADDRESS" in stale


def test_nothing_known_and_nothing_given(cluster: Cluster) -> None:
    assert "engine 'nobody' is not known on this machine" in attempt("", name="nobody")


def test_the_wrong_port_of_ray_is_told_apart(cluster: Cluster) -> None:
    assert "leave out ray://" in attempt(f"ray://{cluster.session.address}")
    bare = cluster.client_address.removeprefix("ray://")
    assert f"write ray://{bare}" in attempt(bare)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def web_server() -> Iterator[int]:
    """Something that is not Ray: it answers whatever is said with a line of HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_what_is_not_ray_is_told_apart(cluster: Cluster, web_server: int, scheme: str) -> None:
    assert "does not answer as Ray does" in attempt(f"{scheme}127.0.0.1:{web_server}")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_nobody_at_the_address(cluster: Cluster, scheme: str) -> None:
    assert "nothing answers at" in attempt(f"{scheme}127.0.0.1:{unused_port()}")


def test_a_connection_that_is_there_is_used_and_kept(cluster: Cluster) -> None:
    """R13: ray.init is not called twice, and who did not connect does not disconnect."""
    import ray

    again = attach.connect(None, name="t")
    again.disconnect()
    again.disconnect()
    assert ray.is_initialized()
    with pytest.raises(ValueError, match=r"call ray\.shutdown\(\) first"):
        attach.connect("10.9.9.9:1")


def test_the_last_of_several_users_ends_the_connection(cluster: Cluster) -> None:
    """Whoever had connected first ended it under the others' calls, and Ray then ends the process without a word."""
    done = subprocess.run(
        [sys.executable, "-c", SHARED, cluster.session.address],
        capture_output=True, text=True, timeout=100, env=os.environ,
    )  # fmt: skip
    assert done.stdout == "the user's own connection is left: True\n", done.stderr


def test_another_version_of_ray_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: both versions, and what to install."""
    import ray

    monkeypatch.setattr(ray, "__version__", "2.50.0")
    with pytest.raises(
        ValueError, match=r"runs Ray 2\.\d+\.\d+ and this process Ray 2\.50\.0; install ray=="
    ):
        attach._probe(cluster.session.address, "test")


def test_rays_page_on_versions_becomes_a_sentence() -> None:
    page = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
        "This process on Ray Client was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\n"
    )
    sentence = attach._sentence(page, "ray://h:1", "the address given")
    assert "\n" not in sentence
    assert "Python: 3.11.7" in sentence
    assert "Python: 3.12.1" in sentence
