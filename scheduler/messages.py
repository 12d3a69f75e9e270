"""What scheduler and workers say to each other, and its MessagePack form. This docstring is the format.

Frame, scheduler to workers: an array `[version, epoch, kind, sequence, *body]`.

    hello    []                                  always sequence 0, repeated until every rank is ready, never counted
    step     [freed_rows, admissions, run_rows, run_counts, paused_rows, grown_block_ids, masked_rows, digest]
    mask     [step_sequence, rows, words_per_row, bits]
    control  [operation]                         0: stop

Result, worker to scheduler: `[version, epoch, kind, *]`.

    ready    [.., sequence, rank]                the answer to hello
    error    [.., sequence, rank, text]          this rank stops; sequence is the frame it was at
    bye      [.., sequence, rank]                this rank stops because it was told to
    result   [.., sequence, digests, tokens, extras]     rank 0 alone

`version` is PROTOCOL_VERSION. `epoch` (time_ns) names one life of the worker group. One `sequence` counts step, mask
and control frames from 1, without gaps. Integer lists are `bin` fields of little-endian int32; what is anything else is
named below. Never pickle.

    freed_rows      rows finished, aborted or preempted
    admissions      nil, or the fields of `Admissions` in their order; strings are an array of str, numbers one bin of
                    its lines behind each other, seeds int64, the two per-group fields arrays of bin, one a KV group,
                    features an array of bin, one a request, as in `features.py`
    run_rows, run_counts   rows with more than one uncomputed token that run, and how many tokens each runs
    paused_rows     rows with exactly one uncomputed token that do not run it in this step
    grown_block_ids one bin a KV group: the new blocks of the rows that grow, in row order (`agreement.derive_growth`)
    masked_rows     rows whose sampling waits for a mask frame, in batch order; it comes before any later step
    digest          bin of 8 bytes, the scheduler's digest of this step without its frame (`agreement.TableDigest`): a
                    rank with another one stops before it computes; empty: not compared
    bits            bin of little-endian int32 words, words_per_row for each of rows: bit i of word w is id 32 * w + i
    digests         bin of 8 bytes a rank, in rank order (`agreement.TableDigest`); empty if the step sampled nothing
    tokens          one int32 a batch_index, -1 where the row did not sample
    extras          nil, or a map of batch_index to what that row asked for beyond its token, as in `extras.py`

A reader takes nothing on trust: whatever is not exactly this raises ProtocolError and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import msgpack
import numpy as np

from .admissions import MAX_REQUEST_ID_BYTES as MAX_REQUEST_ID_BYTES
from .admissions import Admissions as Admissions  # parts of the format, in files of their own
from .admissions import admissions_from_wire, admissions_to_wire
from .extras import Extras as Extras
from .extras import LogprobRows as LogprobRows
from .extras import RowExtras as RowExtras
from .extras import extras_from_wire, extras_to_wire
from .features import Features as Features
from .wire_form import (
    INT32,
    array_of,
    bytes_of,
    exactly,
    integer,
    list_of,
    pack,
    same_length,
    short,
)
from .wire_form import ProtocolError as ProtocolError  # every message's reader raises it

PROTOCOL_VERSION = 4
MAX_ERROR_TEXT = 16_384

_EMPTY = np.empty(0, INT32)


class Channel(Protocol):
    """What carries whole messages between the two loops: a socket, or a queue in one process."""

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Take the next message; None when none came within timeout_s (None waits for ever)."""
        ...

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


class FrameKind(IntEnum):
    HELLO = 0
    STEP = 1
    MASK = 2
    CONTROL = 3


class ControlOperation(IntEnum):
    STOP = 0


class ResultKind(IntEnum):
    READY = 0
    ERROR = 1
    BYE = 2
    RESULT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step's change. Fields as in the module docstring; every integer array is int32."""

    freed_rows: np.ndarray = field(default_factory=_EMPTY.copy)
    admissions: Admissions | None = None
    run_rows: np.ndarray = field(default_factory=_EMPTY.copy)
    run_counts: np.ndarray = field(default_factory=_EMPTY.copy)
    paused_rows: np.ndarray = field(default_factory=_EMPTY.copy)
    grown_block_ids: tuple[np.ndarray, ...] = ()
    masked_rows: np.ndarray = field(default_factory=_EMPTY.copy)
    digest: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """The allowed ids of rows that an earlier step left waiting.

    Shapes: rows [n] int32; bits [n, words_per_row] int32. step_sequence is the sequence of that step.
    """

    step_sequence: int
    rows: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One message to the workers. body is None for hello, else by kind."""

    epoch: int
    kind: FrameKind
    sequence: int
    body: SchedulerOutput | Mask | ControlOperation | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What rank 0 reports of one step. tokens [num_reqs] int32, -1 where the row did not sample."""

    tokens: np.ndarray
    digests: bytes = b""
    extras: Extras | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """One message from a worker. rank is 0 and result is set for kind RESULT; text belongs to ERROR."""

    epoch: int
    kind: ResultKind
    sequence: int
    rank: int = 0
    text: str = ""
    result: StepResult | None = None


