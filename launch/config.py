"""One set of options, from the command line or from `rowcast.LLM`, and what every part makes of it.

Owns the one reading of the environment, the defaults that depend on the machine, and the checks that need the model's
`config.json`. They run at the door, before Ray or torch is loaded: a mistake costs a sentence, not a start.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster.config import ClusterConfig, EngineSpec
from ..scheduler.config import MAX_DEPTH, SCHEDULING_POLICIES, SchedulerConfig
from ..worker.config import DTYPES, WorkerConfig
from .models import default_cache_home, resolve_model

if TYPE_CHECKING:
    from rich.console import Console

    from ..worker.model_config import ModelConfig

DEFAULT_CLIENT_PORT = 10001
MAX_NUM_SEQS = 2**16
_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}", 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What rowcast takes from environment variables. cache_home and state_home hold a `rowcast/` folder each."""

    cache_home: Path
    state_home: Path
    ray_address: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        # The XDG rule: a path that is not absolute counts as unset.
        state = variables.get("XDG_STATE_HOME", "")
        return cls(
            cache_home=default_cache_home(variables),
            state_home=Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state",
            ray_address=variables.get("RAY_ADDRESS") or None,
        )


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Read a number of bytes as people write it. KiB, MiB, GiB (or K, M, G) are powers of 1024, KB, MB, GB of 1000.

    Example: "512MiB" -> 536870912; "2GiB" -> 2147483648; "1.5G" -> 1610612736.
    Raises: ValueError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{name} must be bytes, or a number with KiB, MiB or GiB such as 512MiB; got {text!r}"
        )
    num_bytes = math.floor(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {text!r}")
    return num_bytes


def usable_cores() -> int:
    """The cores that this process may run on: a container's share, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a person says about an engine. Names follow vLLM's where the meaning is the same.

    model: a name that `rowcast pull` knows, or a Hugging Face folder. tensor_parallel_size: how many workers share it.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens a step. max_model_len: tokens of one
        request, prompt and outputs together; None takes the model's own.
    quantization: None; what vLLM names here is refused, since no weights are computed with in less than 16 bits yet.
    kv_cache_memory: bytes a rank, or text such as "512MiB"; None takes what gpu_memory_utilization leaves on a GPU, 512
        MiB on a CPU. num_threads: a rank's CPU threads; None divides this machine's cores among the ranks.
    enable_prefix_caching: find the blocks of earlier prompts again. scheduling_policy: who is next, "fcfs" (by
        arrival), "priority" (the most urgent) or "fair" (the least served user).
    long_prefill_token_threshold: prompt tokens of one request a step while others are there, so that a short prompt
        passes a long one; 0 is no cap, None half of max_num_batched_tokens. depth: steps under way at once.
    record: a file to keep every frame and result in, for `rowcast replay`; on a Ray cluster it is made on the
        scheduler's node. name tells engines on one Ray cluster apart.

    Raises: ValueError naming the option, what it may be and what it was.
    """

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | str | None = None
    kernel_backend: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int | None = None
    depth: int = 2
    record: str | os.PathLike[str] | None = None
    name: str = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ValueError(f"model must be a model's name or folder, got {self.model!r}")
        object.__setattr__(self, "model", os.fspath(self.model))
        if self.quantization is not None:
            raise ValueError(
                f"quantization {self.quantization!r} is not supported yet: rowcast computes in "
                f"{', '.join(DTYPES[1:])} (see dtype); leave it out"
            )
        for name in (
            "tensor_parallel_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "depth",
        ):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("max_model_len", "num_threads", "long_prefill_token_threshold"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.kv_cache_memory is not None:
            given = parse_bytes(self.kv_cache_memory, name="kv_cache_memory")
            object.__setattr__(self, "kv_cache_memory", given)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, numbers.Real) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number in (0, 1], got {share!r}")
        object.__setattr__(self, "gpu_memory_utilization", float(share))
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(
                f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}"
            )
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"scheduling_policy must be one of {', '.join(SCHEDULING_POLICIES)}, "
                f"got {self.scheduling_policy!r}"
            )
        if self.record is not None:
            if not isinstance(self.record, str | os.PathLike) or not os.fspath(self.record):
                raise ValueError(f"record must be a file to write to, got {self.record!r}")
            # Absolute: the process that writes may have another working directory.
            object.__setattr__(self, "record", os.path.abspath(os.fspath(self.record)))
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a string, got {self.name!r}")
        # These two classes own the remaining rules; made here so that a mistake is refused before the model is found.
        ClusterConfig(name=self.name, tensor_parallel_size=self.tensor_parallel_size)
        WorkerConfig(model_dir="", max_model_len=1, **self._worker_fields())

    def _worker_fields(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "device": self.device,
            "kernel_backend": self.kernel_backend,
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_memory": self.kv_cache_memory,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "depth": self.depth,
            "num_threads": self.num_threads or max(1, usable_cores() // self.tensor_parallel_size),
        }


# Lowest and highest value. The highest are far beyond use: tables and buffers of more would take the machine's memory
# before anything could say why.
_RANGES = {
    "max_num_seqs": (1, MAX_NUM_SEQS),
    "max_num_batched_tokens": (1, 2**20),
    "max_model_len": (2, 2**31 - 1),  # a prompt token and an output
    "long_prefill_token_threshold": (0, 2**31 - 1),
    "depth": (1, MAX_DEPTH),
}


def _whole(name: str, value: Any) -> int:
    low, high = _RANGES.get(name, (1, 2**31 - 1))
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)  # NumPy's integers too
    if number is None or not low <= number <= high:
        bound = f"at most {high}" if number is not None and number > high else f"at least {low}"
        raise ValueError(f"{name} must be a whole number, {bound}, got {value!r}")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Options that fit their model. max_model_len is settled here; everything else is derived."""

    options: EngineOptions
    model_dir: Path
    model_config: ModelConfig
    max_model_len: int

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            depth=self.options.depth,
            prefix_caching=self.options.enable_prefix_caching,
            long_prefill_token_threshold=(
                self.options.max_num_batched_tokens // 2
                if self.options.long_prefill_token_threshold is None
                else self.options.long_prefill_token_threshold
            ),
            scheduling_policy=self.options.scheduling_policy,
            eos_token_ids=tuple(self.model_config.eos_token_ids),
        )

    @property
    def worker(self) -> WorkerConfig:
        """The one rank of an embedded engine."""
        return WorkerConfig(**self._worker_fields())

    @property
    def engine_spec(self) -> EngineSpec:
        return EngineSpec(
            cluster=ClusterConfig(
                name=self.options.name, tensor_parallel_size=self.options.tensor_parallel_size
            ),
            scheduler=self.scheduler,
            model_dir=str(self.model_dir),
            model_name=self.options.model,
            worker=self._worker_fields(),
            record=self.record,
        )

    @property
    def record(self) -> str | None:
        """Where frames and results are kept, or None."""
        return None if self.options.record is None else os.fspath(self.options.record)

    def _worker_fields(self) -> dict[str, Any]:
        return {
            "model_dir": str(self.model_dir),
            "max_model_len": self.max_model_len,
            **self.options._worker_fields(),
        }


def plan_engine(
    options: EngineOptions, environment: Environment, *, console: Console | None = None
) -> EnginePlan:
    """Find the model (fetching a known name first) and check the options against its `config.json`.

    Progress of a download goes to `console`; without one, nothing is printed.
    Raises: ValueError, one sentence: an unknown model, a folder that is no model, more ranks than heads, a
        max_model_len beyond the model's.
    """
    from ..worker.model_config import ModelConfig
    from ..worker.sharding import check_tensor_parallel_size

    model_dir = resolve_model(
        options.model, cache_home=environment.cache_home, pull_missing=True, console=console
    )
    model_config = ModelConfig.from_folder(model_dir)
    check_tensor_parallel_size(model_config, options.tensor_parallel_size)
    longest = model_config.longest_model_len
    max_model_len = (
        model_config.max_position_embeddings
        if options.max_model_len is None
        else options.max_model_len
    )
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len must be at most {longest}, the positions that {options.model} knows, "
            f"got {max_model_len}"
        )
    check_tables_fit(options.max_num_seqs, max_model_len, model_config.head_dim)
    return EnginePlan(
        options=options,
        model_dir=model_dir,
        model_config=model_config,
        max_model_len=max_model_len,
    )


def check_tables_fit(
    max_num_seqs: int,
    max_model_len: int,
    head_dim: int,
    *,
    remedy: str = "lower max_model_len or max_num_seqs",
) -> None:
    """Refuse what could only end in the kernel killing the process, which says nothing.

    Token ids and block ids, int32, in the scheduler and in a worker; sines and cosines of every position in float32.
    Raises: ValueError that says what is needed, what is there, and the remedy.
    """
    needed = 4 * 4 * max_num_seqs * max_model_len + 2 * 4 * head_dim * max_model_len
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"{max_num_seqs} requests of {max_model_len} tokens need tables of {needed / 2**30:.0f} GiB, this machine "
            f"has {there / 2**30:.0f}; {remedy}"
        )


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(EngineOptions))
