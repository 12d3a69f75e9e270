"""The embedded engine as `LLM` uses it: several threads take turns with it, and all their requests share its steps.

Owns the turns, the live request ids and who ends what was left behind. A step serves every live request, whoever
makes it, so a thread holds the engine for one step at a time and never for a whole call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..cluster.answers import join
from ..cluster.prompts import (
    Many,
    Prompt,
    Prompts,
    is_one_prompt,
    list_options,
    list_params,
    list_prompts,
    one_prompt,
)
from ..scheduler.kv_groups import describe_groups
from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import SamplingParams
from .embedded import EmbeddedEngine
from .embedded_request import Request
from .interrupts import interrupts_held
from .stages import StageLines, load_bar

if TYPE_CHECKING:
    from rich.console import Console

    from ..cluster.outputs import RequestOutput
    from ..cluster.text import TextProcessor
    from .config import EnginePlan


class EmbeddedLLM:
    """One embedded engine for any number of threads."""

    def __init__(self, plan: EnginePlan, text: TextProcessor, *, console: Console | None):
        with load_bar(console, f"load {plan.options.model}") as on_load:
            self._engine = EmbeddedEngine(plan, text, on_load=on_load)
        StageLines(console).say(describe_groups(self._engine.groups))
        # Beyond these the scheduler would refuse: the rest of a long list waits here.
        self._max_live = plan.scheduler.max_waiting
        self._lock = threading.Lock()
        self._next = threading.Lock()
        self._live: dict[str, list[Request]] = {}  # the answers to one prompt, as far as queued
        self._left: deque[Request] = (
            deque()
        )  # by callers that are gone; ended by whoever has the engine

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
    ) -> list[RequestOutput]:
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed), self._engine.text.sampling_defaults)
        options = list_options(len(listed), priority=priority, user=user, cache_salt=cache_salt)
        one = is_one_prompt(prompts)
        answers: list[list[Request]] = []
        for index, (prompt, wanted, said) in enumerate(zip(listed, params, options, strict=True)):
            try:
                answers.append(self._prepare(prompt, wanted, said, None))
            except ValueError as error:
                raise ValueError(str(error) if one else f"prompts[{index}]: {error}") from None
        requests = [request for one in answers for request in one]
        unqueued = deque(requests)
        unfinished = deque(requests)
        try:
            while unfinished:
                with self._turn():
                    while unqueued and self._engine.num_live < self._max_live:
                        self._queue(unqueued.popleft())
                    if not unfinished[0].finished:
                        self._engine.step()
                while unfinished and unfinished[0].finished:
                    unfinished.popleft()
        finally:
            self._end(requests)
        for index, of_prompt in enumerate(answers):
            for request in of_prompt:
                try:
                    _raise_if_refused(request)
                except ValueError as error:
                    raise ValueError(str(error) if one else f"prompts[{index}]: {error}") from None
        return [_output(one) for one in answers]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> Iterator[RequestOutput]:
        (params,) = list_params(sampling_params, 1, self._engine.text.sampling_defaults)
        options = RequestOptions(priority=priority, user=user, cache_salt=cache_salt)
        return self._outputs(self._prepare(one_prompt(prompt), params, options, request_id))

    def _outputs(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        # Queued at the first `next`: a generator that is never started has no end to clean up at.
        seen = 0

        def news() -> bool:
            return sum(len(request.token_ids) for request in requests) > seen

        def over() -> bool:
            return all(request.finished for request in requests)

        try:
            with self._turn():
                if requests[0].request_id in self._live:
                    raise ValueError(
                        f"request_id {requests[0].request_id!r} is in use by a live request"
                    )
                for request in requests:
                    self._queue(request)
            while not over():
                with self._turn():
                    # Another thread's step may have brought the next token, or the end, in the meantime.
                    if not news() and not over():
                        self._engine.step()
                for request in requests:
                    _raise_if_refused(request)
                if news() and not over():
                    output = _output(requests)
                    seen = sum(len(answer.token_ids) for answer in output.outputs)
                    yield output
            yield _output(requests)
        finally:
            self._end(requests)

    def abort(self, request_id: str) -> None:
        with self._turn():
            self._engine.abort(self._live.get(request_id, []))

    def snapshot(self) -> dict[str, Any]:
        return self._engine.snapshot()

    def close(self) -> None:
        with self._turn():
            self._engine.close()

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
    ) -> list[Request]:
        is_text = isinstance(prompt, str)
        ids = self._engine.text.encode(prompt) if is_text else list(prompt)
        text = prompt if is_text else None
        return self._engine.prepare(ids, params, options, prompt=text, request_id=request_id)

    def _queue(self, request: Request) -> None:
        self._engine.queue(request)
        self._live.setdefault(request.request_id, []).append(request)

    # ------------------------------------------------------------ taking turns

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine for a moment. Ctrl-C waits for its end, so that nobody is left with the lock."""
        with interrupts_held():
            # Whoever asks first waits at the lock, the others at this door: a lock alone would go, step after step,
            # to the thread that just gave it back.
            with self._next:
                self._lock.acquire()
            try:
                self._end_left()
                yield
            finally:
                self._lock.release()
                self._end_if_free()

    def _end(self, requests: Sequence[Request]) -> None:
        """Leave nothing behind, however the caller left: whatever still runs is aborted."""
        with interrupts_held():
            self._left.extend(requests)
            self._end_if_free()

    def _end_if_free(self) -> None:
        # Never waits. A forgotten stream may be collected at any allocation, in the middle of this thread's own step
        # too: whoever has the engine sees to it at the end of that turn.
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._end_left()
            finally:
                self._lock.release()

    def _end_left(self) -> None:
        requests = [self._left.popleft() for _ in range(len(self._left))]
        for request in requests:
            if request in self._live.get(request.request_id, ()):
                del self._live[request.request_id]
        # An engine that failed has ended its requests already, and says so through the error on its way.
        with suppress(RuntimeError):
            self._engine.abort(requests)


def _output(answers: Sequence[Request]) -> RequestOutput:
    return join([answer.output() for answer in answers])


def _raise_if_refused(request: Request) -> None:
    if request.error is not None:
        raise request.error
