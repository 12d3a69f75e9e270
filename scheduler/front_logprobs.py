"""The log-probabilities of an `outputs` message, to the wire and back. The format: `front_messages.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .extras import LogprobRows, PromptRows, check_values
from .wire_form import INT32, ProtocolError, array_of, bytes_of, exactly, integer, list_of


def token_rows_to_wire(logprobs: Mapping[int, LogprobRows]) -> list[Any] | None:
    """logprobs: place among the entries -> one row; nil if there are none."""
    if not logprobs:
        return None
    places = sorted(logprobs)
    return [bytes_of(places, INT32), [logprobs[place].to_wire() for place in places]]


def token_rows_from_wire(value: Any) -> dict[int, LogprobRows]:
    """Read them again. Raises: ProtocolError for anything else."""
    if value is None:
        return {}
    what = "outputs: logprobs"
    exactly(list_of(value, what), 2, what)
    places, rows = array_of(value[0], f"{what}: places"), list_of(value[1], f"{what}: rows")
    if not len(places) or places[0] < 0 or (places[1:] <= places[:-1]).any():
        raise ProtocolError(f"{what}: places must be at least one, at least 0, ascending")
    if len(places) != len(rows):
        raise ProtocolError(f"{what} must have one row for each of its places")
    read = [LogprobRows.from_wire(one, what) for one in rows]
    if any(len(one) != 1 for one in read):
        raise ProtocolError(f"{what} must have one row each")
    check_values([(what, one) for one in read])
    return dict(zip(places.tolist(), read, strict=True))


def prompt_rows_to_wire(prompts: Sequence[PromptRows]) -> list[Any] | None:
    """Nil if there are none."""
    return [[number, first, rows.to_wire()] for number, first, rows in prompts] or None


def prompt_rows_from_wire(value: Any) -> Sequence[PromptRows]:
    """Read them again. Raises: ProtocolError for anything else."""
    if value is None:
        return ()
    what = "outputs: prompt_logprobs"
    read = []
    for entry in list_of(value, what):
        exactly(list_of(entry, what), 3, what)
        number = integer(entry[0], f"{what}: number", 2**63)
        first = integer(entry[1], f"{what}: position", 2**31)
        if not first:
            raise ProtocolError(f"{what}: a prompt's first token has no log-probability")
        read.append(PromptRows(number, first, LogprobRows.from_wire(entry[2], what)))
    if not read:
        raise ProtocolError(f"{what} must be nil or an array of at least one")
    check_values([(what, one.rows) for one in read])
    return read
