"""Which device a rank computes on, and in which numbers."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> torch.device:
    """auto is the GPU where torch sees one, else the CPU.

    Raises: ValueError if cuda was asked for and torch sees no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, and torch sees no GPU; use --device cpu")
    return torch.device(name)


def resolve_dtype(
    name: str, stored: str, device: torch.device, *, kernel_backend: str
) -> torch.dtype:
    """auto is what the checkpoint has stored on a GPU; on a CPU, whose own kernels know no other, float32.

    A CPU with bfloat16 units gets float32 too: attention and sampling there are the Numba twins, and Numba has no such
    type.
    Example: ("auto", "bfloat16", cuda) -> bfloat16; ("auto", "bfloat16", cpu) -> float32.
    Raises: ValueError if 16 bits were asked for and the kernels are the CPU's own.
    """
    if name == "auto":
        name = stored if device.type == "cuda" else "float32"
    if kernel_backend == "cpu" and name != "float32":
        raise ValueError(f"dtype {name} needs a GPU; on a CPU use float32 (or auto)")
    return getattr(torch, name)
