"""Steps written by hand, for tests of the worker: what a scheduler would send, in few words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from rowcast.scheduler.kv_groups import KVGroupSpec
from rowcast.scheduler.messages import Admissions, Features, SchedulerOutput
from rowcast.worker.state import WorkerState


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def group(block_size: int) -> KVGroupSpec:
    return KVGroupSpec(block_size=block_size, num_kv_heads=1, head_dim=8, layers=(0,))


def make_state(
    *block_sizes: int,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    num_blocks: int = 100,
    vocab_size: int = 1000,
) -> WorkerState:
    return WorkerState(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        groups=tuple(group(size) for size in block_sizes or (16,)),
        num_blocks=num_blocks,
        vocab_size=vocab_size,
    )


def request(
    row: int,
    tokens: Sequence[int],
    *blocks: Sequence[int],
    cached: int = 0,
    prompt: int | None = None,
    request_id: str | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    features: Features | None = None,
) -> dict:
    """One request to admit; blocks is one list a KV group, prompt its prompt length if outputs are among the tokens."""
    return {
        "rows": row,
        "request_ids": request_id or f"request-{row}",
        "tokens": list(tokens),
        "num_prompt_tokens": len(tokens) if prompt is None else prompt,
        "num_cached_tokens": cached,
        "blocks": blocks,
        "seeds": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "features": features,
    }


def admissions(*requests: dict, num_groups: int = 1) -> Admissions:
    def column(name: str, dtype: type = np.int32) -> np.ndarray:
        return np.array([entry[name] for entry in requests], dtype)

    def blocks_of(entry: dict, index: int) -> Sequence[int]:
        return entry["blocks"][index] if entry["blocks"] else ()

    return Admissions.of(
        rows=column("rows"),
        request_ids=tuple(entry["request_ids"] for entry in requests),
        num_tokens=i32(*(len(entry["tokens"]) for entry in requests)),
        token_ids=i32(*(token for entry in requests for token in entry["tokens"])),
        num_prompt_tokens=column("num_prompt_tokens"),
        num_cached_tokens=column("num_cached_tokens"),
        seeds=column("seeds", np.int64),
        temperature=column("temperature", np.float32),
        top_p=column("top_p", np.float32),
        top_k=column("top_k"),
        min_p=column("min_p", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        features=tuple(entry["features"] for entry in requests),
        num_blocks=tuple(
            i32(*(len(blocks_of(entry, index)) for entry in requests))
            for index in range(num_groups)
        ),
        block_ids=tuple(
            i32(*(block for entry in requests for block in blocks_of(entry, index)))
            for index in range(num_groups)
        ),
    )


def step(
    *admitted: dict,
    free: Sequence[int] = (),
    run: dict[int, int] | None = None,
    pause: Sequence[int] = (),
    grow: Sequence[Sequence[int]] = ((),),
    masked: Sequence[int] = (),
) -> SchedulerOutput:
    """A step; run maps rows to token counts, grow is one list of block ids a KV group."""
    return SchedulerOutput(
        freed_rows=i32(*free),
        admissions=admissions(*admitted, num_groups=len(grow)) if admitted else None,
        run_rows=i32(*(run or {})),
        run_counts=i32(*(run or {}).values()),
        paused_rows=i32(*pause),
        grown_block_ids=tuple(i32(*ids) for ids in grow),
        masked_rows=i32(*masked),
    )


def row_arrays(state: WorkerState) -> dict[str, np.ndarray]:
    """Every per-row array of both tables, found by looking: a field that is added later is in here too."""
    arrays = {
        name: value for name, value in vars(state.requests).items() if isinstance(value, np.ndarray)
    }
    for name, value in vars(state.block_tables).items():
        if isinstance(value, tuple):
            for index, array in enumerate(value):
                if isinstance(array, np.ndarray):
                    arrays[f"{name}[{index}]"] = array
    assert all(array.shape[0] == state.max_num_seqs for array in arrays.values())
    return arrays


def digest(state: WorkerState) -> bytes:
    """A fingerprint of everything the tables hold."""
    fold = hashlib.blake2b(digest_size=16)
    for array in row_arrays(state).values():
        fold.update(array.data)
    fold.update(repr(state.requests.request_ids).encode())
    fold.update(repr(sorted(state.requests.penalized)).encode())
    for asked in (state.requests.features, state.requests.asking):
        for row, features in sorted(asked.items()):
            fold.update(bytes([row]) + features.pack())
    return fold.digest()
