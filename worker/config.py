"""What one tensor-parallel rank needs to know. Frozen; composed in `launch/config.py`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KERNEL_BACKENDS = ("auto", "triton", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """One rank's options.

    Units: block_size, max_model_len and max_num_batched_tokens tokens; kv_cache_memory bytes on this rank (None: what
    gpu_memory_utilization leaves on a GPU, 512 MiB on a CPU); gpu_memory_utilization a share of the whole device.
    depth: how many steps the scheduler may have issued that have not settled, as `SchedulerConfig.depth`.
    num_threads: torch's and Numba's threads on a CPU, set explicitly because both guess wrongly beside other ranks.
    kernel_backend: "triton" runs on a GPU (or interpreted, under TRITON_INTERPRET=1), "cpu" the Numba twins.
    """

    model_dir: str
    max_model_len: int
    rank: int = 0
    world_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    kernel_backend: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    depth: int = 2
    num_threads: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("device", DEVICES),
            ("kernel_backend", KERNEL_BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in (
            "max_model_len",
            "world_size",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "depth",
            "num_threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ValueError(f"kv_cache_memory must be at least 1 byte, got {self.kv_cache_memory}")
