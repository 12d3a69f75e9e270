"""Compile every Triton kernel ahead of time for GPUs that need not be here: `python -m rowcast.kernels.aot`.

It catches what the interpreter accepts and the compiler refuses (tile sizes, types, shared memory). It must run in a
process without TRITON_INTERPRET: interpreting and compiling do not mix. It owns the list of configurations; nothing
compiled here is used to serve.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from .block_table_gather import _block_table_gather_kernel
from .grouped_gemm import _grouped_gemm_kernel, grouped_gemm_config
from .gumbel_argmax import OPTIONS as GUMBEL_ARGMAX_OPTIONS
from .gumbel_argmax import _gumbel_argmax_kernel
from .kv_write import _kv_write_kernel
from .paged_attention import LOG2_E, _paged_attention_kernel, paged_attention_config
from .slot_mapping import _slot_mapping_kernel
from .softmax_mass import OPTIONS as SOFTMAX_MASS_OPTIONS
from .softmax_mass import _softmax_mass_kernel
from .token_inputs import _token_inputs_kernel

# name -> target and the shared memory, in bytes, that one program may take there
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}

_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

Configuration = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]


def attention_configuration(
    *,
    dtype: str,
    num_tokens: int,
    num_reqs: int,
    group: int,
    head_dim: int,
    block_size: int = 16,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Configuration:
    """(name, kernel, signature, constants, options) of paged attention for one step's shape."""
    config = paged_attention_config(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        group=group,
        head_dim=head_dim,
        itemsize=_ITEMSIZE[dtype],
    )
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        **config,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "CHUNK": chunk,
        "CAP_LOG2": softcap * LOG2_E,
        "WIDE_DOT": False,
    }
    signature = {
        **dict.fromkeys(("query", "key_cache", "value_cache"), f"*{dtype}"),
        **dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32"),
        "out": f"*{dtype}",
        "scale_log2": "fp32",
        "num_reqs": "i32",
        **dict.fromkeys(
            ("query_stride", "out_stride", "key_cache_stride", "value_cache_stride"), "i64"
        ),
        "block_table_stride": "i64",
        **dict.fromkeys(constants, "constexpr"),
    }
    step = "decode" if num_tokens <= num_reqs else "prefill"
    name = f"paged_attention {step} {dtype} head_dim {head_dim} group {group} block {block_size}"
    if window or chunk:
        name += f" window {window}" if window else f" chunk {chunk}"
    if softcap:
        name += f" softcap {softcap:g}"
    return name, _paged_attention_kernel, signature, constants, options


def grouped_gemm_configuration(*, dtype: str, num_experts: int, n: int, k: int) -> Configuration:
    """(name, kernel, signature, constants, options) of the experts' product, for any number of rows."""
    config = grouped_gemm_config(itemsize=_ITEMSIZE[dtype])
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**config, "NUM_EXPERTS": num_experts, "N": n, "K": k, "WIDE_DOT": False}
    signature = {
        **dict.fromkeys(("x", "weight", "out"), f"*{dtype}"),
        "expert_start_loc": "*i32",
        **dict.fromkeys(("x_stride", "out_stride"), "i64"),
        **dict.fromkeys(constants, "constexpr"),
    }
    name = f"grouped_gemm {dtype} {num_experts} experts {n} x {k}"
    return name, _grouped_gemm_kernel, signature, constants, options


