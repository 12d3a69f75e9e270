"""What a step tells of the requests that get a row, and its form on the wire.

Owns that form alone: whether rows, lengths and ids fit the tables is the worker's check. Part of `messages.py`, in a
file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .features import Features
from .wire_form import (
    FLOAT32,
    INT32,
    INT64,
    ProtocolError,
    array_of,
    bytes_of,
    exactly,
    lengths_add_up,
    list_of,
    same_length,
    short,
)

MAX_REQUEST_ID_BYTES = 256

# The lines of `Admissions.numbers`, in this order; real ones are there as the bits of float32.
INTEGERS = ("num_tokens", "num_cached_tokens", "num_prompt_tokens", "top_k")
REALS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
NUM_NUMBERS = len(INTEGERS) + len(REALS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admissions:
    """The requests that get a row in this step, as columns; entry i of each belongs to rows[i].

    Shapes: n requests; numbers one line for each of INTEGERS and REALS, [10, n] int32; token_ids and block_ids are
        concatenated in order, their lengths per request in num_tokens and num_blocks[group]. num_tokens counts prompt
        and earlier outputs, num_prompt_tokens the prompt alone.
    Blocks: num_blocks[group][i] blocks cover at least the cached tokens; what the step needs beyond comes as growth.
    seeds: in [0, 2**63), always drawn. top_k 0 and min_p 0 keep all tokens; a repetition_penalty of 1 is none.
    features: what few requests ask for, None for all others.
    """

    rows: np.ndarray  # [n]
    request_ids: tuple[str, ...]  # n
    numbers: np.ndarray  # [10, n]
    seeds: np.ndarray  # [n] int64
    token_ids: np.ndarray  # [sum(num_tokens)]
    features: tuple[Features | None, ...]  # n
    num_blocks: tuple[np.ndarray, ...]  # one [n] a KV group
    block_ids: tuple[np.ndarray, ...]  # one [sum(num_blocks[group])] a KV group

    @classmethod
    def of(
        cls,
        *,
        rows: np.ndarray,
        request_ids: tuple[str, ...],
        num_tokens: np.ndarray,
        token_ids: np.ndarray,
        num_prompt_tokens: np.ndarray,
        num_cached_tokens: np.ndarray,
        seeds: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
        top_k: np.ndarray,
        min_p: np.ndarray,
        presence_penalty: np.ndarray,
        frequency_penalty: np.ndarray,
        repetition_penalty: np.ndarray,
        features: tuple[Features | None, ...],
        num_blocks: tuple[np.ndarray, ...],
        block_ids: tuple[np.ndarray, ...],
    ) -> Admissions:
        """Put them together from columns [n] by name."""
        integers = [num_tokens, num_cached_tokens, num_prompt_tokens, top_k]
        reals = [
            temperature,
            top_p,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
        ]
        return cls(
            rows=rows,
            request_ids=request_ids,
            numbers=np.concatenate((integers, np.array(reals, FLOAT32).view(INT32)), dtype=INT32),
            seeds=seeds,
            token_ids=token_ids,
            features=features,
            num_blocks=num_blocks,
            block_ids=block_ids,
        )

    @property
    def num_tokens(self) -> np.ndarray:
        return self.numbers[0]

    @property
    def num_cached_tokens(self) -> np.ndarray:
        return self.numbers[1]

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        return self.numbers[2]

    @property
    def top_k(self) -> np.ndarray:
        return self.numbers[3]

    @property
    def reals(self) -> np.ndarray:
        """One line for each of REALS: [6, n] float32."""
        return self.numbers[len(INTEGERS) :].view(FLOAT32)


def admissions_to_wire(admissions: Admissions) -> list[Any]:
    """List what MessagePack is to carry, in the order of the fields."""
    return [
        bytes_of(admissions.rows, INT32),
        list(admissions.request_ids),
        bytes_of(admissions.numbers, INT32),
        bytes_of(admissions.seeds, INT64),
        bytes_of(admissions.token_ids, INT32),
        [b"" if features is None else features.pack() for features in admissions.features],
        [bytes_of(counts, INT32) for counts in admissions.num_blocks],
        [bytes_of(ids, INT32) for ids in admissions.block_ids],
    ]


def admissions_from_wire(value: Any, num_groups: int) -> Admissions:
    """Read them again; arrays are read-only views.

    Raises: ProtocolError for anything that is not exactly such a list.
    """
    exactly(list_of(value, "admissions"), 8, "admissions")
    rows = array_of(value[0], "admissions: rows")
    count = len(rows)
    if count == 0:
        raise ProtocolError("admissions must name at least one row, or be nil")
    numbers = array_of(value[2], "admissions: numbers")
    same_length(numbers, NUM_NUMBERS * count, "admissions: numbers")
    admissions = Admissions(
        rows=rows,
        request_ids=tuple(list_of(value[1], "admissions: request_ids")),
        numbers=numbers.reshape(NUM_NUMBERS, count),
        seeds=array_of(value[3], "admissions: seeds", INT64),
        token_ids=array_of(value[4], "admissions: token_ids"),
        features=_features_from_wire(value[5]),
        num_blocks=_by_group(value[6], "admissions: num_blocks", num_groups),
        block_ids=_by_group(value[7], "admissions: block_ids", num_groups),
    )
    for name in ("request_ids", "seeds", "features"):
        same_length(getattr(admissions, name), count, f"admissions: {name}")
    for request_id in admissions.request_ids:
        if not isinstance(request_id, str) or len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise ProtocolError(
                f"admissions: request_ids must be strings of at most {MAX_REQUEST_ID_BYTES} bytes, "
                f"got {short(request_id)}"
            )
    lengths_add_up(admissions.num_tokens, admissions.token_ids, "admissions: token_ids")
    for group, (counts, ids) in enumerate(
        zip(admissions.num_blocks, admissions.block_ids, strict=True)
    ):
        same_length(counts, count, f"admissions: num_blocks of group {group}")
        lengths_add_up(counts, ids, f"admissions: block_ids of group {group}")
    return admissions


def _by_group(value: Any, what: str, num_groups: int) -> tuple[np.ndarray, ...]:
    groups = list_of(value, what)
    if len(groups) != num_groups:
        raise ProtocolError(f"{what} must have {num_groups} KV groups, got {len(groups)}")
    return tuple(array_of(ids, what) for ids in groups)


def _features_from_wire(value: Any) -> tuple[Features | None, ...]:
    packed = list_of(value, "admissions: features")
    if packed == [b""] * len(packed):  # mostly nobody asks for any
        return (None,) * len(packed)
    return tuple(_features(one, "admissions: features") for one in packed)


def _features(value: Any, what: str) -> Features | None:
    if not isinstance(value, bytes):
        raise ProtocolError(f"{what} must be bin, got {short(value)}")
    try:
        return Features.unpack(value)
    except ValueError as error:
        raise ProtocolError(f"{what}: {error}") from None
