"""What every message of this package is made of: MessagePack arrays, integers in range, lists as little-endian bytes.

Owns the checks of single values and the one exception of this process boundary. Knows no message (`messages.py`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")


class ProtocolError(Exception):
    """A message that is not what the protocol allows here: the one exception of this process boundary."""


def bytes_of(array: np.ndarray | Sequence[Any], dtype: np.dtype[Any]) -> bytes:
    """Write numbers as a bin of their little-endian bytes."""
    return np.ascontiguousarray(array, dtype).tobytes()


def pack(values: list[Any]) -> bytes:
    """Write one message."""
    packed = msgpack.packb(values, use_bin_type=True)
    assert packed is not None
    return packed


def short(value: Any) -> str:
    """Quote a value in one line of an error, whatever a peer or a caller gave."""
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write the largest
        return f"an integer of {value.bit_length()} bits"
    # bounded in depth and length, of a hostile value too; arrays are written in lines
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(value: Any, what: str, limit: int) -> int:
    """Take an integer in [0, limit)."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ProtocolError(f"{what} must be an integer in [0, {limit}), got {short(value)}")
    return value


def array_of(value: Any, what: str, dtype: np.dtype[Any] = INT32) -> np.ndarray:
    """Take numbers: a read-only view of the message."""
    if not isinstance(value, bytes) or len(value) % dtype.itemsize:
        size = f"{len(value)} bytes" if isinstance(value, bytes) else short(value)
        raise ProtocolError(
            f"{what} must be bin of a multiple of {dtype.itemsize} bytes, got {size}"
        )
    return np.frombuffer(value, dtype)


def list_of(value: Any, what: str) -> list[Any]:
    """Take an array of anything."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what} must be an array, got {short(value)}")
    return value


def exactly(body: list[Any], length: int, what: str) -> None:
    """Refuse a body of more or fewer values."""
    if len(body) != length:
        raise ProtocolError(f"{what} must carry {length} values, got {len(body)}")


def same_length(array: np.ndarray, length: int, what: str) -> None:
    """Refuse a column that is longer or shorter than the others."""
    if len(array) != length:
        raise ProtocolError(f"{what} must have {length} entries, got {len(array)}")


def lengths_add_up(lengths: np.ndarray, flat: np.ndarray, what: str) -> None:
    """Refuse lists behind one another that are not as long as their lengths say."""
    values = lengths.tolist()  # few, and Python's integers do not overflow
    if values and min(values) < 0:
        raise ProtocolError(f"{what}: a length is negative ({min(values)})")
    if sum(values) != len(flat):
        raise ProtocolError(
            f"{what} must have {sum(values)} entries as its lengths say, got {len(flat)}"
        )
