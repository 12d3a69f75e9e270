"""Which requests' answers must have a form, whose form is compiled, and what their next tokens may be.

Follows settled tokens alone: the mask of a step is made once every step before it that samples one of its rows has
settled. A step may leave before its mask; no later step does. Owns the matchers, by request, never by row: a row may
change hands while a step is in flight. Compiles nothing itself (`grammars.py`) and ends nobody (`scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from .agreement import StepPlan
from .grammars import Grammars, Matcher
from .request import Request, RequestStatus

_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedStep:
    """The rows of one issued step that wait for a mask, in batch order.

    Shapes: batch_indices, rows [n]; requests: who held each row then. number counts the scheduler's steps from 0.
    """

    number: int
    batch_indices: np.ndarray
    rows: np.ndarray
    requests: tuple[Request, ...]


class Masks:
    """Of one scheduler. grammars None: nobody can ask for a form."""

    def __init__(self, grammars: Grammars | None) -> None:
        self.grammars = grammars
        self.due: MaskedStep | None = None  # the step whose mask is still to be made
        self._compiling: set[Request] = set()
        self._compiled: deque[tuple[Request, Matcher | str]] = deque()  # filled by the pool
        self._matchers: dict[Request, Matcher] = {}
        self._steps: deque[MaskedStep] = deque()  # unsettled ones

    @property
    def num_compiling(self) -> int:
        """Count the requests that wait for their form."""
        return len(self._compiling)

    @property
    def num_remembered(self) -> int:
        """Count all that is kept of requests; 0 once all have ended and their steps have settled."""
        return len(self._compiling) + len(self._matchers) + len(self._steps)

    @property
    def any_compiled(self) -> bool:
        """Tell whether `take_compiled` has something."""
        return bool(self._compiled)

    # ------------------------------------------------------------ requests come and go

    def compile(self, request: Request) -> None:
        """Have a request's form compiled: it is given out by `take_compiled` one day."""
        form = request.params.structured_outputs
        assert form is not None, f"{request.request_id} asks for no form"
        assert self.grammars is not None, "the door refuses forms where there are no grammars"
        request.status = RequestStatus.COMPILING
        self._compiling.add(request)
        outputs = request.tokens[request.num_prompt_tokens :].tolist()
        self.grammars.start(form, outputs, partial(self._note, request))

    def _note(self, request: Request, outcome: Matcher | str) -> None:
        # On the pool's thread: a deque may be filled there.
        self._compiled.append((request, outcome))

    def take_compiled(self) -> Iterator[tuple[Request, Matcher | str]]:
        """Give out the requests whose forms are compiled, or why one cannot be; those that have ended are left out."""
        while self._compiled:
            request, outcome = self._compiled.popleft()
            if request in self._compiling:
                self._compiling.remove(request)
                yield request, outcome

    def join(self, request: Request, matcher: Matcher) -> None:
        """Mask a request's tokens from now on."""
        self._matchers[request] = matcher

    def leave(self, request: Request) -> None:
        """Forget a request that is over, whatever its state; tokens still in flight will be dropped."""
        self._compiling.discard(request)
        self._matchers.pop(request, None)

    # ------------------------------------------------------------ steps

    @property
    def any(self) -> bool:
        """Tell whether some request that may run has a form."""
        return bool(self._matchers)

    @property
    def in_flight(self) -> bool:
        """Tell whether a step with masked rows is unsettled."""
        return bool(self._steps)

    def issue(self, plan: StepPlan, number: int) -> np.ndarray:
        """Name the rows of a step that sample by a mask, in batch order: [n] int32."""
        of_row = {request.row: request for request in self._matchers if request.row >= 0}
        masked = np.isin(plan.batch.rows, list(of_row)) & plan.batch.samples
        if not masked.any():
            return _NO_ROWS
        rows = plan.index_mapping[masked]
        self.due = MaskedStep(
            number=number,
            batch_indices=np.flatnonzero(masked),
            rows=rows,
            requests=tuple(of_row[row] for row in rows.tolist()),
        )
        self._steps.append(self.due)
        return rows

    def make(self) -> tuple[np.ndarray, np.ndarray, list[tuple[Request, str]]] | None:
        """Make the mask that is due, if all tokens it follows are known.

        A row whose token will be dropped, since its request has ended, gets all ones, and so does one that fails.
        Returns: rows [n] int32, bits [n, num_words] int32, and who fails, and why.
        """
        due, grammars = self.due, self.grammars
        assert grammars is not None, "a masked step without grammars"
        if due is None:
            return None
        live = [place for place, request in enumerate(due.requests) if request in self._matchers]
        unknown = {request for step in self._steps if step is not due for request in step.requests}
        if any(due.requests[place] in unknown for place in live):
            return None
        self.due = None
        bits = np.tile(grammars.all_ones, (len(due.rows), 1))
        failed = []
        if live:
            requests = [due.requests[place] for place in live]
            matchers = [self._matchers[request] for request in requests]
            allowed = grammars.allowed(matchers)
            for place, request, matcher, row in zip(live, requests, matchers, allowed, strict=True):
                if matcher.error:
                    failed.append((request, matcher.error))
                else:
                    bits[place] = row
                    if request.params.ignore_eos:
                        _without(bits[place], grammars.eos_bits)
        return due.rows, bits, failed

    def settle(
        self, number: int, tokens: np.ndarray
    ) -> tuple[MaskedStep | None, list[tuple[Request, str]]]:
        """Follow the tokens of the oldest unsettled step.

        Shapes: tokens [num_reqs] int32.
        Returns: the step, if it had masked rows; and who fails, and why.
        """
        if not self._steps or self._steps[0].number != number:
            return None, []
        step = self._steps.popleft()
        failed = []
        sampled = tokens[step.batch_indices].tolist()
        for request, token in zip(step.requests, sampled, strict=True):
            matcher = self._matchers.get(request)
            if matcher is not None:
                matcher.take([token])
                request.form_is_complete = matcher.finished
                if matcher.error:
                    failed.append((request, matcher.error))
        return step, failed


def _without(row: np.ndarray, ids: np.ndarray) -> None:
    """Forbid ids, unless nothing else is allowed. Both [num_words] int32."""
    left = row & ~ids
    if left.any():
        row[:] = left
