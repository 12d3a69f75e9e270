"""Log-probabilities without a model: scores depend on the position alone, so that anyone can say what is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...scheduler.agreement import Asked
from ...scheduler.extras import LogprobRows, RowExtras

_LEVELS = 31  # of scores: many ids tie


def rows_at(
    positions: np.ndarray, token_ids: np.ndarray, num_best: int, vocab_size: int
) -> LogprobRows:
    """The rows of tokens [n] that stand at positions [n]."""
    num_best = min(num_best, vocab_size)
    ids = np.arange(vocab_size)
    scores = ((ids * 7 + positions[:, None] * 13) % _LEVELS) / 4
    best = np.argsort(-scores, axis=1, kind="stable")[:, :num_best]
    columns = np.concatenate((np.asarray(token_ids)[:, None], best), axis=1)
    of_columns = np.take_along_axis(scores, columns, axis=1)
    total = np.log(np.exp(scores).sum(axis=1, keepdims=True))
    ranks = (scores[:, None, :] >= of_columns[:, :, None]).sum(axis=2)
    return LogprobRows(
        token_ids=columns.astype(np.int32),
        logprobs=(of_columns - total).astype(np.float32),
        ranks=ranks.astype(np.int32),
    )


def fake_extras(
    asked: Sequence[Asked] | None, tokens: np.ndarray, seq_lens: np.ndarray, vocab_size: int
) -> dict[int, RowExtras] | None:
    """What a step brings to those who asked. Shapes: tokens and seq_lens (the step's tokens included) [num_reqs]."""
    if asked is None:
        return None
    extras = {}
    for one in asked:
        b, sampled, prompt = one.batch_index, None, None
        if one.num_best is not None:
            own = slice(b, b + 1)
            sampled = rows_at(seq_lens[own], tokens[own], one.num_best, vocab_size)
        if len(one.targets):
            positions = one.first + np.arange(len(one.targets))
            prompt = rows_at(positions, one.targets, one.num_prompt_best, vocab_size)
        extras[b] = RowExtras(logprobs=sampled, prompt_logprobs=prompt)
    return extras
