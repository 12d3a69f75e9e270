"""allowed_token_ids: of a row with such a list, all other ids become -inf."""

from __future__ import annotations

import numpy as np
import torch

from .cells import Cells


def keep(logits: torch.Tensor, row: int, ids: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; ids [m], those of the list that are columns here."""
    cells = Cells(logits[row : row + 1], np.zeros_like(ids), ids)
    kept = cells.read()
    logits[row] = float("-inf")
    cells.write(kept)
