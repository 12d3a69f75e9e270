"""Root-mean-square layer norm: x / sqrt(mean(x ** 2) + eps) * weight."""

from __future__ import annotations

import torch


class RMSNorm:
    """Normalizes the last dimension in float32, rounds to the weight's dtype, scales, rounds to x's dtype.

    The weight's dtype is where architectures differ: in x's own, Llama's order of rounding; in float32, Gemma's.
    Shapes: weight [size], or [num_heads, size] where heads have their own.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [num_tokens, ...weight's], left as it is; returns the same shape and dtype."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * scale).to(self._weight.dtype).mul_(self._weight).to(x.dtype)
