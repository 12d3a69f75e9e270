"""Min-p: an id stays if it is at least min_p times as likely as the likeliest: score >= highest + ln(min_p).

The scores are those after temperature. 0 keeps all. It comes before top-k and top-p.
"""

from __future__ import annotations

import numpy as np
import torch


def is_off(min_p: np.ndarray) -> np.ndarray:
    """Shapes: [n] -> [n] bool."""
    return min_p <= 0.0


def lowest_kept(highest: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The score from which on ids stay; -inf where it is off.

    Shapes: highest, the row's highest score, and min_p, both [n] float32; returns [n] float32.
    Example: highest 10.0 and min_p 0.1 -> 7.697.
    """
    return highest + min_p.log()
