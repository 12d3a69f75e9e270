"""A recording: every frame and result of an engine's lives, appended to one file. This docstring is the format.

    file     MAGIC, then records
    record   kind u8, sequence u64, length u32, crc32 of the payload u32, crc32 of the four fields before u32; payload
    life     sequence 0; MessagePack map of `Life`: begins one life (epoch) of a worker group
    frame    the bytes of a step, mask or control frame as they were sent
    result   the bytes of rank 0's result as they were received

All numbers little-endian. Under lookahead a result comes after frames that were sent before it arrived; the sequence
says whose it is. Two checksums, so that damage in a length is told from a torn end. Owns the file, not what its bytes
mean (`messages.py`) nor their replay.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack

from .. import __version__
from .config import MAX_DEPTH
from .kv_groups import AttentionKind, KVGroupSpec
from .scheduler import Scheduler

MAGIC = b"rowcast recording 1\n"
_FIELDS = struct.Struct("<BQII")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CRC.size


class RecordKind(IntEnum):
    LIFE = 1
    FRAME = 2
    RESULT = 3


_KINDS = frozenset(RecordKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """What a worker's tables are made from, and who made them.

    Units: max_model_len and max_num_batched_tokens tokens; num_blocks pool blocks, the null block included; depth steps
    issued and not settled; world_size ranks. version is rowcast's.
    Raises: ValueError naming a number that is none, or below 1.
    """

    epoch: int
    version: str
    model: str
    world_size: int
    depth: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    groups: tuple[KVGroupSpec, ...]

    def __post_init__(self) -> None:
        for name in (
            "epoch",
            "world_size",
            "depth",
            "vocab_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_blocks",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        if self.depth > MAX_DEPTH:  # a replay works that often on every step
            raise ValueError(f"depth must be in [1, {MAX_DEPTH}], got {self.depth}")

    @classmethod
    def of(cls, scheduler: Scheduler, *, epoch: int, model: str, world_size: int) -> Life:
        """The life of the group that takes this scheduler's steps."""
        config = scheduler.config
        return cls(
            epoch=epoch,
            version=__version__,
            model=model,
            world_size=world_size,
            depth=config.depth,
            vocab_size=config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=scheduler.pool.usable + 1,
            groups=scheduler.groups,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record as read. life is set for kind LIFE, payload is the message for the others."""

    kind: RecordKind
    sequence: int
    payload: bytes
    life: Life | None = None


class DamagedRecording(ValueError):
    """A file that cannot be read as, or continued as, a recording: says what and where."""


class Recorder:
    """Appends to a recording. Belongs to one thread, the scheduler's loop.

    A write that fails (a full disk) ends the recording, never the engine: `error` then says why, and nothing more is
    written.
    Raises: DamagedRecording if the file is there and no recording, or another engine writes to it; OSError if it cannot
        be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.error: str | None = None
        self.num_bytes = 0
        # Prompts are in it: only its owner may read it. Unbuffered: what was sent is in the file when its step runs.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd: int | None = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = _whole_bytes(self.path)
            if os.fstat(self._fd).st_size > end:  # an engine was killed in the middle of a record
                os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
        except BlockingIOError:
            self.close()
            raise DamagedRecording(
                f"another engine records to {self.path}; give another file"
            ) from None
        except BaseException:
            self.close()
            raise
        if end == 0:
            self._write(MAGIC)

    def life(self, life: Life) -> None:
        """Begin a life; frames and results that follow are of its epoch."""
        values = dataclasses.asdict(life)
        values["groups"] = [{**group, "kind": str(group["kind"])} for group in values["groups"]]
        packed = msgpack.packb(values)
        assert packed is not None
        self._append(RecordKind.LIFE, 0, packed)

    def frame(self, sequence: int, message: bytes) -> None:
        """Note a counted frame that is being sent."""
        self._append(RecordKind.FRAME, sequence, message)

    def result(self, sequence: int, message: bytes) -> None:
        """Note a result that was taken."""
        self._append(RecordKind.RESULT, sequence, message)

    def describe(self) -> str:
        """Say how the recording goes, from any thread."""
        return self.error or f"{self.path}, {self.num_bytes} bytes so far"

    def close(self) -> None:
        """End the recording. Twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, kind: RecordKind, sequence: int, payload: bytes) -> None:
        if self._fd is not None:
            self._write(_header(kind, sequence, payload) + payload)

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
        except OSError as error:
            self.error = f"recording to {self.path} stopped: {error.strerror or error}"
            self.close()
            return
        self.num_bytes += len(data)


def open_recorder(path: str | Path) -> Recorder:
    """Begin or continue a recording. Raises: ValueError, one sentence, if that file cannot be written to."""
    try:
        return Recorder(path)
    except OSError as error:
        raise ValueError(f"cannot record to {path}: {error.strerror or error}") from None


class Recording:
    """Reads a recording from its beginning.

    torn: after reading, whether the file ends in the middle of a record (its engine was killed or its disk was full);
    everything before that is good.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn = False

    def __iter__(self) -> Iterator[Record]:
        """Go through the records in the order in which they were written.

        Raises: DamagedRecording naming the step and the byte where something is not as it was written; OSError if the
            file cannot be read.
        """
        with open(self.path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise DamagedRecording(f"{self.path} is not a recording of rowcast")
            after = "the beginning"
            while header := file.read(_HEADER_BYTES):
                start = file.tell() - len(header)
                if len(header) < _HEADER_BYTES:
                    self.torn = True
                    return
                fields = header[: _FIELDS.size]
                if _CRC.unpack(header[_FIELDS.size :])[0] != zlib.crc32(fields):
                    raise DamagedRecording(
                        f"{self.path}: the record after {after} is damaged (header at byte {start})"
                    )
                kind, sequence, length, crc = _FIELDS.unpack(fields)
                if kind not in _KINDS:
                    raise DamagedRecording(
                        f"{self.path}: the record after {after} is of kind {kind}, which rowcast {__version__} does "
                        "not know; replay it with the rowcast that wrote it"
                    )
                name = _name(kind, sequence)
                payload = file.read(length)
                if len(payload) < length:
                    self.torn = True
                    return
                if zlib.crc32(payload) != crc:
                    raise DamagedRecording(
                        f"{self.path}: {name} is damaged (bytes {start + _HEADER_BYTES} to {file.tell()})"
                    )
                try:
                    record = _record(RecordKind(kind), sequence, payload)
                except (TypeError, KeyError, AttributeError, ValueError) as error:
                    raise DamagedRecording(
                        f"{self.path}: {name} is not in the form that rowcast {__version__} reads ({error}); replay it "
                        "with the rowcast that wrote it"
                    ) from None
                yield record
                after = name


def _header(kind: RecordKind, sequence: int, payload: bytes) -> bytes:
    fields = _FIELDS.pack(kind, sequence, len(payload), zlib.crc32(payload))
    return fields + _CRC.pack(zlib.crc32(fields))


def _record(kind: RecordKind, sequence: int, payload: bytes) -> Record:
    life = _life(msgpack.unpackb(payload)) if kind is RecordKind.LIFE else None
    return Record(kind=kind, sequence=sequence, payload=payload, life=life)


def _life(values: dict[str, Any]) -> Life:
    groups: Sequence[dict[str, Any]] = values["groups"]
    values["groups"] = tuple(
        KVGroupSpec(
            **{
                **group,
                "kind": AttentionKind(group["kind"]),
                "layers": tuple(group["layers"]),
            }
        )
        for group in groups
    )
    return Life(**values)


def _name(kind: int, sequence: int) -> str:
    if kind == RecordKind.LIFE:
        return "the beginning of a life"
    return f"the {RecordKind(kind).name.lower()} of step {sequence}"


def _whole_bytes(path: Path) -> int:
    """Count the bytes up to the end of the last whole record; 0 for a file that is empty or not there.

    Raises: DamagedRecording if it is something else: nothing is appended to it.
    """
    if not path.exists() or path.stat().st_size == 0:
        return 0
    end = len(MAGIC)
    try:
        for record in Recording(path):
            end += _HEADER_BYTES + len(record.payload)
    except DamagedRecording as error:
        raise DamagedRecording(f"{error}; give another file to record to") from None
    return end
