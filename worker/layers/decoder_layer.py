"""One layer of the decoder: attention and MLP, what normalizes them, and how they are added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .attention import Attention
from .norm import Norm
from .step_context import StepContext


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); what an architecture lacks of its norms is None.

    Beside the norms of what goes in there may be some of what comes out, before the sum. residual_scale multiplies what
    is added. parallel: the MLP sees what attention sees, and both are added at once.
    """

    def __init__(
        self,
        *,
        attention_norm: Norm | None,
        attention: Attention,
        attention_out_norm: Norm | None,
        mlp_norm: Norm | None,
        mlp: Callable[[torch.Tensor, StepContext], torch.Tensor],
        mlp_out_norm: Norm | None,
        residual_scale: float,
        parallel: bool,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._attention_out_norm = attention_out_norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._mlp_out_norm = mlp_out_norm
        self._residual_scale = residual_scale
        self._parallel = parallel

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> None:
        """Shapes: hidden [num_tokens, hidden_size], changed in place."""
        x = _normed(self._attention_norm, hidden)
        attended = self._attention(x, step)
        if self._parallel:
            fed = self._mlp(x, step)
            self._add(hidden, _normed(self._attention_out_norm, attended))
        else:
            self._add(hidden, _normed(self._attention_out_norm, attended))
            fed = self._mlp(_normed(self._mlp_norm, hidden), step)
        self._add(hidden, _normed(self._mlp_out_norm, fed))

    def _add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Rounds the scaled part before it is added, as transformers does."""
        hidden.add_(part if self._residual_scale == 1.0 else part.mul_(self._residual_scale))


def _normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)
