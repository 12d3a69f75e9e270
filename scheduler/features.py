"""What a few requests ask of sampling beyond numbers, as arrays that travel once, with the admission.

Owns their form on the wire: b"" for nothing, or a MessagePack map of those that are asked for,

    {"bias": [ids, values], "allowed": ids, "bad_words": [ids, ...], "min_tokens": [n, ids], "logprobs": n,
     "prompt_logprobs": [n, from]}

ids is bin of little-endian int32, values bin of float32; ids are ascending and differ, but for those of a bad word.
Whether the ids lie within the vocabulary is the worker's check. Part of `messages.py`, in a file of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from .sampling_params import MAX_LOGPROBS, SamplingParams

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_NO_IDS = np.empty(0, _INT32)
_NO_VALUES = np.empty(0, _FLOAT32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Features:
    """One request's. Two are equal if they are the same on the wire.

    Shapes: bias_ids int32 and bias float32 [num_biased]; allowed [num_allowed] int32, None for all ids; bad_words one
        int32 array of at least one id each; min_tokens_ids [n] int32, what is not chosen before min_tokens outputs.
    logprobs, prompt_logprobs: how many of the best ids beside each token's own; None for no log-probabilities.
        prompt_logprobs_from: the position of the first prompt token whose row its caller does not have yet.
    """

    bias_ids: np.ndarray = field(default_factory=_NO_IDS.copy)
    bias: np.ndarray = field(default_factory=_NO_VALUES.copy)
    allowed: np.ndarray | None = None
    bad_words: tuple[np.ndarray, ...] = ()
    min_tokens: int = 0
    min_tokens_ids: np.ndarray = field(default_factory=_NO_IDS.copy)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Sequence[int]) -> Features | None:
        """What a request asks for; None if that is nothing."""
        bias = params.logit_bias or {}
        allowed = params.allowed_token_ids
        ends = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        if not (bias or allowed or params.bad_words_token_ids or ends or asks):
            return None
        return cls(
            bias_ids=np.array(list(bias), _INT32),
            bias=np.array(list(bias.values()), _FLOAT32),
            allowed=None if allowed is None else np.array(allowed, _INT32),
            bad_words=tuple(np.array(word, _INT32) for word in params.bad_words_token_ids),
            min_tokens=params.min_tokens if ends else 0,
            min_tokens_ids=np.array(ends, _INT32),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    @property
    def asks(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def adjusts(self) -> bool:
        """Whether anything is done to the logits."""
        return bool(
            len(self.bias_ids) or self.allowed is not None or self.bad_words or self.min_tokens
        )

    def pack(self) -> bytes:
        """Their form on the wire."""
        values: dict[str, Any] = {}
        if len(self.bias_ids):
            values["bias"] = [_bytes_of(self.bias_ids, _INT32), _bytes_of(self.bias, _FLOAT32)]
        if self.allowed is not None:
            values["allowed"] = _bytes_of(self.allowed, _INT32)
        if self.bad_words:
            values["bad_words"] = [_bytes_of(word, _INT32) for word in self.bad_words]
        if self.min_tokens:
            values["min_tokens"] = [self.min_tokens, _bytes_of(self.min_tokens_ids, _INT32)]
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = [self.prompt_logprobs, self.prompt_logprobs_from]
        packed = msgpack.packb(values, use_bin_type=True)
        assert packed is not None
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Features | None:
        """Read them again; arrays are read-only views.

        Raises: ValueError for anything that the module docstring does not describe.
        """
        if not packed:
            return None
        try:
            values = msgpack.unpackb(packed, raw=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise ValueError(f"is no MessagePack: {str(error) or type(error).__name__}") from None
        if not isinstance(values, dict) or not values or not values.keys() <= _KEYS:
            raise ValueError(f"must be a map of some of {', '.join(sorted(_KEYS))}")
        read: dict[str, Any] = {}
        if "bias" in values:
            ids, bias = _pair(values["bias"], "bias")
            read["bias_ids"] = _ids(ids, "bias")
            read["bias"] = _array(bias, "bias", _FLOAT32)
            if len(read["bias"]) != len(read["bias_ids"]):
                raise ValueError("bias: must have as many values as ids")
            if not np.isfinite(read["bias"]).all():
                raise ValueError("bias: must be finite")
        if "allowed" in values:
            read["allowed"] = _ids(values["allowed"], "allowed")
        if "bad_words" in values:
            words = values["bad_words"]
            if not isinstance(words, list) or not words:
                raise ValueError("bad_words: must be an array of at least one")
            read["bad_words"] = tuple(_array(word, "bad_words", _INT32) for word in words)
            if not all(map(len, read["bad_words"])):
                raise ValueError("bad_words: must have at least one id each")
        if "min_tokens" in values:
            count, ids = _pair(values["min_tokens"], "min_tokens")
            read["min_tokens"] = _count(count, "min_tokens", 1, 2**31 - 1)
            read["min_tokens_ids"] = _ids(ids, "min_tokens")
        if "logprobs" in values:
            read["logprobs"] = _count(values["logprobs"], "logprobs", 0, MAX_LOGPROBS)
        if "prompt_logprobs" in values:
            count, first = _pair(values["prompt_logprobs"], "prompt_logprobs")
            read["prompt_logprobs"] = _count(count, "prompt_logprobs", 0, MAX_LOGPROBS)
            read["prompt_logprobs_from"] = _count(first, "prompt_logprobs", 1, 2**31 - 1)
        return cls(**read)

    @property
    def checksum(self) -> int:
        """A number other than 0, in int32, that tells apart what differs: the digest covers it."""
        return (zlib.crc32(self.pack()) >> 1) or 1

    def ids(self) -> Iterable[tuple[str, np.ndarray]]:
        """All token ids, by the name of what they belong to."""
        yield "logit_bias", self.bias_ids
        if self.allowed is not None:
            yield "allowed_token_ids", self.allowed
        for word in self.bad_words:
            yield "bad_words", word
        yield "min_tokens", self.min_tokens_ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self.pack() == other.pack()

    def __hash__(self) -> int:
        return hash(self.pack())


_KEYS = {"bias", "allowed", "bad_words", "min_tokens", "logprobs", "prompt_logprobs"}


def _bytes_of(array: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def _count(value: Any, what: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what}: must be an integer in [{low}, {high}]")
    return value


def _pair(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{what}: must be an array of 2 values")
    return value


def _array(value: Any, what: str, dtype: np.dtype[Any]) -> np.ndarray:
    if not isinstance(value, bytes) or len(value) % dtype.itemsize:
        raise ValueError(f"{what}: must be bin of a multiple of {dtype.itemsize} bytes")
    return np.frombuffer(value, dtype)


def _ids(value: Any, what: str) -> np.ndarray:
    ids = _array(value, what, _INT32)
    if not len(ids) or int(ids[0]) < 0 or (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"{what}: must have at least one id, at least 0, ascending")
    return ids
