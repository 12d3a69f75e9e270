"""What a user may ask of sampling, checked once, here. Owns ranges and defaults; samples nothing."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 2.0
MIN_TOP_P = 2.0**-126  # top_p travels as float32, which makes 0 of less, and no worker takes that
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 4
MAX_N = 1024


def _integer(field: str, value: Any, low: int, high: int | None, allowed: str) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{field} must be {allowed}, got {reprlib.repr(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{field} must be {allowed}, got {reprlib.repr(value)}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{field} must be {allowed}, got {number}")
    return number


def _real(field: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool | str | bytes):
        raise ValueError(f"{field} must be {allowed}, got {reprlib.repr(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{field} must be {allowed}, got {reprlib.repr(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{field} must be {allowed}, got {number}")
    return number


def _flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, got {reprlib.repr(value)}")


def _stop_strings(value: Any) -> tuple[str, ...]:
    """Bring `stop` to a tuple. Whatever its size, only its first few entries are looked at."""
    allowed = f"a string or a list of at most {MAX_STOP_STRINGS} strings, none of them empty"
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise ValueError(f"stop must be {allowed}, got {reprlib.repr(value)}")
    if len(listed) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must be {allowed}, got {len(listed)} entries")
    for entry in listed:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"stop must be {allowed}, got the entry {reprlib.repr(entry)}")
    return tuple(listed)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings follow vLLM's.

    temperature: 0 is greedy; otherwise logits are divided by it, in [0, 2].
    top_k: keep the k most likely tokens; 0 or -1 keeps all. top_p: keep the smallest set whose probability
        reaches top_p, in (0, 1]; anything below 2**-126 counts as that. Order: temperature, then k, then p.
    seed: in [0, 2**63); None draws one when the request is submitted. The token at a position depends on the seed,
        the position and the vocabulary id alone, never on the batch it shares.
    max_tokens: output tokens at most, at least 1; None means up to max_model_len.
    ignore_eos: go on past the model's end-of-sequence ids. stop_token_ids: further ids that end the request
        (the id is the last output, finish reason "stop").
    min_tokens: outputs before which neither an end token nor a stop string ends the request, at most max_tokens.
    stop: at most 4 strings that end the text: right before the one that was found, or right after it with
        include_stop_str_in_output, which also keeps the text of an id that ended it. Later tokens are dropped.
    n: answers to one prompt, at least 1, each with its own seed: seed + i where one is given. Greedy answers would be
        equal, so n > 1 needs a temperature.
    detokenize: False gives token ids and no text. skip_special_tokens: leave special tokens out of the text.

    Raises: ValueError naming the field and its allowed range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        allowed = f"a number in [0, {MAX_TEMPERATURE:g}]"
        temperature = _real("temperature", self.temperature, allowed)
        if not 0 <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be {allowed}, got {temperature}")
        put("temperature", temperature)
        allowed = "a number in (0, 1]"
        top_p = _real("top_p", self.top_p, allowed)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be {allowed}, got {top_p}")
        put("top_p", max(top_p, MIN_TOP_P))
        top_k = _integer(
            "top_k", self.top_k, -1, 2**31 - 1, "an integer, at least 1, or 0 or -1 for all tokens"
        )
        put("top_k", max(top_k, 0))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, MAX_SEED, "an integer in [0, 2**63)"))
        if self.max_tokens is not None:
            allowed = "an integer, at least 1, or None for as many as fit"
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, allowed))
        for field in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
        ):
            _flag(field, getattr(self, field))
        high = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        allowed = "an integer, at least 0 and at most max_tokens"
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, high, allowed))
        put("stop", _stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are looked for in the text: they need detokenize=True")
        allowed = f"an integer in [1, {MAX_N}]"
        put("n", _integer("n", self.n, 1, MAX_N, allowed))
        if self.n > 1 and not self.temperature:
            raise ValueError(
                f"n must be 1 when temperature is 0, got {self.n}: all greedy answers are the same"
            )
        allowed = "a list of token ids (integers, at least 0)"
        ids = self.stop_token_ids
        if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
            raise ValueError(f"stop_token_ids must be {allowed}, got {reprlib.repr(ids)}")
        ids = tuple(ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} entries, got {len(ids)}"
            )
        put(
            "stop_token_ids",
            tuple(_integer("stop_token_ids", i, 0, 2**31 - 1, allowed) for i in ids),
        )
