"""Which device a rank computes on."""

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
