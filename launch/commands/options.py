"""The options that several commands share: their names, and what `--help` says of them.

Only the model's own rules live elsewhere (`launch/config.py` checks); here is what a person types.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...scheduler.config import SCHEDULING_POLICIES, SchedulerConfig
from ...worker.config import DEVICES, DTYPES, KERNEL_BACKENDS, WorkerConfig


def _default(config: type, field: str) -> Any:
    """The default that a config part declares: stated there alone."""
    return config.__dataclass_fields__[field].default  # type: ignore[attr-defined]


# The heading of what is no matter of the answer, where help has headings (`grouped_help.py`).
_ENGINE = "Running the model"

DEFAULT_MAX_NUM_SEQS: int = _default(SchedulerConfig, "max_num_seqs")
DEFAULT_MAX_NUM_BATCHED_TOKENS: int = _default(SchedulerConfig, "max_num_batched_tokens")
DEFAULT_PREFIX_CACHING: bool = _default(SchedulerConfig, "prefix_caching")
DEFAULT_SCHEDULING_POLICY: str = _default(SchedulerConfig, "scheduling_policy")
DEFAULT_DEPTH: int = _default(SchedulerConfig, "depth")
DEFAULT_BLOCK_SIZE: int = _default(WorkerConfig, "block_size")
DEFAULT_GPU_MEMORY_UTILIZATION: float = _default(WorkerConfig, "gpu_memory_utilization")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `rowcast pull` knows, a model folder, a .gguf file, or org/name[@revision] of a hub",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        help="Workers that share the model's heads; their counts need not divide",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option(metavar="N", help="Requests that run at once"),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(metavar="N", help="Tokens of one step, all requests", rich_help_panel=_ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens of one request, prompt and outputs together [default: the model's]",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(metavar="N", help="Tokens of one KV-cache block", rich_help_panel=_ENGINE),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        metavar="SHARE", help="Share of each GPU's memory to use", rich_help_panel=_ENGINE
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory",
        metavar="SIZE",
        help="KV cache of each rank: bytes, 512MiB, 2GiB [default: what fits a GPU; 512MiB on a CPU]",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="|".join(DTYPES), help="Numbers to compute with", rich_help_panel=_ENGINE),
]
# vLLM's option. Hidden, since every value is refused so far, each by its name.
Quantization = Annotated[str | None, typer.Option(metavar="METHOD", hidden=True)]
Device = Annotated[
    str,
    typer.Option(
        metavar="|".join(DEVICES),
        help="Where workers run; a GPU if there is one",
        rich_help_panel=_ENGINE,
    ),
]
KernelBackend = Annotated[
    str,
    typer.Option(
        metavar="|".join(KERNEL_BACKENDS),
        help="Triton on a GPU, Numba on a CPU",
        rich_help_panel=_ENGINE,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="CPU threads of each rank [default: this machine's cores, divided among the ranks]",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Find the beginning of an earlier prompt again instead of computing it",
    ),
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        metavar="|".join(SCHEDULING_POLICIES),
        help="Who is next: by arrival, the most urgent request, or the least served user",
    ),
]
LongPrefillTokenThreshold = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Prompt tokens of one request a step while others are there, so that short prompts pass long ones; "
        "0 is no cap [default: half of --max-num-batched-tokens]",
        show_default=False,
    ),
]
Depth = Annotated[
    int,
    typer.Option(
        metavar="N", help="Steps under way at once: 2 plans the next one while one is computed"
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A running Ray cluster [default: RAY_ADDRESS, else a local one is started]",
        show_default=False,
    ),
]
AddressOfEngine = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster it runs on [default: where this machine started it, else RAY_ADDRESS]",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option(metavar="NAME", help="Tells engines on one Ray cluster apart")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON last")]
