"""What a user may ask of sampling, checked once, here. Owns ranges and defaults; samples nothing."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .structured_outputs import StructuredOutputsParams
from .wire_form import short

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 2.0
MIN_FLOAT32 = (
    2.0**-126
)  # top_p and others travel as float32, which makes 0 of less; no worker takes that
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # characters
MAX_BAD_WORD_TOKENS = 2048  # more than a word of so many characters can have
MAX_STOP_STRINGS = 4
MAX_N = 1024
MAX_LOGPROBS = 20


def _integer(field: str, value: Any, low: int, high: int | None, allowed: str) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{field} must be {allowed}, got {short(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{field} must be {allowed}, got {short(value)}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{field} must be {allowed}, got {short(number)}")
    return number


def _real(field: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool | str | bytes):
        raise ValueError(f"{field} must be {allowed}, got {short(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{field} must be {allowed}, got {short(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{field} must be {allowed}, got {number}")
    return number


def _flag(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, got {short(value)}")


def _check_unicode(field: str, text: str) -> None:
    """No text ever holds half a character."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(
            f"{field} must be valid Unicode, got {short(text)}; remove the lone surrogate"
        )


def _stop_strings(value: Any) -> tuple[str, ...]:
    """Bring `stop` to a tuple. Whatever its size, only its first few entries are looked at."""
    allowed = f"a string or a list of at most {MAX_STOP_STRINGS} strings, none of them empty"
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise ValueError(f"stop must be {allowed}, got {short(value)}")
    if len(listed) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must be {allowed}, got {len(listed)} entries")
    for entry in listed:
        if not isinstance(entry, str) or not entry:
            raise ValueError(f"stop must be {allowed}, got the entry {short(entry)}")
        _check_unicode("stop", entry)
    return tuple(listed)


