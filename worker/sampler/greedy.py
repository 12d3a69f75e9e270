"""Greedy: the id of the highest score, ties to the lowest id."""

from __future__ import annotations

import torch

from . import keys


def best(scores: torch.Tensor, first_id: int) -> torch.Tensor:
    """The best key of each row.

    Shapes: scores [num_rows, num_ids] float32, of the ids from first_id on; returns [num_rows] int64 keys.
    Example: scores [[1.0, 3.0, 3.0]], first_id 10 -> score 3.0, id 11 (torch.max names the first of equals).
    """
    highest, place = scores.max(dim=-1)
    return keys.pack(highest, place + first_id)
