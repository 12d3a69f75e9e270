"""A dense layer on this rank's part of a weight: x @ weight.T + bias.

On a CPU in float32 the weight is repacked once into oneDNN's blocked layout: at 32 rows of a 135M model on two cores
that halves a step's matrix time (115 -> 50 ms) against the row-major weight, which the library repacks on every call.
Knows nothing of ranks: who sums or splits is the caller's business.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

# A packed weight serves any number of rows; this one is what the layout is tuned for (a decode batch).
_PACKED_FOR_ROWS = 32


class Linear:
    """Shapes: weight [out_features, in_features]; bias [out_features] or None; called on [num_tokens, in_features].

    Where `packs` says so the weight was only read, and its memory may be used again.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = None
        if packs(weight.dtype, weight.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self.weight = None if self._packed is not None else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self.weight is not None
        return functional.linear(x, self.weight, self._bias)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a `Linear` holds its weight in oneDNN's own layout, apart from the tensor that it was made of."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and mkldnn.enabled and _has_operators()


@cache
def _has_operators() -> bool:
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1), _PACKED_FOR_ROWS)
    except (AttributeError, NotImplementedError):  # torch built without these operators
        return False
    return True
