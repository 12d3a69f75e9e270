"""Gated feed-forward on this rank's columns: down(activation(gate(x)) * up(x)), summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from ..parallel import TensorParallelGroup
from .linear import Linear
from .step_context import StepContext

# By config.json's names for them.
ACTIVATION_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class GatedMLP:
    """Shapes: gate_up maps hidden_size -> this rank's gate columns, then its up columns; down maps them back.

    activation: one of model_config's ACTIVATIONS. down_bias [hidden_size] is added once, after the sum.
    """

    def __init__(
        self,
        *,
        activation: str,
        gate_up: Linear,
        down: Linear,
        down_bias: torch.Tensor | None,
        parallel: TensorParallelGroup,
    ) -> None:
        self._activation = ACTIVATION_FUNCTIONS[activation]
        self._gate_up = gate_up
        self._down = down
        self._down_bias = down_bias
        self._parallel = parallel

    def __call__(self, x: torch.Tensor, _: StepContext | None = None) -> torch.Tensor:
        """Shapes: x [num_tokens, hidden_size]; returns the same. The step is for `Experts`, which stands here too."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        out = self._parallel.sum_(self._down(self._activation(gate).mul_(up)))
        return out if self._down_bias is None else out.add_(self._down_bias)
