"""Steps that together make every kernel compile in every form that serving meets.

The kernels take other tiles for a step that only decodes, and no other form for any count of rows or tokens; the
sampler has one path for each kind of row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..scheduler.kv_groups import KVGroupSpec
from ..scheduler.messages import Admissions, Features, SchedulerOutput
from .config import WorkerConfig

_PROMPT_LEN = 2
# temperature, top_k, top_p, min_p of row 0, 1, 2, ...: greedy, all tokens, each filter alone and two together
_KINDS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 5, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
)

_ASKED = Features(logprobs=1, prompt_logprobs=1)  # row 0 is scored as well


def warm_up_steps(
    config: WorkerConfig, groups: Sequence[KVGroupSpec], num_blocks: int
) -> Iterator[SchedulerOutput]:
    """Prefill and decode one row, then one of each kind (as many as fit), and free them all."""
    prompt_len = min(_PROMPT_LEN, config.max_model_len - 1, config.max_num_batched_tokens)
    if prompt_len < 1:
        return
    blocks_of_row = [-(-(prompt_len + 1) // group.block_size) for group in groups]
    most = min(
        config.max_num_seqs,
        config.max_num_batched_tokens // prompt_len,
        (num_blocks - 1) // sum(blocks_of_row),
    )
    nobody = np.empty(0, np.int32)
    no_blocks = tuple(nobody for _ in groups)
    for num_rows in sorted({min(count, most) for count in (1, len(_KINDS))} - {0}):
        rows = np.arange(num_rows, dtype=np.int32)
        yield SchedulerOutput(
            admissions=_admit(rows, prompt_len, blocks_of_row),
            run_rows=rows if prompt_len > 1 else nobody,
            run_counts=np.full(num_rows, prompt_len, np.int32) if prompt_len > 1 else nobody,
            grown_block_ids=no_blocks,
        )
        if prompt_len + 1 < config.max_model_len:
            yield SchedulerOutput(grown_block_ids=no_blocks)  # the default: each runs its new token
        yield SchedulerOutput(freed_rows=rows, grown_block_ids=no_blocks)


def _admit(rows: np.ndarray, prompt_len: int, blocks_of_row: Sequence[int]) -> Admissions:
    num_rows = len(rows)
    kinds = [_KINDS[row % len(_KINDS)] for row in range(num_rows)]
    block_ids = []
    next_block = 1
    for count in blocks_of_row:
        block_ids.append(np.arange(next_block, next_block + num_rows * count, dtype=np.int32))
        next_block += num_rows * count
    return Admissions.of(
        rows=rows,
        request_ids=tuple(f"warm-up-{row}" for row in range(num_rows)),
        num_tokens=np.full(num_rows, prompt_len, np.int32),
        token_ids=np.zeros(num_rows * prompt_len, np.int32),
        num_prompt_tokens=np.full(num_rows, prompt_len, np.int32),
        num_cached_tokens=np.zeros(num_rows, np.int32),
        seeds=np.arange(num_rows, dtype=np.int64),
        temperature=np.array([kind[0] for kind in kinds], np.float32),
        top_k=np.array([kind[1] for kind in kinds], np.int32),
        top_p=np.array([kind[2] for kind in kinds], np.float32),
        min_p=np.array([kind[3] for kind in kinds], np.float32),
        presence_penalty=np.zeros(num_rows, np.float32),
        frequency_penalty=np.zeros(num_rows, np.float32),
        repetition_penalty=np.ones(num_rows, np.float32),
        features=(_ASKED, *[None] * (num_rows - 1)),
        num_blocks=tuple(np.full(num_rows, count, np.int32) for count in blocks_of_row),
        block_ids=tuple(block_ids),
    )