def _within(field: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A number in [low, high], or in (low, high] if it must be above."""
    allowed = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    number = _real(field, value, allowed)
    if number > high or number < low or (above and number == low):
        raise ValueError(f"{field} must be {allowed}, got {number}")
    return max(number, MIN_FLOAT32) if above else number


def _entries(field: str, value: Any, allowed: str, most: int) -> tuple[Any, ...]:
    """Bring a list to a tuple. Whatever its size, no more is taken from it than shows that it is too long."""
    try:
        entries = None if isinstance(value, str | bytes | Mapping) else islice(value, most + 1)
    except TypeError:  # NumPy's arrays of no dimension say that they are iterable
        entries = None
    if entries is None:
        raise ValueError(f"{field} must be {allowed}, got {short(value)}")
    taken = tuple(entries)
    if len(taken) > most:
        got = len(value) if isinstance(value, Sized) else "more"
        raise ValueError(f"{field} must have at most {most} entries, got {got}")
    return taken


def _token_ids(field: str, value: Any, most: int) -> tuple[int, ...]:
    allowed = "a list of token ids (integers, at least 0)"
    entries = _entries(field, value, allowed, most)
    return tuple(_integer(field, token_id, 0, 2**31 - 1, allowed) for token_id in entries)


def _logit_bias(value: Any) -> dict[int, float]:
    """Token id -> bias, in the order of the ids. An id may be given in digits, as JSON has it."""
    allowed = "a dict of token id (an integer, at least 0) to a number in [-100, 100]"
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be {allowed}, got {short(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = _integer("logit_bias", int(key) if digits else key, 0, 2**31 - 1, allowed)
        number = _real("logit_bias", bias, allowed)
        if not -100 <= number <= 100:
            raise ValueError(f"logit_bias must be {allowed}, got {number} for token id {token_id}")
        if token_id in biases:
            raise ValueError(f"logit_bias names token id {token_id} twice")
        biases[token_id] = number
    return dict(sorted(biases.items()))


def _bad_words(value: Any) -> tuple[str, ...]:
    allowed = f"a list of strings of 1 to {MAX_BAD_WORD_LEN} characters"
    words = _entries("bad_words", value, allowed, MAX_BAD_WORDS)
    for word in words:
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_LEN:
            raise ValueError(f"bad_words must be {allowed}, got {short(word)}")
        _check_unicode("bad_words", word)
    return words


def _bad_words_token_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    name = "bad_words_token_ids"
    allowed = f"a list of lists of 1 to {MAX_BAD_WORD_TOKENS} token ids"
    words = _entries(name, value, allowed, 2 * MAX_BAD_WORDS)
    if not all(isinstance(word, Iterable) for word in words):
        raise ValueError(f"{name} must be {allowed}, got {short(words)}")
    of_words = tuple(_token_ids(name, word, MAX_BAD_WORD_TOKENS) for word in words)
    if not all(of_words):
        raise ValueError(f"{name} must be {allowed}, got an empty one")
    return of_words


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings follow vLLM's.

    temperature: 0 is greedy; otherwise logits are divided by it, in [0, 2].
    min_p: keep the tokens at least min_p times as likely as the most likely one, in [0, 1]; 0 keeps all.
    top_k: keep the k most likely tokens; 0 or -1 keeps all. top_p: keep the smallest set whose probability
        reaches top_p, in (0, 1]; anything below 2**-126 counts as that. Order: temperature, min_p, then k, then p.
    seed: in [0, 2**63); None draws one when the request is submitted. The token at a position depends on the seed,
        the position and the vocabulary id alone, never on the batch it shares.
    max_tokens: output tokens at most, at least 1; None means up to max_model_len.
    ignore_eos: go on past the model's end-of-sequence ids. stop_token_ids: further ids that end the request
        (the id is the last output, finish reason "stop").
    presence_penalty, frequency_penalty: subtracted from the logit of every token among the outputs, once and for each
        time, in [-2, 2]. repetition_penalty: divides the logit of every token of prompt and outputs if it is positive
        and multiplies it otherwise, in (0, 2]; 1 is none.
    logit_bias: token id -> what is added to its logit, in [-100, 100]. allowed_token_ids: only these are chosen.
    bad_words: texts that never appear among the outputs, with or without a space before them: the last token of one is
        never chosen where the outputs end in its others.
    Where bad_words and min_tokens would leave nothing of allowed_token_ids, they are let go for that token.
    bad_words_token_ids is filled in by whoever has the tokenizer, never by a user.
    min_tokens: outputs before which neither an end token nor a stop string ends the request, at most max_tokens; the
        tokens that would end it are not chosen, an ignored EOS neither.
    stop: at most 4 strings that end the text: right before the one that was found, or right after it with
        include_stop_str_in_output, which also keeps the text of an id that ended it. Later tokens are dropped.
    n: answers to one prompt, at least 1, each with its own seed: seed + i where one is given. Greedy answers would be
        equal, so n > 1 needs a temperature.
    logprobs: the log-probability of each output token, and of so many of the best ids at its place, in [0, 20];
        None for none. prompt_logprobs: the same of the prompt's tokens. They are those of the model itself: before
        penalties, temperature and whatever else changes what is chosen. A request that asks for those of its prompt
        computes all of it, also what is cached.
    structured_outputs: the form that the whole answer must have (StructuredOutputsParams, or a dict of its fields). It
        ends the answer once nothing more may follow, and it prevails: where it leaves nothing of allowed_token_ids,
        these are let go for that token, and so are bad_words, min_tokens and ignore_eos.
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        put("temperature", _within("temperature", self.temperature, 0, MAX_TEMPERATURE))
        put("top_p", _within("top_p", self.top_p, 0, 1, above=True))
        put("min_p", _within("min_p", self.min_p, 0, 1))
        for penalty in ("presence_penalty", "frequency_penalty"):
            put(penalty, _within(penalty, getattr(self, penalty), -2, 2))
        repetition = _within("repetition_penalty", self.repetition_penalty, 0, 2, above=True)
        put("repetition_penalty", repetition)
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
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(self, field)
            if count is not None:
                allowed = f"an integer in [0, {MAX_LOGPROBS}], or None for none"
                put(field, _integer(field, count, 0, MAX_LOGPROBS, allowed))
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        put("stop_token_ids", _token_ids("stop_token_ids", ends, MAX_STOP_TOKEN_IDS))
        if self.logit_bias is not None:
            put("logit_bias", _logit_bias(self.logit_bias) or None)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not ids:
                raise ValueError(
                    "allowed_token_ids must name at least one token id, or be None for all"
                )
            put("allowed_token_ids", tuple(sorted(set(ids))))
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        put("bad_words", () if self.bad_words is None else _bad_words(self.bad_words))
        put("bad_words_token_ids", _bad_words_token_ids(self.bad_words_token_ids))
