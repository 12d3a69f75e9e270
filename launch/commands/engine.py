"""`rowcast serve`, `status` and `stop`: an engine on a Ray cluster, its life from a terminal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o

if TYPE_CHECKING:
    from ..stages import StageLines


def serve(
    model: o.Model,
    tensor_parallel_size: o.TensorParallelSize = 1,
    address: o.Address = None,
    name: o.Name = "default",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when ready and leave the engine running")
    ] = False,
    client_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Where a Ray started here listens for ray:// clients [default: 10001, or a free one]",
            show_default=False,
        ),
    ] = None,
    max_num_seqs: o.MaxNumSeqs = o.DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: o.MaxNumBatchedTokens = o.DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: o.MaxModelLen = None,
    block_size: o.BlockSize = o.DEFAULT_BLOCK_SIZE,
    gpu_memory_utilization: o.GpuMemoryUtilization = o.DEFAULT_GPU_MEMORY_UTILIZATION,
    kv_cache_memory: o.KVCacheMemory = None,
    dtype: o.Dtype = "auto",
    quantization: o.Quantization = None,
    device: o.Device = "auto",
    kernel_backend: o.KernelBackend = "auto",
    num_threads: o.NumThreads = None,
    enable_prefix_caching: o.PrefixCaching = o.DEFAULT_PREFIX_CACHING,
    scheduling_policy: o.SchedulingPolicy = o.DEFAULT_SCHEDULING_POLICY,
    long_prefill_token_threshold: o.LongPrefillTokenThreshold = None,
    depth: o.Depth = o.DEFAULT_DEPTH,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep every step in FILE, for `rowcast replay`; prompts are in it",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Bring up an engine on a Ray cluster, say when it is ready, and stop it on Ctrl-C."""
    began = time.monotonic()
    from rich.console import Console

    from ...cluster.config import STOPPED
    from ..config import EngineOptions, Environment, plan_engine
    from ..stages import StageLines

    options = EngineOptions(
        model=model,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory=kv_cache_memory,
        device=device,
        kernel_backend=kernel_backend,
        num_threads=num_threads,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        depth=depth,
        record=record,
        name=name,
    )
    environment = Environment.read()
    elsewhere = address or environment.ray_address
    if client_port is not None and elsewhere is not None:
        raise ValueError(
            f"--client-port is for a Ray started here, and {elsewhere} runs already; leave one of them out"
        )
    console = Console()
    lines = StageLines(console)
    plan = plan_engine(options, environment, console=console)
    lines(f"find {model} and check the options", time.monotonic() - began)

    from ..served import bring_up  # imports Ray

    engine = bring_up(plan, address=address, client_port=client_port, lines=lines, console=console)
    try:
        lines.say(f"ready after {time.monotonic() - began:.1f} s")
        _say_how_to_use(lines, name, engine.info.client_address, engine.info.address)
        if detach:
            lines.say(f"stop it with: rowcast stop{_name_option(name)}")
            engine.leave()
            return
        lines.say("stop it with Ctrl-C")
        ended = engine.wait()
    except BaseException:
        try:
            lines.say("stopping")
        finally:  # Ctrl-C ends the reader of `rowcast serve | tee log` too: there may be nobody to say it to
            engine.stop()
        lines.say("stopped")
        raise
    engine.stop()
    if ended != STOPPED:
        raise RuntimeError(ended)
    lines.say(ended)


def _name_option(name: str) -> str:
    return "" if name == "default" else f" --name {name}"


def _say_how_to_use(lines: StageLines, name: str, client_address: str | None, address: str) -> None:
    reach = client_address or address
    named = "" if name == "default" else f", name={name!r}"
    lines.say(f"  Ray: {reach}")
    lines.say(
        f'  Python, in any process: rowcast.Client("{reach}"{named}).generate("Once upon a time")'
    )


def status(
    name: o.Name = "default", address: o.AddressOfEngine = None, as_json: o.AsJson = False
) -> None:
    """Say what runs: the engine, its requests, its blocks."""
    from ...cluster.engine import engine_status

    found = engine_status(name, address)
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    print(
        f"engine {found['name']}: {found['state']}, {found['model']}, up {found['uptime_s']:.0f} s"
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    hidden = {"name", "state", "model", "uptime_s", "stages", "prefix_cache_queries"}
    for key, value in found.items():
        if key == "prefix_cache_hits":
            value = _share(value, found["prefix_cache_queries"])
        if key not in hidden and value is not None:
            table.add_row(key.replace("_", " "), str(value))
    Console().print(table)


def _share(hits: int, queries: int) -> str:
    """Say what the prefix cache had, in tokens."""
    return f"{hits} of {queries} prompt tokens" + (f" ({hits / queries:.1%})" if queries else "")


def stop(name: o.Name = "default", address: o.AddressOfEngine = None) -> None:
    """Stop an engine, and the local Ray if rowcast started it."""
    from ...cluster.engine import stop_engine
    from ..served import interrupts_ignored

    with interrupts_ignored():
        found = stop_engine(name, address)
    if not found:
        raise ValueError(f"no engine named {name!r} is known here; see rowcast status")
    print(f"engine {name} is stopped")
