"""Which log-probabilities a step computes, and for whom: scheduler and workers derive it alike, nothing is sent.

A step that runs the token at a prompt's position p scores the prompt token at p + 1; so the first one has no row, and
the chunk that ends the prompt has no row for what it samples: that is an output. Part of `agreement.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .features import Features

if TYPE_CHECKING:
    from .agreement import StepPlan

_NO_TARGETS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one request of a step asked for, in that step.

    num_best: how many of the best ids beside the sampled token's own; None: nothing of a sampled token.
    first: the position of the first scored prompt token. targets [n] int32: the scored prompt tokens, a copy.
    flat_token: the flat token whose logits score the first of them; the others follow.
    num_prompt_best: as num_best, of the prompt tokens.
    """

    batch_index: int
    row: int
    num_best: int | None
    first: int = 0
    targets: np.ndarray
    flat_token: int = 0
    num_prompt_best: int = 0


def asked_of_step(
    asking: Mapping[int, Features],
    token_ids: np.ndarray,
    num_prompt_tokens: np.ndarray,
    plan: StepPlan,
) -> list[Asked] | None:
    """Find who gets what of this step, in batch order; None if nobody gets anything.

    Shapes: token_ids [max_num_seqs, max_model_len] int32, of which prompts are read; num_prompt_tokens [max_num_seqs].
    asking: by row, the features of those that ask for log-probabilities at all.
    Example: a prompt of 13 tokens in chunks of 5, 5 and 3 -> rows of the tokens at 1..5, 6..10 and 11..12.
    """
    batch = plan.batch
    found = []
    for batch_index in np.flatnonzero(np.isin(batch.rows, list(asking))).tolist():
        row = int(batch.rows[batch_index])
        features = asking[row]
        num_best = features.logprobs if plan.samples[batch_index] else None
        start = int(plan.num_computed_tokens[batch_index])
        first, end = 0, 0
        if features.prompt_logprobs is not None:
            first = max(start + 1, features.prompt_logprobs_from)
            end = min(int(plan.seq_lens[batch_index]) + 1, int(num_prompt_tokens[row]))
        if num_best is None and first >= end:
            continue
        found.append(
            Asked(
                batch_index=batch_index,
                row=row,
                num_best=num_best,
                first=first,
                targets=token_ids[row, first:end].copy() if first < end else _NO_TARGETS,
                flat_token=int(batch.query_start_loc[batch_index]) + first - 1 - start,
                num_prompt_best=features.prompt_logprobs or 0,
            )
        )
    return found or None
