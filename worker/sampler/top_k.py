"""Top-k: of the ids in order of score, ties by id, exactly the first k stay."""

from __future__ import annotations

import numpy as np
import torch


def is_off(top_k: np.ndarray, vocab_size: int) -> np.ndarray:
    """Shapes: [n] -> [n] bool. 0 means all."""
    return (top_k <= 0) | (top_k >= vocab_size)


def kept(top_k: torch.Tensor, num_ordered: int) -> torch.Tensor:
    """Which of the ordered candidates stay.

    Shapes: top_k [n] int64, vocab_size where it is off; returns [n, num_ordered] bool.
    """
    return torch.arange(num_ordered, device=top_k.device) < top_k.unsqueeze(1)
