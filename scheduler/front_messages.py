"""What fronts and the scheduler say to each other: the one definition. This docstring is the format.

Every message is a MessagePack array `[version, kind, *body]`; integer lists are `bin` of little-endian int32, request
numbers `bin` of int64. A front numbers its own requests; a number is never used twice by one front. Never pickle.

Front to scheduler (DEALER to ROUTER):

    register  [front_name]                       first message of a front, and again after a reconnect
    submit    [number, submit_key, request_id, prompt_token_ids, output_token_ids, seed, n_index, params,
               priority, user, cache_salt or nil]
    abort     [numbers]                          unknown and finished numbers are ignored
    ack       [numbers]                          the front has the end of these; the scheduler may forget their keys

Scheduler to front:

    outputs   [epoch, numbers, tokens, finish_codes, cached_numbers, cached_tokens, logprobs, prompt_logprobs]
                                                 one entry a token; token -1 when an end brings none; finish_codes bin
                                                 of int8, a FinishCode each. The last two name the requests that were
                                                 admitted with part of their prompt in the prefix cache, and how much
                                                 of it: with their first token or before it.
                                                 logprobs: nil, or [places, rows]: places bin of the entries, ascending,
                                                 whose tokens' log-probabilities were asked for, one array of one row
                                                 each (`extras.py`). prompt_logprobs: nil, or an array of
                                                 [number, first, rows]: of a prompt's tokens at positions first,
                                                 first + 1, ...; all come with the first token or before it
    refused   [number, reason, text]             a RefusalReason; the request is over (never queued, or an error)

submit_key is 24 bytes (client uuid, counter): the same key twice is the same request. output_token_ids are tokens that
the request already has (resubmission). seed is in [0, 2**63), always drawn. params is
[temperature, top_p, top_k, max_tokens or nil, ignore_eos, stop_token_ids, min_p, presence_penalty, frequency_penalty,
repetition_penalty, min_tokens, nil or a map of the rare ones: "logit_bias" [ids, bin of float64], "allowed_token_ids"
ids, "bad_words_token_ids" [ids, ...], "logprobs" n, "prompt_logprobs" n, "structured_outputs" a map of one form and
"disable_any_whitespace" (`structured_outputs.py`)]; what only a front needs of them stays there. priority, user and
cache_salt are those of `request_options.py`.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np

from .extras import LogprobRows, PromptRows
from .front_logprobs import (
    prompt_rows_from_wire,
    prompt_rows_to_wire,
    token_rows_from_wire,
    token_rows_to_wire,
)
from .messages import MAX_REQUEST_ID_BYTES, ProtocolError, wire_text
from .request_options import RequestOptions
from .sampling_params import MAX_SEED, SamplingParams

FRONT_PROTOCOL_VERSION = 4
SUBMIT_KEY_BYTES = 24

_INT8 = np.dtype("i1")
_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")
_FLOAT64 = np.dtype("<f8")


class FrontKind(IntEnum):
    REGISTER = 0
    SUBMIT = 1
    ABORT = 2
    ACK = 3
    OUTPUTS = 10
    REFUSED = 11


class FinishCode(IntEnum):
    """Why a request ended; RUNNING while it has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class RefusalReason(IntEnum):
    """What kind of refusal: the caller's fault, too much load, or the engine's failure."""

    INVALID = 1
    OVERLOADED = 2
    ENGINE_FAILED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Register:
    front_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """One request. prompt_token_ids and output_token_ids are 1-d int32."""

    number: int
    submit_key: bytes
    request_id: str
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    seed: int
    n_index: int = 0
    params: SamplingParams
    priority: int = 0
    user: str = ""
    cache_salt: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    numbers: np.ndarray  # [n] int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    numbers: np.ndarray  # [n] int64


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """New tokens of one front's requests, and what the prefix cache had of their prompts.

    Shapes: numbers [n] int64, tokens [n] int32, finish_codes [n] int8; cached_numbers [m] int64, cached_tokens [m]
        int32.
    logprobs: place in numbers -> one row of that token. prompt_logprobs: rows of prompts, in order of their tokens.
    """

    epoch: int
    numbers: np.ndarray
    tokens: np.ndarray
    finish_codes: np.ndarray
    cached_numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    cached_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Sequence[PromptRows] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    number: int
    reason: RefusalReason
    text: str


FrontMessage = Register | Submit | Abort | Ack | Outputs | Refused


def make_submit_key(client_uuid: bytes, counter: int) -> bytes:
    """Join a client's 16-byte uuid and its request counter into the key that makes resubmission safe."""
    return client_uuid + struct.pack("<Q", counter)


