"""Structured output: rows that may only choose what their mask of the vocabulary allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMasks:
    """Shapes: rows [n], places among the logits' rows; bits [n, num_words] int32: bit i of word w is id 32 * w + i."""

    rows: np.ndarray
    bits: np.ndarray

    def keep(self, logits: torch.Tensor, ids_here: range) -> None:
        """Make all other ids -inf.

        Shapes: logits [num_rows, len(ids_here)] float32, changed in place, of the vocabulary ids ids_here.
        Example: bits [[0b101]] for row 1, ids_here range(2, 4) -> row 1 keeps id 2 and loses id 3.
        """
        first, last = ids_here.start // 32, -(-ids_here.stop // 32)
        words = torch.from_numpy(self.bits[:, first:last].copy()).to(logits.device)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        bits = (
            words.unsqueeze(2) >> places
        ) & 1  # of a negative word too: its sign comes in from above
        start = ids_here.start - 32 * first
        forbidden = bits.flatten(1)[:, start : start + len(ids_here)] == 0
        rows = torch.from_numpy(self.rows).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))

    def allowed(self, row: int) -> np.ndarray | None:
        """The ids that a row may choose, ascending; None if it has no mask."""
        (places,) = np.nonzero(self.rows == row)
        if not len(places):
            return None
        bits = self.bits[places[0]].astype("<i4", copy=False).view(np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int32)
