"""Norms over the last dimension of a tensor.

Each computes in float32. Where an architecture differs is when it rounds: by the dtype of its weight. In x's own, the
normalized numbers are rounded and then scaled, Llama's order; in float32 they are scaled and then rounded, Gemma's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..parallel import TensorParallelGroup

Norm = Callable[[torch.Tensor], torch.Tensor]


class RMSNorm:
    """Root mean square: x / sqrt(mean(x ** 2) + eps) * weight.

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


class LayerNorm:
    """The mean taken off, divided by the deviation, scaled and shifted.

    Shapes: weight [size], or [num_heads, size] where heads have their own; bias like weight, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight = weight.float()
        self._bias = bias.float() if bias is not None else None
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [num_tokens, ...weight's], left as it is; returns the same shape and dtype."""
        normal = functional.layer_norm(x.float(), x.shape[-1:], None, None, self._eps)
        normal.mul_(self._weight)
        return (normal if self._bias is None else normal.add_(self._bias)).to(x.dtype)


class AllHeadsRMSNorm:
    """Root mean square over all query heads of the model together, and over all KV heads: a sum over ranks.

    Shapes: weight [q heads + KV heads of this rank, head_dim]. num_q and num_kv are the whole model's heads. counts_kv:
        this rank adds its KV heads to the sum; of ranks that hold the same one, one does.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        *,
        num_local_q: int,
        num_q: int,
        num_kv: int,
        counts_kv: bool,
        parallel: TensorParallelGroup,
    ) -> None:
        self._weight = weight
        self._eps = eps
        num_local_kv, head_dim = weight.shape[0] - num_local_q, weight.shape[1]
        self._num_local = (num_local_q, num_local_kv)
        self._sizes = torch.tensor(
            [num_q * head_dim, num_kv * head_dim], dtype=torch.float32, device=weight.device
        )
        self._counts_kv = counts_kv
        self._parallel = parallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [num_tokens, q heads + KV heads of this rank, head_dim], left as it is; returns the same."""
        wide = x.float()
        of_heads = wide.square().sum(-1)
        squares = torch.stack([part.sum(-1) for part in of_heads.split(self._num_local, 1)], 1)
        if not self._counts_kv:
            squares[:, 1] = 0.0
        squares = self._parallel.sum_(squares)
        scale = squares.div_(self._sizes).add_(self._eps).rsqrt_()
        query, key = wide.split(self._num_local, 1)
        normal = torch.cat((query * scale[:, :1, None], key * scale[:, 1:, None]), 1)
        return normal.to(self._weight.dtype).mul_(self._weight).to(x.dtype)
