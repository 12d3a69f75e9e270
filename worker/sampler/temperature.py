"""Temperature: scores are logits / temperature; at 0 (or as good as 0) the choice is greedy."""

from __future__ import annotations

import numpy as np
import torch

# Below this a quotient may overflow float32, and the best id has all the probability anyway.
_GREEDY_BELOW = 1e-5


def is_greedy(temperature: np.ndarray) -> np.ndarray:
    """Shapes: [n] -> [n] bool."""
    return temperature < _GREEDY_BELOW


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Shapes: logits [n, num_ids] float32, temperature [n] float32; returns new scores [n, num_ids]."""
    return logits / temperature.unsqueeze(1)
