"""logit_bias: a number is added to the logits of the ids that a row names."""

from __future__ import annotations

import numpy as np
import torch

from .cells import Cells


def add(logits: torch.Tensor, rows: np.ndarray, ids: np.ndarray, bias: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; rows, ids and bias [m], no (row, id) twice."""
    cells = Cells(logits, rows, ids)
    cells.write(cells.read() + torch.from_numpy(bias).to(logits.device))
