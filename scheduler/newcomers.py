"""What the workers are told of requests that get a row: the admission columns of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .messages import Admissions
from .prefix_cache import Hit
from .request import Request, RequestTable


def admissions_of(
    table: RequestTable, requests: Sequence[Request], hits: Sequence[Hit]
) -> Admissions:
    """Describe newcomers, who hold their rows already, and the blocks of their cached tokens.

    What they take beyond those travels as growth, like everyone's.
    """
    rows = np.array([request.row for request in requests], np.int32)
    columns = table.columns
    by_group = list(zip(*(hit.block_ids for hit in hits), strict=True))
    return Admissions(
        rows=rows,
        request_ids=tuple(request.request_id for request in requests),
        num_tokens=table.num_settled_tokens[rows],
        token_ids=np.concatenate([request.tokens for request in requests]),
        num_prompt_tokens=table.num_prompt_tokens[rows],
        num_cached_tokens=table.num_cached_tokens[rows],
        seeds=table.seeds[rows],
        temperature=columns.temperature[rows],
        top_p=columns.top_p[rows],
        top_k=columns.top_k[rows],
        min_p=columns.min_p[rows],
        presence_penalty=columns.presence_penalty[rows],
        frequency_penalty=columns.frequency_penalty[rows],
        repetition_penalty=columns.repetition_penalty[rows],
        features=tuple(request.features for request in requests),
        num_blocks=tuple(np.array([len(ids) for ids in group], np.int32) for group in by_group),
        block_ids=tuple(np.concatenate(group) for group in by_group),
    )
