"""`make demo`: everything at once, on a local Ray that is gone afterwards.

Fetches a small model, starts Ray, a scheduler, a front and two tensor-parallel workers; another process connects
through Ray Client and asks several things at once; then all is stopped, and looked for. Its engine has its own name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .config import EngineOptions, Environment, plan_engine
from .stages import StageLines

NAME = "demo"
MODEL = "smollm2-135m"
_CLIENT_END_S = 10.0


def main() -> int:
    from rich.console import Console

    began = time.monotonic()
    console = Console()
    lines = StageLines(console)
    environment = Environment.read()
    # The demo's Ray is its own: neither attach to the user's cluster nor touch it.
    os.environ.pop("RAY_ADDRESS", None)
    options = EngineOptions(
        model=MODEL,
        tensor_parallel_size=2,
        max_num_seqs=16,
        max_model_len=2048,
        record=environment.state_home / "rowcast" / f"{NAME}.rec",
        name=NAME,
    )
    with only_demo():
        plan = plan_engine(options, environment, console=console)
        lines(f"find {MODEL}", time.monotonic() - began)

        from ..cluster.engine import stop_engine
        from ..cluster.state_file import read_record
        from .leftovers import Footprint
        from .served import bring_up

        if read_record(NAME) is not None:
            stop_engine(NAME)
            lines.say("cleared up after an earlier demo that was killed")
        recording = Path(os.fspath(options.record or ""))
        recording.unlink(missing_ok=True)  # the last demo's
        engine = bring_up(plan, address=None, lines=lines, console=console)
        try:
            record = read_record(NAME)
            assert record is not None, "the engine runs without a record"
            assert record.head is not None, "the demo runs on a Ray that it did not start"
            assert engine.info.client_address is not None
            footprint = Footprint.of(record.head)
            lines.say(f"ready after {time.monotonic() - began:.1f} s")
            code = run_client(engine.info.client_address)
        finally:
            stopping = time.monotonic()
            engine.stop()
            lines("stop everything", time.monotonic() - stopping)
        left = footprint.left()
    if left:
        raise RuntimeError(f"the demo left {', '.join(left)}")
    if code != 0:
        raise RuntimeError(f"the demo's client ended with exit code {code}")
    say_replayed(lines, recording)
    lines.say(
        f"nothing is left of {len(footprint.processes)} processes and {len(footprint.ports)} ports; "
        f"{time.monotonic() - began:.1f} s in all"
    )
    return 0


def say_replayed(lines: StageLines, recording: Path) -> None:
    """Rebuild both ranks' tables from the recording, step by step: what they said of them must follow from it."""
    from ..scheduler.recording import Recording
    from .replay import replay

    began = time.monotonic()
    (life,) = replay(Recording(recording))
    lines(
        f"replay {life.num_steps} recorded steps without the model: all {life.num_digests} digests hold",
        time.monotonic() - began,
    )
    lines.say(f"  see one as tables: rowcast replay {recording} --until 12 --explain")


def run_client(address: str) -> int:
    """The other process, with this one's terminal. However this ends, it has ended too."""
    command = [sys.executable, "-m", "rowcast.launch.demo_client", address, NAME]
    client = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return client.wait()
    finally:
        if client.poll() is None:
            client.terminate()
            try:
                client.wait(_CLIENT_END_S)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()


@contextlib.contextmanager
def only_demo() -> Iterator[None]:
    """Held while a demo runs: the next one may then clear up what a killed one left, and never a living one's."""
    from ..cluster.state_file import state_folder

    lock = os.open(state_folder() / f"{NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("a demo runs already; wait for its end") from None
        yield
    finally:
        os.close(lock)


if __name__ == "__main__":
    from .cli import run_guarded

    sys.exit(run_guarded(main))
