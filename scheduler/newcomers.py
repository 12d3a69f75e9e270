"""What the workers are told of requests that get a row: the admission columns of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .messages import Admissions
from .prefix_cache import Hit
from .request import Request


def admissions_of(requests: Sequence[Request], hits: Sequence[Hit]) -> Admissions:
    """Describe newcomers and the blocks of their cached tokens; all others travel as growth, like everyone's."""
    count = len(requests)

    def column(values: Iterable[float], dtype: type = np.int32) -> np.ndarray:
        return np.fromiter(values, dtype, count)

    by_group = list(zip(*(hit.block_ids for hit in hits), strict=True))
    return Admissions(
        rows=column(r.row for r in requests),
        request_ids=tuple(r.request_id for r in requests),
        num_tokens=column(len(r.tokens) for r in requests),
        token_ids=np.concatenate([r.tokens for r in requests]),
        num_prompt_tokens=column(r.num_prompt_tokens for r in requests),
        num_cached_tokens=column(hit.num_tokens for hit in hits),
        seeds=column((r.seed for r in requests), np.int64),
        temperature=column((r.params.temperature for r in requests), np.float32),
        top_p=column((r.params.top_p for r in requests), np.float32),
        top_k=column(r.params.top_k for r in requests),
        min_p=column((r.params.min_p for r in requests), np.float32),
        presence_penalty=column((r.params.presence_penalty for r in requests), np.float32),
        frequency_penalty=column((r.params.frequency_penalty for r in requests), np.float32),
        repetition_penalty=column((r.params.repetition_penalty for r in requests), np.float32),
        features=tuple(r.features for r in requests),
        num_blocks=tuple(column(len(ids) for ids in group) for group in by_group),
        block_ids=tuple(np.concatenate(group) for group in by_group),
    )
