"""What a request may say of itself beside its prompt and its sampling, checked once, here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from .messages import MAX_REQUEST_ID_BYTES
from .wire_form import short

MAX_TEXT_BYTES = MAX_REQUEST_ID_BYTES  # one bound for all that a caller names
_INT32 = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Who asks, how urgently, and with whom its cached prefix may be shared.

    priority: the smaller the more urgent, in [-2**31, 2**31); any but 0 is refused unless the scheduling policy is
        "priority", since it would have no effect.
    user: whose share of the engine it takes under the policy "fair", a name without effect under others; "" is everyone
        who does not say.
    cache_salt: only requests of the same salt share cached prompt blocks, so that nobody can tell from a fast answer
        what others have asked; None or "" is no salt. Both at most 256 bytes of UTF-8.
    Raises: TypeError or ValueError, one sentence that names the field.
    """

    priority: int = 0
    user: str = ""
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", _priority(self.priority))
        check_text("user", self.user)
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        object.__setattr__(self, "cache_salt", self.cache_salt or None)


def check_text(field: str, value: Any, *, min_bytes: int = 0) -> None:
    """Refuse what is no string of min_bytes to 256 bytes of UTF-8; the sentence names the field.

    Raises: TypeError if it is no string; ValueError for its length, or if it is not valid Unicode.
    """
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a string, got {short(value)}")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{field} {short(value)} is not valid Unicode; choose another") from None
    if not min_bytes <= num_bytes <= MAX_TEXT_BYTES:
        allowed = f"{min_bytes} to" if min_bytes else "at most"
        raise ValueError(f"{field} must have {allowed} {MAX_TEXT_BYTES} bytes, got {num_bytes}")


def _priority(value: Any) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # NumPy's integers too
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"priority must be a whole number, got {short(value)}")
    if not -_INT32 <= number < _INT32:
        raise ValueError(f"priority must be in [-2**31, 2**31), got {short(number)}")
    return number
