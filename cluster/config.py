"""What the cluster's life needs to know: names, sizes, deadlines. Frozen; composed in `launch/config.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..scheduler.config import SchedulerConfig

RAY_NAMESPACE = "rowcast"
STOPPED = "the engine was stopped"  # why an engine ended that nothing was wrong with


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Units: all times are seconds. name tells engines on one Ray cluster apart (`<name>/scheduler` and so on).

    mailbox_idle_s: a mailbox that is not polled for so long is dropped and its requests aborted.
    """

    name: str = "default"
    tensor_parallel_size: int = 1
    placement_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    ready_timeout_s: float = 120.0
    step_deadline_s: float = 120.0
    mailbox_idle_s: float = 30.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", self.name):
            raise ValueError(
                f"name must be 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit, "
                f"got {self.name!r}"
            )
        if self.tensor_parallel_size < 1:
            raise ValueError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
        for name in (
            "placement_timeout_s",
            "load_timeout_s",
            "ready_timeout_s",
            "step_deadline_s",
            "mailbox_idle_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """All that is needed to bring up one engine on a Ray cluster.

    worker: the keyword arguments of `worker.config.WorkerConfig` but rank and world_size, kept as a plain dict because
        of cluster/ only `worker_actor.py` knows that class.
    model_dir: a Hugging Face folder readable on every node. model_name: what the user called it.
    record: where the scheduler's node keeps every frame and result, or None.
    """

    cluster: ClusterConfig
    scheduler: SchedulerConfig
    model_dir: str
    model_name: str
    worker: dict[str, Any] = field(default_factory=dict)
    record: str | None = None
