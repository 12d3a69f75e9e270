"""A score and its vocabulary id in one int64, so that comparing keys compares scores, ties to the lowest id.

    key = (order(score) << 32) | (2**32 - 1 - id)

order() turns float32 bits into an int32 that sorts as the floats do. Keys are what ranks exchange: exact, and the same
decision everywhere. The kernels make the same ones (kernels/_keys.py).
"""

from __future__ import annotations

import torch

_LOW_32 = 0xFFFFFFFF


def pack(scores: torch.Tensor, ids: torch.Tensor | int) -> torch.Tensor:
    """Shapes: scores float32 and ids int64 broadcast together; returns int64. -0.0 counts as 0.0.

    Example: (1.0, id 7) > (1.0, id 8) > (0.5, id 0).
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(torch.int64) << 32) | (_LOW_32 - ids)


def ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The vocabulary ids, int64."""
    return _LOW_32 - (keys & _LOW_32)


def scores_of(keys: torch.Tensor) -> torch.Tensor:
    """The scores, float32."""
    order = (keys >> 32).to(torch.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)
