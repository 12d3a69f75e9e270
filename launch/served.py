"""An engine on a Ray cluster, from nothing to ready and back to nothing: what `serve`, `LLM` and the demo share.

Owns the order and who ends what: the engine always, the Ray cluster only if it was started here. Whatever interrupts
the way up is cleaned up after, and a second Ctrl-C does not break that off.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import engine as cluster_engine
from ..cluster.client import Client
from ..cluster.state_file import read_record
from .config import EnginePlan
from .stages import StageLines, load_bar

if TYPE_CHECKING:
    from rich.console import Console

    from ..cluster.engine import EngineInfo, RaySession

_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that this process brought up, and its connection to Ray."""

    info: EngineInfo
    session: RaySession

    def wait(self) -> str:
        """Wait until the engine is over by itself, or by `rowcast stop` elsewhere; the sentence that tells why."""
        while True:
            ended = cluster_engine.wait_engine(self.info.name, _LOOK_S)
            if ended is not None:
                return ended

    def leave(self) -> None:
        """Disconnect; the engine goes on."""
        self.session.disconnect()

    def stop(self) -> None:
        """End the engine, and the Ray cluster if it was started for it."""
        with interrupts_ignored():
            cluster_engine.stop_engine(self.info.name)
            self.session.disconnect()


def bring_up(
    plan: EnginePlan,
    *,
    address: str | None,
    client_port: int | None = None,
    lines: StageLines,
    console: Console | None,
) -> ServedEngine:
    """Attach to Ray or start one, and start the engine there; returns when it takes requests.

    Raises: ValueError, one sentence, for what the user has to change; EngineFailed or TimeoutError otherwise. Nothing
        that this call started is left then, nor after Ctrl-C.
    """
    name = plan.options.name
    with _own_sigterm():
        session = cluster_engine.connect(
            address, name=name, client_port=client_port, on_stage=lines
        )
    try:
        with load_bar(console, f"load {plan.options.model}") as on_load:
            info = cluster_engine.start_engine(
                plan.engine_spec, session, lines, on_wait=lines.say, on_load=on_load
            )
    except BaseException:
        with interrupts_ignored():
            if session.started_by_us:
                cluster_engine.stop_engine(name)
            session.disconnect()
        raise
    return ServedEngine(info, session)


class ServedLLM:
    """`LLM` over a cluster: an engine brought up for it, and a client.

    made_up_name: the engine's name was made up for this LLM, so nothing under it is worth keeping.
    """

    def __init__(
        self,
        plan: EnginePlan,
        *,
        address: str | None,
        made_up_name: bool,
        console: Console | None,
    ):
        self._made_up_name = made_up_name
        self._engine = bring_up(plan, address=address, lines=StageLines(console), console=console)
        try:
            self._client = Client(name=plan.options.name)
        except BaseException:
            self._engine.stop()
            raise
        self.generate = self._client.generate
        self.stream = self._client.stream
        self.abort = self._client.abort

    def snapshot(self) -> dict[str, Any]:
        return cluster_engine.engine_status(self._engine.info.name)

    def close(self) -> None:
        name = self._engine.info.name
        record = read_record(name)
        self._client.close()
        self._engine.stop()
        if self._made_up_name and record is not None and record.head is not None:
            # Nobody would ever look for it, and each LLM would leave one more.
            Path(record.head.log_file).unlink(missing_ok=True)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let nothing break off a clean-up: it takes seconds, and half of it would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only ever interrupt the main thread
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's own answer to SIGTERM: Ray replaces it by an exit when imported, and again on connect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
