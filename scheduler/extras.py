"""Log-probabilities as they travel: what a request asked for beyond its tokens. Part of `messages.py`.

    rows     [width, token_ids, logprobs, ranks]: width entries for each of n tokens, its own first, then the
             width - 1 best ids of its place, best first; token_ids and ranks bin of little-endian int32, logprobs of
             float32
    extras   a map of batch_index to [rows of the sampled token or nil, rows of prompt tokens or nil]

A rank counts the ids of the whole vocabulary that score at least as high. Owns the form, the checks that need nothing
else, and whether a result has what its step was asked for (`check_extras`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .asked import Asked
from .sampling_params import MAX_LOGPROBS
from .wire_form import (
    FLOAT32,
    INT32,
    ProtocolError,
    array_of,
    bytes_of,
    exactly,
    integer,
    list_of,
    same_length,
    short,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogprobRows:
    """The log-probabilities of n tokens. Two are equal if all their numbers are.

    Shapes, all [n, 1 + num_best]: token_ids and ranks int32, logprobs float32; column 0 is the token's own, the others
        the best ids of its place, best first. A token that is among them stands there too.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, rows: slice) -> LogprobRows:
        """Some of the rows."""
        return LogprobRows(
            token_ids=self.token_ids[rows], logprobs=self.logprobs[rows], ranks=self.ranks[rows]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogprobRows) and self.to_wire() == other.to_wire()

    def __hash__(self) -> int:
        return hash(tuple(self.to_wire()))

    @property
    def num_best(self) -> int:
        """How many of the best ids each row has."""
        return self.token_ids.shape[1] - 1

    @classmethod
    def join(cls, parts: Sequence[LogprobRows]) -> LogprobRows | None:
        """Put rows of as many best ids behind one another; None of nothing."""
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
        )

    def best(self, count: int) -> LogprobRows:
        """The same rows with fewer of the best ids."""
        return LogprobRows(
            token_ids=self.token_ids[:, : 1 + count],
            logprobs=self.logprobs[:, : 1 + count],
            ranks=self.ranks[:, : 1 + count],
        )

    def to_wire(self) -> list[Any]:
        """Their form in a message."""
        return [
            1 + self.num_best,
            bytes_of(self.token_ids, INT32),
            bytes_of(self.logprobs, FLOAT32),
            bytes_of(self.ranks, INT32),
        ]

    @classmethod
    def from_wire(cls, value: Any, what: str) -> LogprobRows:
        """Read them again; arrays are read-only views. Their values are for `check_values` to look at.

        Raises: ProtocolError for anything that has not their form.
        """
        values = list_of(value, what)
        exactly(values, 4, what)
        width = integer(values[0], f"{what}: width", MAX_LOGPROBS + 2)
        ids = array_of(values[1], f"{what}: token_ids")
        if not width or not len(ids) or len(ids) % width:
            raise ProtocolError(
                f"{what}: must have at least one row of {width} (at least 1) token ids, got {len(ids)} ids"
            )
        logprobs = array_of(values[2], f"{what}: logprobs", FLOAT32)
        ranks = array_of(values[3], f"{what}: ranks")
        same_length(logprobs, len(ids), f"{what}: logprobs")
        same_length(ranks, len(ids), f"{what}: ranks")
        shape = (len(ids) // width, width)
        return cls(
            token_ids=ids.reshape(shape),
            logprobs=logprobs.reshape(shape),
            ranks=ranks.reshape(shape),
        )

    def check(self, what: str) -> None:
        """Raises: ProtocolError for values that no softmax gives."""
        ids, logprobs, ranks = self.token_ids, self.logprobs, self.ranks
        if int(ids.min()) < 0:
            raise ProtocolError(f"{what}: a token id is negative ({int(ids.min())})")
        if not (np.isfinite(logprobs).all() and float(logprobs.max()) <= 0):
            raise ProtocolError(f"{what}: log-probabilities must be finite and at most 0")
        best_ids, best, best_ranks = ids[:, 1:], logprobs[:, 1:], ranks[:, 1:]
        places = np.arange(1, 1 + self.num_best)
        own = best_ids == ids[:, :1]
        alone = ~own.any(axis=1)
        if (
            int(ranks[:, 0].min()) < 1
            or (best_ranks < places).any()
            or (best_ranks[:, 1:] < best_ranks[:, :-1]).any()
            or (ranks[alone, 0] <= self.num_best).any()
        ):
            raise ProtocolError(f"{what}: a rank is too low for its place")
        ordered = np.sort(best_ids, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ProtocolError(f"{what}: a token id stands twice among the best of its place")
        if (best[:, 1:] > best[:, :-1]).any() or (
            self.num_best and (logprobs[alone, 0] > best[alone, -1]).any()
        ):
            raise ProtocolError(f"{what}: the best ids must come first, best before less good")
        if (own & ((best != logprobs[:, :1]) | (best_ranks != ranks[:, :1]))).any():
            raise ProtocolError(f"{what}: a token among the best has two values")


def check_values(named: Sequence[tuple[str, LogprobRows]]) -> None:
    """Check the values of all rows of a message at once: one after the other they take ten times as long.

    Raises: ProtocolError as `LogprobRows.check`, with the name of those that are wrong.
    """
    by_width: dict[int, list[tuple[str, LogprobRows]]] = {}
    for what, rows in named:
        by_width.setdefault(rows.num_best, []).append((what, rows))
    for alike in by_width.values():
        together = LogprobRows.join([rows for _, rows in alike])
        assert together is not None
        try:
            together.check("rows")
        except ProtocolError:
            for what, rows in alike:
                rows.check(what)
            raise


class PromptRows(NamedTuple):
    """Rows of one request's prompt tokens: of the tokens at positions first, first + 1, ...; first is at least 1."""

    number: int
    first: int
    rows: LogprobRows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExtras:
    """What one request gets of one step beyond its token: one row for that, one for each prompt token; not neither."""

    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None


Extras = Mapping[int, RowExtras]  # by batch_index


def extras_to_wire(extras: Extras | None) -> dict[int, Any] | None:
    """Their form in a result; nil if nobody asked."""
    if extras is None:
        return None
    return {
        batch_index: [
            None if one.logprobs is None else one.logprobs.to_wire(),
            None if one.prompt_logprobs is None else one.prompt_logprobs.to_wire(),
        ]
        for batch_index, one in extras.items()
    }


def extras_from_wire(value: Any, num_reqs: int) -> dict[int, RowExtras] | None:
    """Read them again. Raises: ProtocolError for anything that the module docstring does not describe."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise ProtocolError(
            f"result: extras must be a map of at least one entry or nil, got {short(value)}"
        )
    extras: dict[int, RowExtras] = {}
    named: list[tuple[str, LogprobRows]] = []

    def read(rows: Any, what: str) -> LogprobRows | None:
        if rows is None:
            return None
        named.append((what, LogprobRows.from_wire(rows, what)))
        return named[-1][1]

    for key, pair in value.items():
        batch_index = integer(key, "result: a key of extras", max(num_reqs, 1))
        what = f"result: extras of batch_index {batch_index}"
        exactly(list_of(pair, what), 2, what)
        sampled, prompt = pair
        if sampled is None and prompt is None:
            raise ProtocolError(f"{what} must have rows of a sampled token or of prompt tokens")
        rows = read(sampled, f"{what}: logprobs")
        if rows is not None and len(rows) != 1:
            raise ProtocolError(f"{what}: logprobs must be one row, got {len(rows)}")
        extras[batch_index] = RowExtras(
            logprobs=rows, prompt_logprobs=read(prompt, f"{what}: prompt_logprobs")
        )
    check_values(named)
    return extras


def check_extras(
    extras: Extras | None, asked: Sequence[Asked] | None, tokens: np.ndarray, vocab_size: int
) -> None:
    """Refuse a result that has more or less than its step was asked for.

    Shapes: tokens [num_reqs] int32, the result's.
    Raises: ProtocolError saying what is wrong.
    """
    wanted = {one.batch_index: one for one in asked or ()}
    given = extras or {}
    if given.keys() != wanted.keys():
        raise ProtocolError(
            f"the result carries extras of batch indices {short(sorted(given))}, its step was asked for those of "
            f"{short(sorted(wanted))}"
        )
    for batch_index, one in wanted.items():
        has, who = given[batch_index], f"the extras of batch_index {batch_index}"
        own = tokens[batch_index : batch_index + 1]
        _check_rows(has.logprobs, one.num_best, own, vocab_size, f"{who}: logprobs")
        best = one.num_prompt_best if len(one.targets) else None
        _check_rows(has.prompt_logprobs, best, one.targets, vocab_size, f"{who}: prompt_logprobs")


def _check_rows(
    rows: LogprobRows | None,
    num_best: int | None,
    token_ids: np.ndarray,
    vocab_size: int,
    what: str,
) -> None:
    if rows is None or num_best is None:
        if rows is not None or num_best is not None:
            raise ProtocolError(f"{what}: {'missing' if rows is None else 'nobody asked for them'}")
        return
    num_best = min(num_best, vocab_size)
    if len(rows) != len(token_ids) or rows.num_best != num_best:
        raise ProtocolError(
            f"{what}: {len(rows)} rows with {rows.num_best} best ids each, expected {len(token_ids)} with {num_best}"
        )
    if (rows.token_ids[:, 0] != token_ids).any():
        raise ProtocolError(f"{what}: rows of other tokens than those of their places")
    if int(rows.token_ids.max()) >= vocab_size or int(rows.ranks.max()) > vocab_size:
        raise ProtocolError(f"{what}: a token id or a rank exceeds the vocabulary of {vocab_size}")
