"""`rowcast bench ...`: measurements. Each prints its figures for a person, and with --json one line for a program."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from . import options as o

app = typer.Typer(
    help="Measure: the step protocol, KV memory, the scheduler's rules, a whole engine, the kernels.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("throughput")
def throughput(
    model: o.Model,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Requests at once")] = 32,
    input_len: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a prompt")] = 128,
    output_len: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an answer")] = 64,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random prompts")] = 0,
    tensor_parallel_size: o.TensorParallelSize = 1,
    address: o.Address = None,
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
    as_json: o.AsJson = False,
) -> None:
    """Tokens a second on random prompts, greedy, end of text ignored."""
    from rich.console import Console

    from ..bench.throughput import machine, measure, versions
    from ..llm import LLM

    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
        address=address,
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
        console=Console(stderr=True),
    ) as llm:
        figures = measure(
            llm,
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            seed=seed,
        )
        worker = llm.plan.worker
    sizes = {
        "model": model,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "tensor_parallel_size": tensor_parallel_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "dtype": dtype,
        "num_threads": worker.num_threads,
        "seed": seed,
    }
    print(
        f"{figures['output_tokens_per_s']:.1f} output tokens/s, {figures['total_tokens_per_s']:.1f} with the prompts'; "
        f"{num_prompts} prompts of {input_len} tokens, {output_len} outputs each, in {figures['seconds']:.2f} s"
    )
    if as_json:
        _print_json(figures | {"sizes": sizes, "versions": versions(), "machine": machine()})


@app.command("control-plane")
def control_plane(
    rows: Annotated[int, typer.Option(metavar="N", help="Requests that decode")] = 1024,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to measure")] = 64,
    block_size: o.BlockSize = o.DEFAULT_BLOCK_SIZE,
    kv_groups: Annotated[
        int,
        typer.Option(
            metavar="N", help="KV-cache groups: one full, the others with a window of 512"
        ),
    ] = 1,
    churn: Annotated[
        int, typer.Option(metavar="N", help="Requests that come, and that end, in every step")
    ] = 0,
    prompt_len: Annotated[
        int,
        typer.Option(metavar="N", help="Least prompt tokens; the most are twice as many less one"),
    ] = 64,
    cold: Annotated[
        bool, typer.Option("--cold", help="Measure again with the CPU's caches displaced")
    ] = False,
    border: Annotated[
        bool, typer.Option("--border", help="Measure a step in which all rows need a block")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """What a decode step costs beside the model: microseconds by phase, and bytes on the wire."""
    from ..bench.control_plane import bench_control_plane, table

    figures = bench_control_plane(
        rows=rows,
        steps=steps,
        block_size=block_size,
        kv_groups=kv_groups,
        churn=churn,
        cold=cold,
        border=border,
        prompt_len=prompt_len,
    )
    print(table(figures))
    if as_json:
        _print_json(figures)


@app.command("kv-memory")
def kv_memory(
    pool_blocks: Annotated[int, typer.Option(metavar="N", help="Blocks of the KV pool")] = 4096,
    block_size: o.BlockSize = o.DEFAULT_BLOCK_SIZE,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Steps that refuse somebody, to average over")
    ] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random load")] = 0,
    as_json: o.AsJson = False,
) -> None:
    """How much of the KV pool is in use when it is full, and what Gemma's windows save."""
    from ..bench.kv_memory import bench_kv_memory, table

    figures = bench_kv_memory(num_blocks=pool_blocks, block_size=block_size, steps=steps, seed=seed)
    print(table(figures))
    if as_json:
        _print_json(figures)


@app.command("soak")
def soak(
    steps: Annotated[int, typer.Option(metavar="N", help="Random steps of each run")] = 20_000,
    profile: Annotated[
        str | None,
        typer.Option(metavar="prompts|outputs|hybrid", help="One load alone; all unless given"),
    ] = None,
    depth: o.Depth = o.DEFAULT_DEPTH,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random load")] = 42,
    as_json: o.AsJson = False,
) -> None:
    """Random steps of the scheduler, without and with prefix cache, every rule checked after each."""
    from ..bench.soak import PROFILES, sentence
    from ..bench.soak import soak as run_soak
    from ..bench.throughput import machine, versions

    runs = []
    for name in PROFILES if profile is None else (profile,):
        for prefix_caching in (False, True):
            runs.append(
                run_soak(name, steps=steps, prefix_caching=prefix_caching, depth=depth, seed=seed)
            )
            print(sentence(runs[-1]), flush=True)
    violations, leaks = (sum(run[key] for run in runs) for key in ("violations", "leaks"))
    print(f"{violations} violations, {leaks} leaks")
    if as_json:
        _print_json(
            {
                "violations": violations,
                "leaks": leaks,
                "runs": runs,
                "sizes": {"steps": steps, "depth": depth, "seed": seed},
                "versions": versions(),
                "machine": machine(),
            }
        )
    if violations or leaks:
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    device: o.Device = "auto",
    kernel_backend: o.KernelBackend = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16|float16", help="Numbers to compute with")
    ] = "float32",
    num_threads: o.NumThreads = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of each")] = 20,
    as_json: o.AsJson = False,
) -> None:
    """Each kernel's time beside what this machine allows, at SmolLM2's, Gemma 3's and Granite's sizes."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be one of float32, bfloat16, float16, got {dtype!r}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, got {device!r}")

    from ..bench.kernels import bench_kernels
    from ..bench.throughput import machine, versions
    from ..config import usable_cores

    figures = bench_kernels(
        device=device,
        kernel_backend=kernel_backend,
        dtype=dtype,
        num_threads=num_threads or usable_cores(),
        repeats=repeats,
    )
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{key} {number}" for key, number in value.items()))
        else:
            print(f"{name}: {value}")
    if as_json:
        _print_json(figures | {"versions": versions(), "machine": machine()})


def _print_json(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
