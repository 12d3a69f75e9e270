"""A dense layer on this rank's part of a weight: x @ weight.T + bias.

On a CPU in float32 the weight is repacked once into oneDNN's blocked layout: at 32 rows of a 135M model on two cores
that halves a step's matrix time (115 -> 50 ms) against the row-major weight, which the library repacks on every call.
Knows nothing of ranks: who sums or splits is the caller's business.
"""

from __future__ import annotations

import torch
from torch.nn import functional

# A packed weight serves any number of rows; this one is what the layout is tuned for (a decode batch).
_PACKED_FOR_ROWS = 32


class Linear:
    """Shapes: weight [out_features, in_features]; bias [out_features] or None; called on [num_tokens, in_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = _packed(weight)
        self._weight = None if self._packed is not None else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self._weight is not None
        return functional.linear(x, self._weight, self._bias)


def _packed(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's own layout, or None where this torch, dtype or device has none."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    except (AttributeError, NotImplementedError):  # torch built without these operators
        return None