def configurations() -> Iterator[Configuration]:
    """One configuration a kernel; attention also in float32, which must not become tf32, with a window, with
    chunks, with a soft cap.
    """
    yield (
        "token_inputs",
        _token_inputs_kernel,
        {
            **dict.fromkeys(
                ("index_mapping", "query_start_loc", "num_computed_tokens", "token_ids"), "*i32"
            ),
            "input_ids": "*i32",
            "positions": "*i64",
            "seq_lens": "*i32",
            **dict.fromkeys(("num_reqs", "num_input_ids", "num_positions", "num_seq_lens"), "i32"),
            "token_ids_stride": "i64",
            "BLOCK": "constexpr",
        },
        {"BLOCK": 256},
        {},
    )
    yield (
        "block_table_gather",
        _block_table_gather_kernel,
        {
            **dict.fromkeys(("index_mapping", "block_table", "num_blocks", "out"), "*i32"),
            **dict.fromkeys(("num_reqs", "width"), "i32"),
            **dict.fromkeys(("block_table_group_stride", "block_table_stride"), "i64"),
            **dict.fromkeys(("out_group_stride", "out_stride"), "i64"),
            "BLOCK": "constexpr",
        },
        {"BLOCK": 256},
        {},
    )
    yield (
        "slot_mapping",
        _slot_mapping_kernel,
        {
            "index_mapping": "*i32",
            "query_start_loc": "*i32",
            "positions": "*i64",
            "block_table": "*i32",
            "out": "*i64",
            "gathered": "*i32",
            **dict.fromkeys(("num_reqs", "num_out", "width"), "i32"),
            **dict.fromkeys(("block_table_group_stride", "block_table_stride"), "i64"),
            **dict.fromkeys(
                ("out_group_stride", "gathered_group_stride", "gathered_stride"), "i64"
            ),
            **dict.fromkeys(("BLOCK_SIZE", "BLOCK"), "constexpr"),
        },
        {"BLOCK_SIZE": 16, "BLOCK": 256},
        {},
    )
    yield (
        "kv_write",
        _kv_write_kernel,
        {
            **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
            "slot_mapping": "*i64",
            **dict.fromkeys(
                ("key_stride", "value_stride", "key_cache_stride", "value_cache_stride"), "i64"
            ),
            **dict.fromkeys(("BLOCK_SIZE", "NUM_KV_HEADS", "HEAD_DIM", "BLOCK"), "constexpr"),
        },
        {"BLOCK_SIZE": 16, "NUM_KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK": 256},
        {},
    )
    for dtype in ("bf16", "fp32"):
        yield (
            f"gumbel_argmax {dtype}",
            _gumbel_argmax_kernel,
            {
                "logits": f"*{dtype}",
                "rows": "*i32",
                "temperature": "*fp32",
                **dict.fromkeys(("streams", "ids", "below", "out"), "*i64"),
                **dict.fromkeys(("num_ids", "first_id"), "i32"),
                **dict.fromkeys(("logits_stride", "ids_stride"), "i64"),
                **dict.fromkeys(("HAS_IDS", "HAS_BELOW", "BLOCK"), "constexpr"),
            },
            {
                "HAS_IDS": dtype == "fp32",
                "HAS_BELOW": dtype == "fp32",
                "BLOCK": 512 if dtype == "fp32" else 4096,
            },
            GUMBEL_ARGMAX_OPTIONS,
        )
    yield (
        "softmax_mass",
        _softmax_mass_kernel,
        {
            **dict.fromkeys(("scores", "highest"), "*fp32"),
            "rows": "*i32",
            "above": "*i64",
            "parts": "*fp64",
            **dict.fromkeys(("num_ids", "first_id"), "i32"),
            "scores_stride": "i64",
            "BLOCK": "constexpr",
        },
        {"BLOCK": 4096},
        SOFTMAX_MASS_OPTIONS,
    )
    yield attention_configuration(dtype="bf16", num_tokens=32, num_reqs=32, group=3, head_dim=64)
    yield attention_configuration(dtype="bf16", num_tokens=512, num_reqs=8, group=3, head_dim=64)
    yield attention_configuration(  # Gemma 3's sliding layers
        dtype="bf16", num_tokens=512, num_reqs=8, group=4, head_dim=256, window=512
    )
    yield attention_configuration(  # Gemma 2's full layers
        dtype="bf16", num_tokens=512, num_reqs=8, group=2, head_dim=256, softcap=50.0
    )
    yield attention_configuration(  # Llama 4's chunks
        dtype="fp32", num_tokens=32, num_reqs=32, group=5, head_dim=128, chunk=8192
    )
    # Qwen3-30B-A3B's gate and up; and, where it must not become tf32, a third of its columns
    yield grouped_gemm_configuration(dtype="bf16", num_experts=128, n=1536, k=2048)
    yield grouped_gemm_configuration(dtype="fp32", num_experts=128, n=2048, k=256)


