"""Messages gone bad: random, truncated, bit-flipped, and whole ones with a wrong value somewhere inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgpack

_WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    2**31,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    0.0,
    1.0,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    b"",
    b"\xff" * 3,
    b"\xff" * 4,
    b"\0" * 8,
    b"\xff" * 24,
    [],
    [[]],
    [b""],
    {},
    {0: 0},
    {"0": [1]},
    msgpack.Timestamp(1, 2),
    msgpack.ExtType(5, b"abc"),
)

_KEYS: tuple[Any, ...] = (-1, 0, 2, 2**63, 1.5, True, "0", "logprobs", b"0")


def mangled(good: Sequence[bytes], count: int, *, seed: int) -> Iterator[bytes]:
    """Make `count` bad messages out of good ones, the same for the same seed."""
    random = Random(seed)
    ways = (_random_bytes, _truncated, _flipped, _flipped, _swapped, _swapped)
    for _ in range(count):
        yield random.choice(ways)(random, random.choice(good))


def _random_bytes(random: Random, good: bytes) -> bytes:
    return random.randbytes(random.randrange(80))


def _truncated(random: Random, good: bytes) -> bytes:
    return good[: random.randrange(len(good))]


def _flipped(random: Random, good: bytes) -> bytes:
    message = bytearray(good)
    for _ in range(random.randint(1, 4)):
        message[random.randrange(len(message))] ^= 1 << random.randrange(8)
    return bytes(message)


def _swapped(random: Random, good: bytes) -> bytes:
    """Replace, drop or double one value, at any depth."""
    values = msgpack.unpackb(good, strict_map_key=False)
    inside = values
    while True:
        place = random.choice([*inside] if isinstance(inside, dict) else range(len(inside)))
        if isinstance(inside[place], list | dict) and inside[place] and random.random() < 0.7:
            inside = inside[place]
            continue
        way = random.random()
        if way < 0.8:
            inside[place] = random.choice(_WRONG)
        elif way < 0.9:
            del inside[place]
        elif isinstance(inside, dict):
            inside[random.choice(_KEYS)] = inside[place]
        else:
            inside.insert(place, inside[place])
        return msgpack.packb(values)
