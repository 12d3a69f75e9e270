"""Top-p: of the ids in order of score, the fewest whose probability together reaches p stay, at least one.

Probabilities are those after temperature, min-p and top-k. Sums are float64: how ids are dealt to ranks changes the
order of summation, and must not change which ids stay.
"""

from __future__ import annotations

import numpy as np
import torch


def is_off(top_p: np.ndarray) -> np.ndarray:
    """Shapes: [n] -> [n] bool."""
    return top_p >= 1.0


def total_mass(masses: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """All ranks' masses together, relative to the highest score of all.

    Shapes: masses [world_size, n] float64 relative to highest [world_size, n] float32; returns [n] float64.
    """
    highest = highest.double()
    return (masses * (highest - highest.amax(dim=0)).exp()).sum(dim=0)


def wanted(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The mass to reach: an id stays while the mass of the ids before it is below this. [n] float64.

    p travels as float32, up to 6e-8 above what was asked: 0.5 + 0.3 must still reach 0.8.
    """
    return top_p.double() * total * (1 - 1e-7)


def kept(
    scores: torch.Tensor, after_top_k: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the ordered candidates stay, and whether the candidates reach p at all.

    Shapes: scores [n, num_ordered] float32, best first; after_top_k the same, bool, what top-k kept; top_p [n]
        float32; total [n] float64, the probability mass after top-k relative to the first score. Returns kept
        [n, num_ordered] bool, and reached [n] bool.
    Example: probabilities 0.5, 0.3, 0.2 and p 0.8 -> the first two; p 0.81 -> all three.
    """
    wide = (scores.double() - scores[:, :1].double()).exp().masked_fill_(~after_top_k, 0.0)
    sums = wide.cumsum(dim=1)
    reach = wanted(top_p, total)
    return after_top_k & (sums - wide < reach.unsqueeze(1)), sums[:, -1] >= reach