def every_attention_shape() -> Iterator[Configuration]:
    """Attention over the dtypes, head sizes, groups, block sizes and windows that models have: minutes."""
    shapes = (  # group, block_size, window, chunk
        (1, 16, 0, 0),
        (4, 16, 512, 0),
        (7, 1, 0, 0),
        (24, 48, 0, 8192),
        (71, 528, 1000, 0),
    )
    for dtype in _ITEMSIZE:
        for head_dim in (48, 64, 80, 96, 112, 128, 160, 192, 256):
            for group, block_size, window, chunk in shapes:
                for num_tokens in (4, 400):
                    yield attention_configuration(
                        dtype=dtype,
                        num_tokens=num_tokens,
                        num_reqs=4,
                        group=group,
                        head_dim=head_dim,
                        block_size=block_size,
                        window=window,
                        chunk=chunk,
                    )


def aot(*, targets: list[str], every_shape: bool = False) -> list[dict[str, Any]]:
    """Compile and return one record a kernel and target.

    Units: shared_bytes a program; seconds to compile.
    Raises: ValueError under TRITON_INTERPRET, for an unknown target, or for a kernel that takes more shared memory
        than the target has; whatever the compiler raises for one that does not compile.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or not isinstance(_kv_write_kernel, JITFunction):
        raise ValueError(
            "aot: kernels are interpreted in this process; run it without TRITON_INTERPRET"
        )
    unknown = set(targets) - set(TARGETS)
    if unknown:
        raise ValueError(
            f"aot: targets must be among {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}"
        )
    records = []
    for name, kernel, signature, constants, options in [
        *configurations(),
        *(every_attention_shape() if every_shape else ()),
    ]:
        for target_name in targets:
            target, shared_limit = TARGETS[target_name]
            started = time.perf_counter()
            compiled = compile(
                ASTSource(
                    fn=kernel,
                    signature={parameter: signature[parameter] for parameter in kernel.arg_names},
                    constexprs=constants,
                    attrs=_attributes(kernel, signature),
                ),
                target=target,
                options=options,
            )
            if compiled.metadata.shared > shared_limit:
                raise ValueError(
                    f"aot: {name} takes {compiled.metadata.shared} bytes of shared memory, "
                    f"{target_name} has {shared_limit}"
                )
            binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
            assembly = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
            records.append(
                {
                    "kernel": name,
                    "target": target_name,
                    "shared_bytes": compiled.metadata.shared,
                    "binary_bytes": len(binary),
                    "tf32": "tf32" in assembly or "xf32" in assembly,
                    # on AMD a division is made of fused steps, which round as one
                    "fused": target.backend == "cuda" and "fma.rn" in assembly,
                    "seconds": round(time.perf_counter() - started, 2),
                }
            )
    return records


def _attributes(kernel: Any, signature: dict[str, str]) -> dict[tuple[int, ...], list[Any]]:
    """What Triton finds by looking at a launch's arguments: pointers and strides that 16 divides, as torch gives."""
    return {
        (place,): [["tt.divisibility", 16]]
        for place, parameter in enumerate(kernel.arg_names)
        if signature[parameter].startswith("*")
        or (parameter.endswith("stride") and not kernel.params[place].do_not_specialize)
    }


def main(argv: list[str] | None = None) -> int:
    """Print a line a kernel and target; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m rowcast.kernels.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument(
        "--every-shape", action="store_true", help="attention at every shape (minutes)"
    )
    arguments = parser.parse_args(argv)
    records = aot(targets=arguments.target or list(TARGETS), every_shape=arguments.every_shape)
    for record in records:
        print(
            f"{record['kernel']:60s} {record['target']:8s} {record['shared_bytes']:7d} B shared "
            f"{record['binary_bytes']:7d} B {record['seconds']:6.2f} s"
        )
    print(json.dumps(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
