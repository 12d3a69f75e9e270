"""What form an answer must have: JSON of a schema, a regular expression, one of some choices, a grammar.

Owns what a user may ask for, and its form on the wire. Compiles nothing (`grammars.py`).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_GRAMMAR_BYTES = 2**20
MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """Exactly one form, by vLLM's names.

    json: a JSON schema, as text or as a dict (kept as text). regex: what the whole answer matches, in the syntax of
        Rust's regex crate. choice: the answers that are allowed, at least one. grammar: Lark as llguidance takes it, or
        GBNF. json_object: True for any JSON object.
    disable_any_whitespace: JSON without any white space between its tokens, rather than at most two line breaks and 32
        blanks at a place. It goes with json and json_object.
    Stop strings and stop ids still end an answer, before it has its form too.

    Raises: ValueError naming the field and what it may be.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        if not isinstance(self.json_object, bool | None):
            raise ValueError(
                f"structured_outputs: json_object must be True, or left out, got {reprlib.repr(self.json_object)}"
            )
        put("json_object", self.json_object or None)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {got}"
            )
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                "structured_outputs: disable_any_whitespace must be True or False, got "
                f"{reprlib.repr(self.disable_any_whitespace)}"
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(
                f"structured_outputs: disable_any_whitespace has no effect on a {given[0]}; leave it out"
            )
        if self.json is not None:
            put("json", _schema(self.json))
        if self.choice is not None:
            put("choice", _choices(self.choice))
        for field in ("regex", "grammar"):
            if getattr(self, field) is not None:
                put(field, _text(field, getattr(self, field)))

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def to_wire(self) -> dict[str, Any]:
        """A map of what is given, of values that MessagePack and JSON have."""
        value = getattr(self, self.kind)
        wire: dict[str, Any] = {self.kind: list(value) if isinstance(value, tuple) else value}
        if self.disable_any_whitespace:
            wire["disable_any_whitespace"] = True
        return wire

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams:
        """Take one as it is, or make it from a mapping of its fields.

        Raises: ValueError for anything else, and for an unknown field.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not value.keys() <= set(known):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, or a dict of some of {', '.join(known)}, "
                f"got {reprlib.repr(value)}"
            )
        return cls(**value)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"structured_outputs: {field} must be a string, not an empty one, got {reprlib.repr(value)}"
        )
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(
            f"structured_outputs: {field} is not valid Unicode; remove the lone surrogate"
        ) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(
            f"structured_outputs: {field} must have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}"
        )
    return value


def _schema(value: Any) -> str:
    """The schema's text. That it is a schema is known when it is compiled."""
    allowed = "structured_outputs: json must be a JSON schema, a dict or its text"
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{allowed}: {error}") from None
    elif isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{allowed}: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(f"{allowed}, got {reprlib.repr(value)}")
    else:
        raise ValueError(f"{allowed}, got {reprlib.repr(value)}")
    return _text("json", value)


def _choices(value: Any) -> tuple[str, ...]:
    allowed = f"structured_outputs: choice must be a list of 1 to {MAX_CHOICES} strings, none of them empty"
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ValueError(f"{allowed}, got {reprlib.repr(value)}")
    choices = tuple(value)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{allowed}, got {len(choices)} entries")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"{allowed}, got the entry {reprlib.repr(choice)}")
    _text("choice", "".join(choices))
    return choices
