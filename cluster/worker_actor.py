"""One tensor-parallel rank as a Ray actor: a thin shell round `worker/loop.py` and the model runner.

The one file here that imports `worker/`, and only inside the actor: torch is never loaded in a driver, front or
scheduler. Steps do not pass through here: they come by socket.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import ray

from .. import __version__
from ..scheduler.kv_groups import KVGroupSpec
from .channel import GroupAddresses, SubscribePushChannel
from .network import free_port, interface_of

CONTROL = "control"


# The default group has one thread, so that load, warm-up and steps share it: OpenMP's thread count is per thread.
@ray.remote(max_restarts=0, concurrency_groups={CONTROL: 2})  # pyright: ignore[reportCallIssue]
class WorkerActor:
    """Call, in order: describe, pick_port (rank 0), load, allocate, run."""

    def __init__(self, rank: int, world_size: int, worker_fields: dict[str, Any]) -> None:
        self._rank = rank
        self._world_size = world_size
        self._fields = worker_fields
        self._runner: Any = None
        self._loop: Any = None
        self._share_loaded = 0.0

    @ray.method(concurrency_group=CONTROL)
    def describe(self) -> dict[str, Any]:
        """Who this is: the scheduler compares versions and learns addresses."""
        return {
            "node_ip": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "rowcast": __version__,
            "python": platform.python_version(),
        }

    @ray.method(concurrency_group=CONTROL)
    def share_loaded(self) -> float:
        """How much of this rank's weights is there, 0 to 1."""
        return self._share_loaded

    @ray.method(concurrency_group=CONTROL)
    def progress(self) -> tuple[int, int]:
        """The sequences of the last frame that this rank took and of the last that it carried out."""
        loop = self._loop
        return (0, 0) if loop is None else (loop.sequence, loop.done)

    @ray.method(concurrency_group=CONTROL)
    def pick_port(self, host: str) -> int:
        """A free port of this node for the group's meeting. Without torch: all ranks then load it at the same time."""
        return free_port(host)

    def load(
        self, address: str | None, host: str, timeout_s: float
    ) -> tuple[tuple[KVGroupSpec, ...], int]:
        """Meet the other ranks and read this rank's weights.

        address: rank 0's store, host:port; None for one rank alone. host: what this node is reached by; its interface
            carries the collectives.
        Returns: the KV groups, and how many blocks this rank can hold.
        """
        self._set_threads()
        from ..worker.config import WorkerConfig
        from ..worker.model_runner import ModelRunner
        from ..worker.parallel import TensorParallelGroup

        config = WorkerConfig(rank=self._rank, world_size=self._world_size, **self._fields)
        parallel = None
        if address is not None:
            parallel = TensorParallelGroup.create(
                self._rank,
                self._world_size,
                address=address,
                interface=interface_of(host),
                timeout_s=timeout_s,
                device=config.device,
            )
        self._runner = ModelRunner(config, parallel)

        def note(share: float) -> None:
            self._share_loaded = share

        self._runner.load(note)
        self._share_loaded = 1.0
        return tuple(self._runner.group_specs), int(self._runner.max_num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Make the pool that all ranks agreed on and compile what steps will need."""
        self._runner.allocate(num_blocks)
        self._runner.warm_up()

    def run(self, addresses: GroupAddresses, epoch: int) -> None:
        """Serve until the scheduler says stop. Raises whatever ended it otherwise; the scheduler was told by socket."""
        import zmq

        from ..worker.loop import WorkerLoop

        context = zmq.Context()
        channel = SubscribePushChannel(context, addresses)
        try:
            depth = self._runner.config.depth
            self._loop = WorkerLoop(
                self._runner, channel, rank=self._rank, epoch=epoch, depth=depth
            )
            self._loop.run()
        finally:
            channel.close()
            context.term()
            self._runner.close()

    def _set_threads(self) -> None:
        """Before torch and Numba load: both take a pool of their own size otherwise, whatever is set later."""
        threads = str(self._fields.get("num_threads", 1))
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[name] = threads
        # OpenMP threads that wait sleep: spinning, they take the cores from the other rank and from Numba's threads.
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
