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
    rows = np.array([request.row for request in requests])
    if any(hit.num_tokens for hit in hits):
        by_group = list(zip(*(hit.block_ids for hit in hits), strict=True))
        num_blocks = [np.array([len(ids) for ids in group], np.int32) for group in by_group]
        block_ids = [np.concatenate(group) for group in by_group]
    else:
        num_blocks = [np.zeros(len(rows), np.int32)] * len(hits[0].block_ids)
        block_ids = hits[0].block_ids
    return Admissions(
        rows=rows.astype(np.int32),
        request_ids=tuple([request.request_id for request in requests]),
        numbers=table.columns.admitted[:, rows],
        seeds=table.seeds[rows],
        token_ids=np.concatenate([request.tokens for request in requests]),
        features=tuple([request.features for request in requests]),
        num_blocks=tuple(num_blocks),
        block_ids=tuple(block_ids),
    )