_FRAME_KINDS = {int(kind): kind for kind in FrameKind}
_RESULT_KINDS = {int(kind): kind for kind in ResultKind}
_OPERATIONS = {int(operation): operation for operation in ControlOperation}


# ---------------------------------------------------------------- writing


def wire_text(text: str) -> str:
    """Make any error text one that the wire carries: short, and valid Unicode whatever file name it quotes."""
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_ERROR_TEXT]


def encode_hello(*, epoch: int) -> bytes:
    return pack([PROTOCOL_VERSION, epoch, int(FrameKind.HELLO), 0])


def encode_control(operation: ControlOperation, *, epoch: int, sequence: int) -> bytes:
    return pack([PROTOCOL_VERSION, epoch, int(FrameKind.CONTROL), sequence, int(operation)])


def encode_mask(mask: Mask, *, epoch: int, sequence: int) -> bytes:
    body = [
        mask.step_sequence,
        bytes_of(mask.rows, INT32),
        int(mask.bits.shape[1]),
        bytes_of(mask.bits, INT32),
    ]
    return pack([PROTOCOL_VERSION, epoch, int(FrameKind.MASK), sequence, *body])


def encode_step(step: SchedulerOutput, *, epoch: int, sequence: int) -> bytes:
    """Serialize one step. A steady decode step of any number of rows carries only the ids of new blocks."""
    body = [
        bytes_of(step.freed_rows, INT32),
        None if step.admissions is None else admissions_to_wire(step.admissions),
        bytes_of(step.run_rows, INT32),
        bytes_of(step.run_counts, INT32),
        bytes_of(step.paused_rows, INT32),
        [bytes_of(ids, INT32) for ids in step.grown_block_ids],
        bytes_of(step.masked_rows, INT32),
        step.digest,
    ]
    return pack([PROTOCOL_VERSION, epoch, int(FrameKind.STEP), sequence, *body])


def encode_ready(*, epoch: int, rank: int) -> bytes:
    return pack([PROTOCOL_VERSION, epoch, int(ResultKind.READY), 0, rank])


def encode_error(*, epoch: int, sequence: int, rank: int, text: str) -> bytes:
    body = [rank, wire_text(text)]
    return pack([PROTOCOL_VERSION, epoch, int(ResultKind.ERROR), sequence, *body])


def encode_bye(*, epoch: int, sequence: int, rank: int) -> bytes:
    return pack([PROTOCOL_VERSION, epoch, int(ResultKind.BYE), sequence, rank])


def encode_result(result: StepResult, *, epoch: int, sequence: int) -> bytes:
    body = [result.digests, bytes_of(result.tokens, INT32), extras_to_wire(result.extras)]
    return pack([PROTOCOL_VERSION, epoch, int(ResultKind.RESULT), sequence, *body])


# ---------------------------------------------------------------- reading


def _unpack(message: bytes, what: str) -> list[Any]:
    try:
        values = msgpack.unpackb(message, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"{what} of {len(message)} bytes is no MessagePack: {reason}") from None
    if not isinstance(values, list) or len(values) < 4:
        raise ProtocolError(f"{what} must be an array of at least 4 values, got {short(values)}")
    if type(values[0]) is not int or values[0] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{what} has protocol version {short(values[0])}, this side speaks {PROTOCOL_VERSION}; "
            "run the same rowcast on every node"
        )
    integer(values[1], f"{what}: epoch", 2**63)
    integer(values[3], f"{what}: sequence", 2**63)
    return values


