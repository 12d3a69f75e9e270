"""Ids that are not to be chosen: their logits become -inf."""

from __future__ import annotations

import numpy as np
import torch

from .cells import Cells


def forbid(logits: torch.Tensor, rows: np.ndarray, ids: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; rows and ids [m], one pair for each logit."""
    Cells(logits, rows, ids).write(float("-inf"))