def encode(message: FrontMessage) -> bytes:
    """Serialize one message of either direction."""
    body: list[Any]
    match message:
        case Register():
            kind, body = FrontKind.REGISTER, [message.front_name]
        case Submit():
            params = message.params
            kind = FrontKind.SUBMIT
            body = [
                message.number,
                message.submit_key,
                message.request_id,
                np.ascontiguousarray(message.prompt_token_ids, _INT32).tobytes(),
                np.ascontiguousarray(message.output_token_ids, _INT32).tobytes(),
                message.seed,
                message.n_index,
                [
                    params.temperature,
                    params.top_p,
                    params.top_k,
                    params.max_tokens,
                    params.ignore_eos,
                    list(params.stop_token_ids),
                    params.min_p,
                    params.presence_penalty,
                    params.frequency_penalty,
                    params.repetition_penalty,
                    params.min_tokens,
                    _rare(params),
                ],
                message.priority,
                message.user,
                message.cache_salt,
            ]
        case Abort() | Ack():
            kind = FrontKind.ABORT if isinstance(message, Abort) else FrontKind.ACK
            body = [np.ascontiguousarray(message.numbers, _INT64).tobytes()]
        case Outputs():
            kind = FrontKind.OUTPUTS
            body = [
                message.epoch,
                np.ascontiguousarray(message.numbers, _INT64).tobytes(),
                np.ascontiguousarray(message.tokens, _INT32).tobytes(),
                np.ascontiguousarray(message.finish_codes, _INT8).tobytes(),
                np.ascontiguousarray(message.cached_numbers, _INT64).tobytes(),
                np.ascontiguousarray(message.cached_tokens, _INT32).tobytes(),
                token_rows_to_wire(message.logprobs),
                prompt_rows_to_wire(message.prompt_logprobs),
            ]
        case Refused():
            kind = FrontKind.REFUSED
            body = [message.number, int(message.reason), wire_text(message.text)]
    packed = msgpack.packb([FRONT_PROTOCOL_VERSION, int(kind), *body], use_bin_type=True)
    assert packed is not None
    return packed


def _rare(params: SamplingParams) -> dict[str, Any] | None:
    """What few requests ask for; None if that is nothing."""
    rare: dict[str, Any] = {}
    if params.logit_bias is not None:
        values = np.array(list(params.logit_bias.values()), _FLOAT64)
        rare["logit_bias"] = [_ids(params.logit_bias), values.tobytes()]
    if params.allowed_token_ids is not None:
        rare["allowed_token_ids"] = _ids(params.allowed_token_ids)
    if params.bad_words_token_ids:
        rare["bad_words_token_ids"] = [_ids(word) for word in params.bad_words_token_ids]
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            rare[name] = getattr(params, name)
    if params.structured_outputs is not None:
        rare["structured_outputs"] = params.structured_outputs.to_wire()
    return rare or None


def _ids(ids: Iterable[int]) -> bytes:
    return np.array(list(ids), _INT32).tobytes()


def decode(message: bytes) -> FrontMessage:
    """Read one message of either direction; arrays are read-only views of `message`.

    Raises: ProtocolError for anything that the module docstring does not describe, bad sampling params included.
    """
    try:
        values = msgpack.unpackb(message, raw=False)
        return _decode(values)
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"front message of {len(message)} bytes: {reason}") from None