def decode_frame(message: bytes) -> Frame:
    """Read one message to the workers; arrays are read-only views of `message`.

    Checks form alone (types, lengths, version); whether rows and counts fit the tables is the worker's check.
    Raises: ProtocolError for anything that the module docstring does not describe.
    """
    values = _unpack(message, "frame")
    epoch, kind, sequence, body = values[1], values[2], values[3], values[4:]
    if type(kind) is not int or kind not in _FRAME_KINDS:
        raise ProtocolError(f"frame has unknown kind {short(kind)}")
    kind = _FRAME_KINDS[kind]
    if (sequence == 0) != (kind is FrameKind.HELLO):
        raise ProtocolError(f"{kind.name.lower()} frame cannot have sequence {sequence}")
    decoded: SchedulerOutput | Mask | ControlOperation | None = None
    if kind is FrameKind.HELLO:
        exactly(body, 0, "hello frame")
    elif kind is FrameKind.STEP:
        decoded = _step_from_wire(body)
    elif kind is FrameKind.MASK:
        decoded = _mask_from_wire(body)
    else:
        exactly(body, 1, "control frame")
        operation = integer(body[0], "control frame: operation", 2**31)
        if operation not in _OPERATIONS:
            raise ProtocolError(f"control frame has unknown operation {operation}")
        decoded = _OPERATIONS[operation]
    return Frame(epoch=epoch, kind=kind, sequence=sequence, body=decoded)


def _step_from_wire(body: list[Any]) -> SchedulerOutput:
    exactly(body, 8, "step frame")
    run_rows = array_of(body[2], "step frame: run_rows")
    run_counts = array_of(body[3], "step frame: run_counts")
    same_length(run_counts, len(run_rows), "step frame: run_counts")
    grown = tuple(
        array_of(ids, f"step frame: grown_block_ids of group {group}")
        for group, ids in enumerate(list_of(body[5], "step frame: grown_block_ids"))
    )
    digest = body[7]
    if not isinstance(digest, bytes) or len(digest) not in (0, 8):
        raise ProtocolError(f"step frame: digest must be bin of 0 or 8 bytes, got {short(digest)}")
    return SchedulerOutput(
        freed_rows=array_of(body[0], "step frame: freed_rows"),
        admissions=None if body[1] is None else admissions_from_wire(body[1], len(grown)),
        run_rows=run_rows,
        run_counts=run_counts,
        paused_rows=array_of(body[4], "step frame: paused_rows"),
        grown_block_ids=grown,
        masked_rows=array_of(body[6], "step frame: masked_rows"),
        digest=digest,
    )


def _mask_from_wire(body: list[Any]) -> Mask:
    exactly(body, 4, "mask frame")
    rows = array_of(body[1], "mask frame: rows")
    words = integer(body[2], "mask frame: words_per_row", 2**26)
    bits = array_of(body[3], "mask frame: bits")
    same_length(bits, len(rows) * words, "mask frame: bits")
    return Mask(
        step_sequence=integer(body[0], "mask frame: step_sequence", 2**63),
        rows=rows,
        bits=bits.reshape(len(rows), words),
    )


def peek_report(message: bytes) -> tuple[int | None, int | None]:
    """Read (epoch, rank) of a report that may be anything else; None for what is not there.

    Tells whose a bad report is: only one that names this life of the group comes from a rank of it.
    """
    try:
        values = msgpack.unpackb(message, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None, None
    if not isinstance(values, list) or len(values) < 2 or type(values[1]) is not int:
        return None, None
    if len(values) > 2 and type(values[2]) is int and values[2] == ResultKind.RESULT:
        return values[1], 0
    named = len(values) > 4 and type(values[4]) is int and values[4] >= 0
    return values[1], values[4] if named else None


def decode_report(message: bytes) -> WorkerReport:
    """Read one message from a worker.

    Raises: ProtocolError for anything that the module docstring does not describe.
    """
    values = _unpack(message, "report")
    epoch, kind, sequence, body = values[1], values[2], values[3], values[4:]
    if type(kind) is not int or kind not in _RESULT_KINDS:
        raise ProtocolError(f"report has unknown kind {short(kind)}")
    kind = _RESULT_KINDS[kind]
    if kind is ResultKind.RESULT:
        exactly(body, 3, "result")
        digests = body[0]
        if not isinstance(digests, bytes) or len(digests) % 8:
            raise ProtocolError(
                f"result: digests must be bin of 8 bytes a rank, got {short(digests)}"
            )
        tokens = array_of(body[1], "result: tokens")
        extras = extras_from_wire(body[2], len(tokens))
        result = StepResult(tokens=tokens, digests=digests, extras=extras)
        return WorkerReport(epoch=epoch, kind=kind, sequence=sequence, result=result)
    exactly(body, 2 if kind is ResultKind.ERROR else 1, f"{kind.name.lower()} report")
    rank = integer(body[0], f"{kind.name.lower()} report: rank", 2**31)
    text = body[1] if kind is ResultKind.ERROR else ""
    if not isinstance(text, str):
        raise ProtocolError(f"error report: text must be a string, got {short(text)}")
    return WorkerReport(epoch=epoch, kind=kind, sequence=sequence, rank=rank, text=text)
