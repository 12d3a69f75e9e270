"""What settling a step gives back to the fronts: tokens and ends, as columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """One entry a token, or an end without one (token -1).

    Shapes: n entries; front_index int32 into fronts, numbers int64, tokens int32, finish_codes int8 (a FinishCode).
    Entries of one request stand in the order of its tokens.
    """

    fronts: tuple[Hashable, ...]
    front_index: np.ndarray
    numbers: np.ndarray
    tokens: np.ndarray
    finish_codes: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def by_front(self) -> Iterator[tuple[Hashable, np.ndarray, np.ndarray, np.ndarray]]:
        """Split into (front, numbers, tokens, finish_codes), in the order of front_index."""
        if not len(self):
            return
        first = self.front_index[0]
        if (self.front_index == first).all():
            yield self.fronts[first], self.numbers, self.tokens, self.finish_codes
            return
        order = np.argsort(self.front_index, kind="stable")
        sorted_index = self.front_index[order]
        starts = np.flatnonzero(np.diff(sorted_index, prepend=-1))
        for part, start in zip(np.split(order, starts[1:]), starts, strict=True):
            front = self.fronts[sorted_index[start]]
            yield front, self.numbers[part], self.tokens[part], self.finish_codes[part]


def join(parts: Sequence[Deliveries]) -> Deliveries:
    """Put deliveries of one engine behind one another. Needs at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Deliveries(
        fronts=parts[-1].fronts,
        front_index=np.concatenate([part.front_index for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        finish_codes=np.concatenate([part.finish_codes for part in parts]),
    )
