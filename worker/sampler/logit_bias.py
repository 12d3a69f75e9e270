"""logit_bias: a number is added to the logits of the ids that a row names."""

from __future__ import annotations

import numpy as np
import torch


def add(logits: torch.Tensor, rows: np.ndarray, ids: np.ndarray, bias: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; rows, ids and bias [m], no (row, id) twice."""
    rows_, ids_, bias_ = (
        torch.from_numpy(values).to(logits.device)
        for values in (rows.astype(np.int64), ids.astype(np.int64), bias.astype(np.float32))
    )
    logits[rows_, ids_] += bias_
