"""Random JSON schemas whose documents are short: an answer of a small model comes to its end."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "tags", "address", "id", "is open", 'a "b"', "größe", "x", "unit_price")
_WORDS = ("red", "green", "blue", "cat", "dog", "", "été", "a/b", 'say "hi"', "new\nline")


def random_schema(whim: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object of 1 to 4 properties, some of them optional; nested at most `depth` deep."""
    names = whim.sample(_NAMES, whim.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(whim, depth - 1) for name in names},
        "required": [name for name in names if whim.random() < 0.7],
        "additionalProperties": False,
    }


def _value(whim: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_enum, _const, _integer, _small, _string, _pattern, _boolean, _null]
    if depth:
        kinds += [_array, _array, random_schema, random_schema, _one_of]
    return whim.choice(kinds)(whim, depth)


def _enum(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": whim.sample([*_WORDS, 0, -7, 2.5, True, None], whim.randint(1, 4))}


def _const(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"const": whim.choice([*_WORDS, 12, False, [1, "a"], {"k": None}])}


def _integer(whim: random.Random, depth: int) -> dict[str, Any]:
    low = whim.randint(-1_000, 1_000)
    return {"type": "integer", "minimum": low, "maximum": low + whim.randint(0, 5_000)}


def _small(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": whim.randint(2, 99)}


def _string(whim: random.Random, depth: int) -> dict[str, Any]:
    low = whim.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + whim.randint(0, 12)}


def _pattern(whim: random.Random, depth: int) -> dict[str, Any]:
    patterns = ("^[A-Z]{2}[0-9]{3}$", "^(ab|cd)+e{1,3}$", "^[0-9]{4}-[0-9]{2}$")
    return {"type": "string", "pattern": whim.choice(patterns), "maxLength": 12}


def _boolean(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["null", "boolean"]}


def _array(whim: random.Random, depth: int) -> dict[str, Any]:
    low = whim.randint(0, 2)
    return {
        "type": "array",
        "items": _value(whim, depth - 1),
        "minItems": low,
        "maxItems": low + whim.randint(0, 2),
    }


def _one_of(whim: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(whim, depth - 1), _value(whim, depth - 1)]}
