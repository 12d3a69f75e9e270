"""What the tests of engines share: specs, a home of their own, processes, a fresh interpreter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rowcast.cluster import engine
from rowcast.cluster.config import ClusterConfig, EngineSpec
from rowcast.scheduler.config import SchedulerConfig

VOCAB_SIZE, MAX_MODEL_LEN = 257, 4096
EOS = 256


def spec_of(model_dir: Path, name: str, ranks: int = 2, **cluster: Any) -> EngineSpec:
    """A small engine: 8 requests run at once and 64 wait."""
    sizes = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return EngineSpec(
        cluster=ClusterConfig(name=name, tensor_parallel_size=ranks, **cluster),
        scheduler=SchedulerConfig(
            vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), max_waiting=64, **sizes
        ),
        model_dir=str(model_dir),
        model_name="tiny",
        worker={
            "model_dir": str(model_dir),
            "dtype": "float32",
            "device": "cpu",
            "kernel_backend": "cpu",
            "kv_cache_memory": 2 * 2**20,
            **sizes,
        },
    )


@contextlib.contextmanager
def own_home() -> Iterator[pytest.MonkeyPatch]:
    """HOME, state folder and Ray settings of this test module alone; compiled kernels are the user's own."""
    with (
        tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as home,
        pytest.MonkeyPatch.context() as patch,
    ):
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("HOME", home)
        patch.setenv("XDG_STATE_HOME", f"{home}/state")
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in (
            "RAY_ADDRESS",
            "RAY_AUTH_MODE",
            "RAY_AUTH_TOKEN",
            "RAY_AUTH_TOKEN_PATH",
            "TRITON_INTERPRET",
        ):
            # setenv first: what the code under test sets is then undone as well.
            patch.setenv(name, "")
            patch.delenv(name)
        yield patch


class Cluster:
    """A Ray head that `connect` started for engine `name`, and this process's connection to it."""

    def __init__(self, session: engine.RaySession, name: str, model: Path) -> None:
        self.session = session
        self.name = name
        self.model = model

    @property
    def client_address(self) -> str:
        assert self.session.client_address is not None
        return self.session.client_address

    def start(self, **cluster: Any) -> engine.EngineInfo:
        name = cluster.pop("name", self.name)
        return engine.start_engine(spec_of(self.model, name, **cluster), self.session)

    def status(self) -> dict[str, Any]:
        return engine.engine_status(self.name)

    def wait_until(self, what: Callable[[dict[str, Any]], bool], timeout_s: float = 10) -> dict:
        deadline = time.monotonic() + timeout_s
        while not what(status := self.status()):
            assert time.monotonic() < deadline, f"still {status}"
            time.sleep(0.05)
        return status


def family_of(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def in_another_process(code: str, *arguments: str, timeout_s: float = 60) -> str:
    """Run a script in a fresh interpreter with this environment; its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == "", f"noise on stderr: {done.stderr}"
    return done.stdout
