"""A client's link to its engine's front: sends requests, polls for what came of them, hands it to whoever waits.

Ray Client (`ray://`) cannot stream: so one thread a client keeps one long poll open at the front. Owns that thread, the
requests that have not ended, and what the front was not yet told of; knows nothing of lists, batches and results.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..scheduler.request_options import RequestOptions, check_text
from ..scheduler.sampling_params import MAX_SEED, SamplingParams
from .answers import params_of_answers
from .client_requests import ClientRequest, exception_of
from .engine import EngineFailed
from .front import Accepted, FrontRequest, PollAnswer, PromptOnWire
from .front_call import call_front
from .mailboxes import Update
from .prompts import Prompt

_LONGEST_POLL_S = 10.0


class FrontLink:
    """One client at one front. Thread-safe.

    name: the engine's. front: its actor. info: what the front says of itself.
    changed: notified, and to be held, when a request changes; `wait` on it until what you wait for is there.
    """

    def __init__(self, name: str, front: Any, info: dict[str, Any]) -> None:
        self._name = name
        self._front = front
        self._info = info
        self._uuid = secrets.token_bytes(16)
        self._poll_s = min(_LONGEST_POLL_S, info["mailbox_idle_s"] / 3)
        self.changed = threading.Condition()
        self._requests: dict[
            int, ClientRequest
        ] = {}  # by counter: sent, and their end is not here yet
        self._cursors: dict[int, int] = {}  # tokens here that the front was not told of
        self._ended: list[int] = []  # ends here that the front was not told of
        self._next_counter = 0
        self._closed = False
        self._thread = threading.Thread(target=self._poll, name="rowcast-client", daemon=True)
        self._thread.start()

    def abort(self, request_id: str) -> None:
        """End all answers of a request, if it is one of this client's."""
        with self.changed:
            counters = [r.counter for r in self._requests.values() if r.request_id == request_id]
        if counters:
            self._call(self._front.abort, self._uuid, counters)

    def close(self) -> bool:
        """Abort what still runs and end the thread; False if that was done before."""
        with self.changed:
            if self._closed:
                return False
            self._closed = True
            live = list(self._requests)
            for request in self._requests.values():
                request.error = EngineFailed("the client was closed")
                request.version += 1
            self.changed.notify_all()
        try:
            if live:
                self._call(self._front.abort, self._uuid, live)
                self._call(self._front.poll, self._uuid, [], live, 0.0)
        except EngineFailed:
            pass  # the engine is gone, and with it what there was to abort
        self._thread.join(self._poll_s + 5)
        return True

    def new(
        self,
        wire: PromptOnWire,
        prompt: Prompt | None,
        params: SamplingParams,
        request_id: str | None,
        options: RequestOptions,
        *,
        streams: bool,
    ) -> list[ClientRequest]:
        """The requests of one prompt, as many as it shall have answers."""
        if request_id is not None:
            check_text("request_id", request_id, min_bytes=1)
        with self.changed:
            first, self._next_counter = self._next_counter, self._next_counter + params.n
        return [
            ClientRequest(
                counter=first + n_index,
                request_id=request_id or f"{self._uuid.hex()[:12]}-{first}",
                n_index=n_index,
                given=wire,
                params=wanted,
                options=options,
                streams=streams,
                prompt=prompt if isinstance(prompt, str) else None,
            )
            for n_index, wanted in enumerate(params_of_answers(params))
        ]

    def send(self, requests: Sequence[ClientRequest]) -> None:
        """Submit; what is rejected has its error afterwards."""
        with self.changed:
            if self._closed:
                raise EngineFailed("the client was closed")
        messages = [
            FrontRequest(
                counter=request.counter,
                request_id=request.request_id,
                prompt=request.given,
                params=request.params,
                seed=secrets.randbelow(MAX_SEED + 1)
                if request.params.seed is None
                else request.params.seed,
                n_index=request.n_index,
                options=request.options,
                streams=request.streams,
            )
            for request in requests
        ]
        # Known here first: an open poll may bring a token before this call returns.
        with self.changed:
            self._requests |= {request.counter: request for request in requests}
        answers = self._call(self._front.submit, self._uuid, messages)
        with self.changed:
            for request, answer in zip(requests, answers, strict=True):
                if isinstance(answer, Accepted):
                    request.prompt_token_ids = np.frombuffer(
                        answer.prompt_token_ids, "<i4"
                    ).tolist()
                    request.prompt = answer.prompt or request.prompt
                    request.sent = True
                else:
                    text = answer.text.removeprefix(f"request {request.request_id}: ")
                    request.error = exception_of(answer.reason, text)
                    request.version += 1
                    self._requests.pop(request.counter, None)
            self.changed.notify_all()

    def give_up(self, requests: Sequence[ClientRequest]) -> None:
        """Abort those that are not over. Their ends are taken in by the poll thread, if the front knows them."""
        with self.changed:
            live = [r.counter for r in requests if r.counter in self._requests]
            for request in requests:
                if not request.sent:
                    self._requests.pop(request.counter, None)
            if self._closed:
                return
        if live:
            try:
                self._call(self._front.abort, self._uuid, live)
            except EngineFailed:
                return  # the engine is gone, and with it what there was to abort

    def wait_for_room(self, num_more: int) -> None:
        """Hold a long list back: beyond its queue the scheduler refuses."""
        with self.changed:
            while self._requests and len(self._requests) + num_more > self._info["max_waiting"]:
                self.changed.wait()

    # ------------------------------------------------------------ the poll thread

    def _poll(self) -> None:
        """Take updates in until closed. Whatever goes wrong, nobody is left waiting."""
        try:
            while self._poll_once():
                pass
        except BaseException as error:
            with self.changed:
                self._closed = True
                everything = list(self._requests)
            self._lose(
                everything, EngineFailed(f"the client failed: {type(error).__name__}: {error}")
            )
            raise

    def _poll_once(self) -> bool:
        """One long poll, once there is something to wait for or to tell; False when the client is closed."""
        with self.changed:
            while not self._closed and not self._ended and not self._waiting_for():
                self.changed.wait()
            if self._closed:
                return False
            cursors, self._cursors = list(self._cursors.items()), {}
            ended, self._ended = self._ended, []
            expected = self._waiting_for()
        timeout_s = self._poll_s if expected else 0.0
        try:
            answer: PollAnswer = self._call(self._front.poll, self._uuid, cursors, ended, timeout_s)
            with self.changed:
                strays = [u.counter for u in answer.updates if not self._take(u)]
                self.changed.notify_all()
            if strays:
                self._call(self._front.abort, self._uuid, strays)
        except EngineFailed as error:
            self._lose(expected, error)
            return True
        if not answer.known:
            idle_s = self._info["mailbox_idle_s"]
            text = f"the engine gave this request up: nobody polled for it in {idle_s:g} s"
            self._lose(expected, EngineFailed(text))
        return True

    def _waiting_for(self) -> list[int]:
        """Counters of what the front has taken and not ended."""
        return [counter for counter, request in self._requests.items() if request.sent]

    def _take(self, update: Update) -> bool:
        """Put an update to its request. False if nobody here knows that one: its call was interrupted. It is noted all
        the same, or the front would tell of it again and again."""
        request = self._requests.get(update.counter)
        if request is not None:
            request.take(update)
        if update.finished:
            self._requests.pop(update.counter, None)
            self._cursors.pop(update.counter, None)
            self._ended.append(update.counter)
        else:
            self._cursors[update.counter] = update.first + len(update.token_ids) // 4
        return request is not None or update.finished

    def _lose(self, counters: Sequence[int], error: EngineFailed) -> None:
        with self.changed:
            for counter in counters:
                request = self._requests.pop(counter, None)
                if request is not None:
                    request.error = error
                    request.version += 1
            self.changed.notify_all()

    def _call(self, method: Any, *arguments: Any) -> Any:
        return call_front(self._name, method, *arguments)