def peek_submit_number(message: bytes) -> int | None:
    """Read the request number of a submit that `decode` refused; None if it cannot be told."""
    try:
        values = msgpack.unpackb(message, raw=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    if not isinstance(values, list) or len(values) < 3 or values[1] != FrontKind.SUBMIT:
        return None
    number = values[2]
    return number if type(number) is int and 0 <= number < 2**63 else None


def _decode(values: Any) -> FrontMessage:
    if not isinstance(values, list) or len(values) < 2:
        raise ProtocolError("front message must be an array of at least 2 values")
    version, code, *body = values
    if type(version) is not int or version != FRONT_PROTOCOL_VERSION:
        raise ProtocolError(
            f"front message has version {reprlib.repr(version):.20}, this side speaks {FRONT_PROTOCOL_VERSION}; "
            "run the same rowcast on every node"
        )
    if type(code) is not int or code not in tuple(FrontKind):
        raise ProtocolError(f"front message has unknown kind {reprlib.repr(code):.20}")
    kind = FrontKind(code)
    if len(body) != _BODY_LENGTH[kind]:
        raise ProtocolError(
            f"{kind.name.lower()} must carry {_BODY_LENGTH[kind]} values, got {len(body)}"
        )
    if kind is FrontKind.REGISTER:
        return Register(front_name=_string(body[0], "register: front_name", MAX_REQUEST_ID_BYTES))
    if kind is FrontKind.SUBMIT:
        return _submit(body)
    if kind is FrontKind.ABORT:
        return Abort(numbers=_array(body[0], "abort: numbers", _INT64))
    if kind is FrontKind.ACK:
        return Ack(numbers=_array(body[0], "ack: numbers", _INT64))
    if kind is FrontKind.OUTPUTS:
        outputs = Outputs(
            epoch=_integer(body[0], "outputs: epoch", 2**63),
            numbers=_array(body[1], "outputs: numbers", _INT64),
            tokens=_array(body[2], "outputs: tokens", _INT32),
            finish_codes=_array(body[3], "outputs: finish_codes", _INT8),
            cached_numbers=_array(body[4], "outputs: cached_numbers", _INT64),
            cached_tokens=_array(body[5], "outputs: cached_tokens", _INT32),
            logprobs=token_rows_from_wire(body[6]),
            prompt_logprobs=prompt_rows_from_wire(body[7]),
        )
        if not len(outputs.numbers) == len(outputs.tokens) == len(outputs.finish_codes):
            raise ProtocolError("outputs: numbers, tokens and finish_codes differ in length")
        if len(outputs.cached_numbers) != len(outputs.cached_tokens):
            raise ProtocolError("outputs: cached_numbers and cached_tokens differ in length")
        for place, rows in outputs.logprobs.items():
            if place >= len(outputs.tokens) or outputs.tokens[place] != rows.token_ids[0, 0]:
                raise ProtocolError(f"outputs: logprobs of entry {place} are of no token there")
        return outputs
    return Refused(
        number=_integer(body[0], "refused: number", 2**63),
        reason=RefusalReason(_integer(body[1], "refused: reason", 2**31)),
        text=_string(body[2], "refused: text", 2**20),
    )


_BODY_LENGTH = {
    FrontKind.REGISTER: 1,
    FrontKind.SUBMIT: 11,
    FrontKind.ABORT: 1,
    FrontKind.ACK: 1,
    FrontKind.OUTPUTS: 8,
    FrontKind.REFUSED: 3,
}


def _submit(body: list[Any]) -> Submit:
    number, submit_key, request_id, prompt, outputs, seed, n_index, params, *said = body
    if not isinstance(submit_key, bytes) or len(submit_key) != SUBMIT_KEY_BYTES:
        raise ProtocolError(f"submit: submit_key must be bin of {SUBMIT_KEY_BYTES} bytes")
    if not isinstance(params, list) or len(params) != 12:
        raise ProtocolError("submit: params must be an array of 12 values")
    options = RequestOptions(priority=said[0], user=said[1], cache_salt=said[2])
    return Submit(
        number=_integer(number, "submit: number", 2**63),
        submit_key=submit_key,
        request_id=_string(request_id, "submit: request_id", MAX_REQUEST_ID_BYTES),
        prompt_token_ids=_array(prompt, "submit: prompt_token_ids", _INT32),
        output_token_ids=_array(outputs, "submit: output_token_ids", _INT32),
        seed=_integer(seed, "submit: seed", MAX_SEED + 1),
        n_index=_integer(n_index, "submit: n_index", 2**31),
        params=SamplingParams(
            temperature=params[0],
            top_p=params[1],
            top_k=params[2],
            max_tokens=params[3],
            ignore_eos=params[4],
            stop_token_ids=params[5],
            min_p=params[6],
            presence_penalty=params[7],
            frequency_penalty=params[8],
            repetition_penalty=params[9],
            min_tokens=params[10],
            **_rare_from_wire(params[11]),
        ),
        priority=options.priority,
        user=options.user,
        cache_salt=options.cache_salt,
    )


def _rare_from_wire(value: Any) -> dict[str, Any]:
    known = (
        "logit_bias",
        "allowed_token_ids",
        "bad_words_token_ids",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
    )
    if value is None:
        return {}
    if not isinstance(value, dict) or not value or not value.keys() <= set(known):
        raise ProtocolError(
            f"submit: rare params must be nil or a map of some of {', '.join(known)}"
        )
    rare: dict[str, Any] = {
        name: value[name]
        for name in ("logprobs", "prompt_logprobs", "structured_outputs")
        if name in value
    }
    if "logit_bias" in value:
        pair = value["logit_bias"]
        if not isinstance(pair, list) or len(pair) != 2:
            raise ProtocolError("submit: logit_bias must be an array of 2 values")
        ids = _array(pair[0], "submit: ids of logit_bias", _INT32).tolist()
        biases = _array(pair[1], "submit: values of logit_bias", _FLOAT64).tolist()
        if not len(ids) == len(biases) == len(set(ids)):
            raise ProtocolError("submit: logit_bias must have one value for each of its ids")
        rare["logit_bias"] = dict(zip(ids, biases, strict=True))
    if "allowed_token_ids" in value:
        allowed = _array(value["allowed_token_ids"], "submit: allowed_token_ids", _INT32)
        rare["allowed_token_ids"] = allowed.tolist()
    if "bad_words_token_ids" in value:
        words = value["bad_words_token_ids"]
        if not isinstance(words, list):
            raise ProtocolError("submit: bad_words_token_ids must be an array")
        rare["bad_words_token_ids"] = [
            _array(word, "submit: bad_words_token_ids", _INT32).tolist() for word in words
        ]
    return rare


def _integer(value: Any, what: str, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ProtocolError(
            f"{what} must be an integer in [0, {limit}), got {reprlib.repr(value):.40}"
        )
    return value


def _string(value: Any, what: str, limit: int) -> str:
    if not isinstance(value, str) or len(value.encode()) > limit:
        raise ProtocolError(f"{what} must be a string of at most {limit} bytes")
    return value


def _array(value: Any, what: str, dtype: np.dtype[Any]) -> np.ndarray:
    if not isinstance(value, bytes) or len(value) % dtype.itemsize:
        raise ProtocolError(f"{what} must be bin of a multiple of {dtype.itemsize} bytes")
    return np.frombuffer(value, dtype)
