"""Ids that are not to be chosen: their logits become -inf."""

from __future__ import annotations

import numpy as np
import torch


def forbid(logits: torch.Tensor, rows: np.ndarray, ids: np.ndarray) -> None:
    """Shapes: logits [n, num_ids] float32, changed in place; rows and ids [m], one pair for each logit."""
    logits[_on(rows, logits), _on(ids, logits)] = float("-inf")


def _on(places: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places.astype(np.int64)).to(like.device)
