"""Repetition, frequency and presence penalties, in this order: of the ids that a row has seen, from the table itself.

    repetition  logit / penalty if it is positive, logit * penalty otherwise; ids of prompt and outputs
    frequency   logit - penalty * (times among the outputs)
    presence    logit - penalty, once; ids among the outputs

Nothing is counted ahead: what a row has seen stands in its tokens, so chunks, preemption and reuse of a row change
nothing, and a row without a penalty costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .cells import Cells

# A repetition penalty near 0 makes any logit infinite; below this it stays finite at every temperature.
_HIGHEST = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """Shapes: rows [n], places among the logits' rows; repetition, frequency, presence [n] float32; lengths and
    num_prompt_tokens [n], tokens each has, and how many of them are its prompt; token_ids [sum(lengths)] int32.
    """

    rows: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray
    lengths: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids: np.ndarray


def apply(logits: torch.Tensor, penalties: Penalties, first_id: int) -> None:
    """Penalize.

    Shapes: logits [m, num_ids] float32, of the ids from first_id on, changed in place.
    Example: repetition 2.0 makes 1.0 of 2.0 and -4.0 of -2.0; frequency 0.5 takes 1.5 from an id seen three times.
    """
    num_ids = logits.shape[1]
    of_row = np.repeat(np.arange(len(penalties.rows)), penalties.lengths)
    ids = penalties.token_ids.astype(np.int64) - first_id
    here = (ids >= 0) & (ids < num_ids)
    if (penalties.repetition != 1).any():
        _repetition(logits, penalties, of_row[here], ids[here])
    if (penalties.frequency != 0).any() or (penalties.presence != 0).any():
        starts = np.cumsum(penalties.lengths) - penalties.lengths
        place = np.arange(len(ids)) - np.repeat(starts, penalties.lengths)
        here &= place >= np.repeat(penalties.num_prompt_tokens, penalties.lengths)
        _frequency_and_presence(logits, penalties, of_row[here], ids[here])


def _repetition(
    logits: torch.Tensor, penalties: Penalties, of_row: np.ndarray, ids: np.ndarray
) -> None:
    # An id that was seen twice is written twice, with the same value: nothing accumulates.
    cells = Cells(logits, penalties.rows[of_row], ids)
    factor = torch.from_numpy(penalties.repetition[of_row]).to(logits.device)
    seen = cells.read()
    cells.write(torch.where(seen > 0, seen / factor, seen * factor).clamp_(max=_HIGHEST))


def _frequency_and_presence(
    logits: torch.Tensor, penalties: Penalties, of_row: np.ndarray, ids: np.ndarray
) -> None:
    num_ids = logits.shape[1]
    pairs, counts = np.unique(of_row * num_ids + ids, return_counts=True)
    of_row, ids = np.divmod(pairs, num_ids)
    cells = Cells(logits, penalties.rows[of_row], ids)
    frequency = torch.from_numpy(penalties.frequency[of_row]).to(logits.device)
    presence = torch.from_numpy(penalties.presence[of_row]).to(logits.device)
    times = torch.from_numpy(counts.astype(np.float32)).to(logits.device)
    cells.write(cells.read() - frequency * times - presence)
