"""allowed_token_ids: of a row with such a list, all other ids become -inf."""

from __future__ import annotations

import numpy as np
import torch


def keep(logits: torch.Tensor, row: int, ids: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; ids [m], those of the list that are columns here."""
    columns = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    kept = logits[row, columns]
    logits[row] = float("-inf")
    logits[row, columns] = kept
