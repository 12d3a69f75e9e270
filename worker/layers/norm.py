"""Root-mean-square layer norm: x / sqrt(mean(x ** 2) + eps) * weight."""

from __future__ import annotations

import torch


class RMSNorm:
    """Normalizes the last dimension in float32, scales in x's dtype: transformers' order of rounding."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [num_tokens, hidden_size], left as it is; returns the same shape and dtype."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self._weight)
