"""Walk through a GGUF file's header once and check that every length in it stays inside the file.

The gguf package trusts the header: a cut file makes it stumble somewhere, and one damaged count makes it append empty
values until memory is gone. After this walk it reads only what is there. Owns no values, only lengths.

The format (version 2 and 3, little-endian): magic, version u32, tensor count u64, pair count u64; the pairs: key,
type u32, value; then each tensor: name, dimension count u32, dimensions u64, type u32, offset u64. A string is its
length u64 and its bytes; an array its item type u32, its count u64 and the items.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_DIMENSIONS = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def check_gguf_header(path: Path) -> None:
    """Raises: ValueError, one sentence, for a file that cannot be read, is no GGUF, is cut or damaged."""
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ValueError(
                    f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}; "
                    "give a .gguf file or a model folder"
                )
            num_bytes = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _Walk(path, data, num_bytes).header()
    except OSError as error:
        raise ValueError(f"cannot read model file {path}: {error.strerror or error}") from error


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap, num_bytes: int):
        self._path = path
        self._data = data
        self._num_bytes = num_bytes
        self._offset = len(_MAGIC)

    def header(self) -> None:
        version = self._u32()
        if version not in _VERSIONS:
            raise ValueError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, are supported: "
                "convert the model again with a current tool"
            )
        num_tensors, num_pairs = self._u64(), self._u64()
        for _ in range(num_pairs):
            self._string()
            self._value(self._u32())
        for _ in range(num_tensors):
            self._string()
            num_dimensions = self._u32()
            if num_dimensions > _MAX_DIMENSIONS:
                raise self._damaged(f"a tensor has {num_dimensions} dimensions")
            self._skip(8 * num_dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            item_kind, count = self._u32(), self._u64()
            if item_kind == _STRING:
                for _ in range(count):
                    self._string()
            elif item_kind in _VALUE_BYTES:
                self._skip(_VALUE_BYTES[item_kind] * count)
            else:
                raise self._damaged(f"an array holds items of type {item_kind}")
        elif kind in _VALUE_BYTES:
            self._skip(_VALUE_BYTES[kind])
        else:
            raise self._damaged(f"a value is of type {kind}")

    def _string(self) -> None:
        self._skip(self._u64())

    def _u32(self) -> int:
        start = self._offset
        self._skip(_U32.size)
        return _U32.unpack_from(self._data, start)[0]

    def _u64(self) -> int:
        start = self._offset
        self._skip(_U64.size)
        return _U64.unpack_from(self._data, start)[0]

    def _skip(self, num_bytes: int) -> None:
        self._offset += num_bytes
        if self._offset > self._num_bytes:
            raise self._damaged("its header goes on past them")

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"{self._path} is truncated or damaged ({self._num_bytes} bytes are there, {what}); download it again"
        )
