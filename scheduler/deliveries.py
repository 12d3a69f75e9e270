"""What settling a step gives back to the fronts: tokens, ends and cached counts, as columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from .extras import LogprobRows, PromptRows
from .front_messages import FinishCode
from .request import Request, RequestStatus

NO_INT32 = np.empty(0, np.int32)
NO_INT64 = np.empty(0, np.int64)
NO_INT8 = np.empty(0, np.int8)

Entry = tuple[int, int, int, FinishCode]  # front index, number, token, finish code
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # the same of many, by column
NO_COLUMNS: Columns = (NO_INT32, NO_INT64, NO_INT32, NO_INT8)


class CachedColumns(TypedDict, total=False):
    """The columns of `Deliveries` that say what the cache had: all of them or none."""

    cached_front_index: np.ndarray
    cached_numbers: np.ndarray
    cached_tokens: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class ForFront:
    """One front's part. Shapes: numbers, tokens, finish_codes [n]; cached_numbers, cached_tokens [m].

    logprobs: place among the n -> its token's row.
    """

    front: Hashable
    numbers: np.ndarray
    tokens: np.ndarray
    finish_codes: np.ndarray
    cached_numbers: np.ndarray
    cached_tokens: np.ndarray
    logprobs: Mapping[int, LogprobRows]
    prompt_logprobs: Sequence[PromptRows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """One entry a token, or an end without one (token -1); and one a request that found a prefix in the cache.

    Shapes: n entries; front_index int32, numbers int64, tokens int32, finish_codes int8 (a FinishCode). m cached
    entries: cached_front_index int32, cached_numbers int64, cached_tokens int32, the prompt tokens that the request's
    first admission did not compute; they come no later than its first token, and not at all if there are none.
    front_index is a key of `fronts`. Entries of one request stand in the order of its tokens.
    logprobs: place among the n -> its token's row, where that was asked for. prompt_logprobs: (front index, rows), in
        the order of the prompt's tokens; they come no later than the request's first token.
    """

    fronts: Mapping[int, Hashable]
    front_index: np.ndarray = field(default_factory=lambda: NO_INT32)
    numbers: np.ndarray = field(default_factory=lambda: NO_INT64)
    tokens: np.ndarray = field(default_factory=lambda: NO_INT32)
    finish_codes: np.ndarray = field(default_factory=lambda: NO_INT8)
    cached_front_index: np.ndarray = field(default_factory=lambda: NO_INT32)
    cached_numbers: np.ndarray = field(default_factory=lambda: NO_INT64)
    cached_tokens: np.ndarray = field(default_factory=lambda: NO_INT32)
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Sequence[tuple[int, PromptRows]] = ()

    def __len__(self) -> int:
        return len(self.numbers) + len(self.cached_numbers) + len(self.prompt_logprobs)

    def by_front(self) -> Iterator[ForFront]:
        """Split by front, in the order of front_index; a front that gets nothing is left out."""
        indexes = np.concatenate((self.front_index, self.cached_front_index))
        if self.prompt_logprobs:
            indexes = np.append(indexes, [front_index for front_index, _ in self.prompt_logprobs])
        if not len(indexes):
            return
        if (indexes == indexes[0]).all():
            yield self._part(int(indexes[0]), slice(None), slice(None))
            return
        for index in np.unique(indexes).tolist():
            own = np.flatnonzero(self.front_index == index)
            yield self._part(index, own, np.flatnonzero(self.cached_front_index == index))

    def _part(self, index: int, own: np.ndarray | slice, cached: np.ndarray | slice) -> ForFront:
        logprobs = self.logprobs
        if logprobs and not isinstance(own, slice):
            logprobs = {p: logprobs[o] for p, o in enumerate(own.tolist()) if o in logprobs}
        return ForFront(
            front=self.fronts[index],
            numbers=self.numbers[own],
            tokens=self.tokens[own],
            finish_codes=self.finish_codes[own],
            cached_numbers=self.cached_numbers[cached],
            cached_tokens=self.cached_tokens[cached],
            logprobs=logprobs,
            prompt_logprobs=[rows for front, rows in self.prompt_logprobs if front == index],
        )


_COLUMNS = (
    "front_index",
    "numbers",
    "tokens",
    "finish_codes",
    "cached_front_index",
    "cached_numbers",
    "cached_tokens",
)


def join(parts: Sequence[Deliveries]) -> Deliveries:
    """Put deliveries of one engine behind one another. Needs at least one part."""
    if len(parts) == 1:
        return parts[0]
    fronts: dict[int, Hashable] = {}
    for part in parts:
        fronts.update(part.fronts)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
    }
    logprobs: dict[int, LogprobRows] = {}
    of_prompts: list[tuple[int, PromptRows]] = []
    first = 0
    for part in parts:
        if part.logprobs:
            logprobs |= {first + place: rows for place, rows in part.logprobs.items()}
        of_prompts += part.prompt_logprobs
        first += len(part.numbers)
    return Deliveries(fronts=fronts, logprobs=logprobs, prompt_logprobs=of_prompts, **columns)


def deliveries_of(
    fronts: Mapping[int, Hashable],
    entries: Sequence[Entry],
    columns: Columns,
    cached: CachedColumns,
) -> Deliveries:
    """Put single entries before the columns of a step."""
    front_index, numbers, tokens, finish_codes = columns
    if entries:
        front_index, numbers, tokens, finish_codes = (
            np.concatenate((np.array(values, column.dtype), column))
            for values, column in zip(zip(*entries, strict=True), columns, strict=True)
        )
    return Deliveries(
        fronts=fronts,
        front_index=front_index,
        numbers=numbers,
        tokens=tokens,
        finish_codes=finish_codes,
        **cached,
    )


class Outbox:
    """What waits for the next delivery and no step brings: ends without a token, and what the cache had."""

    def __init__(self) -> None:
        self._ends: list[Entry] = []
        self._cached: list[tuple[Request, int]] = []

    def __len__(self) -> int:
        return len(self._ends) + len(self._cached)

    def end(self, request: Request, code: FinishCode) -> None:
        """Tell an end that brings no token."""
        self._ends.append((request.front_index, request.number, -1, code))

    def found(self, request: Request, num_cached_tokens: int) -> None:
        """Tell what a request's first admission found in the cache."""
        self._cached.append((request, num_cached_tokens))

    def forget(self, front_index: int, number: int | None = None) -> None:
        """Tell nothing more of a request, or of a whole front."""
        self._ends = [
            end for end in self._ends if end[0] != front_index or number not in (None, end[1])
        ]
        self._cached = [
            (request, count)
            for request, count in self._cached
            if request.front_index != front_index or number not in (None, request.number)
        ]

    def take_ends(self) -> list[Entry]:
        """Hand out the ends."""
        ends, self._ends = self._ends, []
        return ends

    def take_cached(self) -> CachedColumns:
        """Hand out the cached counts, as columns of Deliveries; an ended request's would come after its end."""
        if not self._cached:
            return {}
        live = [(r, n) for r, n in self._cached if r.status is not RequestStatus.FINISHED]
        self._cached = []
        return {
            "cached_front_index": np.array([r.front_index for r, _ in live], np.int32),
            "cached_numbers": np.array([r.number for r, _ in live], np.int64),
            "cached_tokens": np.array([count for _, count in live], np.int32),
        }
