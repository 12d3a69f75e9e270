"""Which kernels this rank runs: Triton's on a GPU, their twins on a CPU.

The one file that imports either side, and only the side that is asked for: a GPU machine may lack Numba, and Triton
decides once, when a kernel file is imported, whether it compiles or interprets. Owns the choice; the kernels' shapes
and meanings are in kernels/, parameter for parameter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .config import KERNEL_BACKENDS

Launcher = Callable[..., None]
_KERNELS = (
    "token_inputs",
    "block_table_gather",
    "slot_mapping",
    "kv_write",
    "paged_attention",
    "grouped_gemm",
    "gumbel_argmax",
    "softmax_mass",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The kernels behind one set of names; each takes what the file of its name in kernels/ says.

    name: "triton" or "cpu".
    uses_mirror: the kernels read tensors on the device, so that the tables need a mirror there (`device_mirror.py`);
        otherwise they read the host's arrays themselves, and take NumPy arrays as well as tensors.
    """

    name: str
    uses_mirror: bool
    token_inputs: Launcher
    block_table_gather: Launcher
    slot_mapping: Launcher
    kv_write: Launcher
    paged_attention: Launcher
    grouped_gemm: Launcher
    gumbel_argmax: Launcher
    softmax_mass: Launcher


def select_backend(
    kernel_backend: str, device: torch.device | str, *, num_threads: int = 1
) -> Backend:
    """Choose and import the kernels for a device.

    Units: num_threads is the CPU twins' threads in this process, set whenever they are chosen; Triton ignores it.
    Example: ("auto", "cuda") -> Triton; ("auto", "cpu") -> the CPU twins; ("triton", "cpu") -> Triton interpreted,
        only under TRITON_INTERPRET=1.
    Raises: ValueError in one sentence if the choice is unknown, cannot run on the device or is not installed.
    """
    if kernel_backend not in KERNEL_BACKENDS:
        raise ValueError(
            f"kernel_backend must be one of {', '.join(KERNEL_BACKENDS)}, got {kernel_backend!r}"
        )
    on_gpu = torch.device(device).type == "cuda"
    if kernel_backend == "auto":
        kernel_backend = "triton" if on_gpu else "cpu"
    if kernel_backend == "triton":
        # The one environment variable read here is Triton's own switch, which it reads at import itself.
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"kernel_backend triton needs a GPU and the device is {device}; use kernel_backend cpu, "
                "or set TRITON_INTERPRET=1 to interpret the kernels (for tests: very slow)"
            )
        return Backend(name="triton", uses_mirror=True, **_import_kernels("..kernels", "triton"))
    if on_gpu:
        raise ValueError(
            f"kernel_backend cpu needs device cpu and the device is {device}; use kernel_backend auto"
        )
    twins = _import_kernels("..kernels.cpu", "numba")
    import_module("..kernels.cpu._numba", __package__).set_threads(num_threads)
    return Backend(
        name="cpu",
        uses_mirror=False,
        **{name: _with_arrays(twin) for name, twin in twins.items()},
    )


def _import_kernels(folder: str, needs: str) -> dict[str, Launcher]:
    try:
        return {
            name: getattr(import_module(f"{folder}.{name}", __package__), name) for name in _KERNELS
        }
    except ModuleNotFoundError as error:
        if error.name != needs:
            raise
        remedy = "pip install numba" if needs == "numba" else "pip install triton (Linux only)"
        raise ValueError(
            f"the {'cpu' if needs == 'numba' else needs} kernels need the package {needs}, which is not "
            f"installed; {remedy}"
        ) from None


def _with_arrays(twin: Launcher) -> Launcher:
    """Let a CPU twin take torch tensors: it sees their memory, nothing is copied."""

    def launch(*args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], np.ndarray):
            # then so are the others: asking each would cost as much as a small kernel
            twin(*args, **kwargs)
            return
        twin(*map(_array, args), **{name: _array(value) for name, value in kwargs.items()})

    launch.__name__ = twin.__name__
    return launch


def _array(value: Any) -> np.ndarray | Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value
