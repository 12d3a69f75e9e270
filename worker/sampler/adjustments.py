"""What happens to the logits of a few rows before anything is chosen, greedily or not, in this order:

a mask, allowed_token_ids, bad_words and min_tokens forbid ids; logit_bias adds; penalties subtract. Each rank does it
to its own part of the vocabulary, and needs to hear of no other. What would leave a row nothing is let go for that
token: first bad_words and min_tokens, then allowed_token_ids, a mask never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...scheduler.messages import Features
from . import allowed_token_ids, bad_words, logit_bias, mask, min_tokens, penalties
from .penalties import Penalties
from .row_masks import RowMasks

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFeatures:
    """What one row asks for. row: its place among the logits' rows; outputs [num_outputs] int32, its outputs so far."""

    row: int
    features: Features
    outputs: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjustments:
    """Of all rows of a step that have any. penalties, masks None: no row has one."""

    features: Sequence[RowFeatures] = ()
    penalties: Penalties | None = None
    masks: RowMasks | None = None

    def apply(self, logits: torch.Tensor, ids_here: range, vocab_size: int) -> None:
        """Adjust.

        Shapes: logits [n, len(ids_here)] float32, contiguous, changed in place, of the vocabulary ids ids_here.
        """
        forbidden = []
        if self.masks is not None:
            self.masks.keep(logits, ids_here)
        for asked in self.features:
            row, allowed = asked.row, asked.features.allowed
            within = None if self.masks is None else self.masks.allowed(row)
            if within is not None and allowed is not None:
                both = np.intersect1d(allowed, within)
                allowed = both if len(both) else None
            if allowed is not None:
                allowed_token_ids.keep(logits, row, _columns(allowed, ids_here))
            ids = _forbidden(asked, within if allowed is None else allowed, vocab_size)
            if len(ids):
                forbidden.append((row, _columns(ids, ids_here)))
        if forbidden:
            mask.forbid(logits, *_cells(forbidden))
        biased = [asked for asked in self.features if len(asked.features.bias_ids)]
        if biased:
            cells = [(a.row, _columns(a.features.bias_ids, ids_here)) for a in biased]
            values = [a.features.bias[_are_here(a.features.bias_ids, ids_here)] for a in biased]
            logit_bias.add(logits, *_cells(cells), np.concatenate(values))
        if self.penalties is not None:
            penalties.apply(logits, self.penalties, ids_here.start)


def _forbidden(asked: RowFeatures, allowed: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """The ids that bad_words and min_tokens forbid now, on every rank the same; none if nothing would be left.

    allowed: the ids among which the row chooses, None for all.
    """
    features, outputs = asked.features, asked.outputs
    ids = min_tokens.forbidden(features.min_tokens, features.min_tokens_ids, len(outputs))
    if features.bad_words:
        ids = np.union1d(ids, bad_words.forbidden(features.bad_words, outputs))
    none_left = len(ids) >= vocab_size if allowed is None else bool(np.isin(allowed, ids).all())
    return _NONE if none_left else ids


def _are_here(ids: np.ndarray, ids_here: range) -> np.ndarray:
    return (ids >= ids_here.start) & (ids < ids_here.stop)


def _columns(ids: np.ndarray, ids_here: range) -> np.ndarray:
    return ids[_are_here(ids, ids_here)] - ids_here.start


def _cells(of_rows: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    rows = np.repeat([row for row, _ in of_rows], [len(ids) for _, ids in of_rows])
    return rows, np.concatenate([ids for _, ids in of_rows])
