"""Log-probabilities by hand: NumPy in float64, one row after the other, on the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rowcast.scheduler.extras import LogprobRows


def rows_by_hand(logits: np.ndarray, token_ids: Sequence[int], num_best: int) -> LogprobRows:
    """The rows that logits [n, vocab_size] give for n tokens; of equal scores the lowest id comes first."""
    ids, values, ranks = [], [], []
    for scores, token_id in zip(np.asarray(logits, np.float64), token_ids, strict=True):
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:num_best]
        row = [int(token_id), *best]
        total = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        ids.append(row)
        values.append([scores[i] - total for i in row])
        ranks.append([int((scores >= scores[i]).sum()) for i in row])
    return LogprobRows(
        token_ids=np.array(ids, np.int32),
        logprobs=np.minimum(np.array(values), 0).astype(np.float32),
        ranks=np.array(ranks, np.int32),
    )


def some_rows(token_ids: Sequence[int], num_best: int, *, vocab_size: int = 50) -> LogprobRows:
    """Rows of any tokens below vocab_size."""
    logits = np.random.default_rng(len(token_ids)).normal(0, 2, (len(token_ids), vocab_size))
    return rows_by_hand(logits, token_ids, num_best)
