"""Some cells of the logits, read and written by their place in flat memory: an order faster than by pairs."""

from __future__ import annotations

import numpy as np
import torch


class Cells:
    """Shapes: logits [n, num_ids] float32, contiguous; rows and columns [m], a pair a cell; a cell may come twice."""

    def __init__(self, logits: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> None:
        self._flat = logits.view(-1)
        places = rows.astype(np.int64) * logits.shape[1] + columns
        self._places = torch.from_numpy(places).to(logits.device)

    def read(self) -> torch.Tensor:
        """[m] float32."""
        return self._flat.index_select(0, self._places)

    def write(self, values: torch.Tensor | float) -> None:
        """One value for all, or [m]; the same for a cell that stands there twice."""
        if isinstance(values, float):
            self._flat.index_fill_(0, self._places, values)
        else:
            self._flat.scatter_(0, self._places, values)
