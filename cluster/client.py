"""`rowcast.Client`: prompts to a running engine, text back, from any process that reaches its Ray cluster.

Works as an ordinary Ray driver and through Ray Client (`ray://`), which cannot stream: so one thread a client keeps one
long poll open at the engine's front, and hands what comes to whoever waits. Loads no torch.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..scheduler.request_options import RequestOptions, check_text
from ..scheduler.sampling_params import MAX_SEED, SamplingParams
from .answers import join, params_of_answers
from .attach import connect
from .chat_options import ChatOptions, Tools
from .client_requests import (
    BATCH_REQUESTS,
    ClientRequest,
    Overloaded,
    batches,
    conversation_on_wire,
    exception_of,
    on_wire,
)
from .config import RAY_NAMESPACE
from .engine import EngineFailed
from .front import Accepted, FrontRequest, PollAnswer, PromptOnWire
from .front_call import call_front
from .mailboxes import Update
from .outputs import RequestOutput
from .prompts import (
    Conversation,
    Many,
    Prompt,
    Prompts,
    is_one_prompt,
    list_conversations,
    list_options,
    list_params,
    list_prompts,
    one_prompt,
)

ManyParams = SamplingParams | Sequence[SamplingParams] | None

_LONGEST_POLL_S = 10.0


__all__ = ["Client", "EngineFailed", "Overloaded"]


class Client:
    """A connection to one engine. Thread-safe: many threads may stream at once. A context manager.

    address: "auto" (RAY_ADDRESS, else the engine that this machine knows), `ray://host:10001` from anywhere, or
        host:port on a node of the cluster; None is "auto". A process that is connected to Ray uses that connection.
    name: the engine's.
    Raises: ValueError, one sentence, when there is no such engine or no Ray at the address.

    Example: `Client("ray://10.0.0.4:10001").generate("Once upon a time")[0].outputs[0].text`
    """

    def __init__(self, address: str | None = "auto", name: str = "default") -> None:
        import ray

        self._session = connect(address or "auto", name=name)
        self._name = name
        try:
            self._front: Any = ray.get_actor(f"{name}/front-0", namespace=RAY_NAMESPACE)
            self.info: dict[str, Any] = self._call(self._front.info)
        except ValueError:
            self._session.disconnect()
            raise ValueError(
                f"no engine named {name!r} runs on the Ray cluster at {self._session.address}; start it with "
                "`rowcast serve`, or say which with --name (see `rowcast status`)"
            ) from None
        except BaseException:
            self._session.disconnect()
            raise
        self._uuid = secrets.token_bytes(16)
        self._poll_s = min(_LONGEST_POLL_S, self.info["mailbox_idle_s"] / 3)
        self._changed = threading.Condition()
        self._requests: dict[
            int, ClientRequest
        ] = {}  # by counter: sent, and their end is not here yet
        self._cursors: dict[int, int] = {}  # tokens here that the front was not told of
        self._ended: list[int] = []  # ends here that the front was not told of
        self._next_counter = 0
        self._closed = False
        self._thread = threading.Thread(target=self._poll, name="rowcast-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before Ray's own, which ends the connection

    # ------------------------------------------------------------ what people call

    def generate(
        self,
        prompts: Prompts,
        sampling_params: ManyParams = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once; the results are in the prompts' order.

        prompts: a string, a list of token ids, or a list of either. sampling_params: one for all, or a list; without
            any, what the model's generation_config.json recommends. One for all or a list are also
            priority (the smaller the more urgent), user (who shares fairly with others) and cache_salt (only requests
            of the same salt share cached prefixes); see `RequestOptions`.
        Raises: ValueError naming the prompt that cannot be served; EngineFailed when the engine ends.
        """
        listed = list_prompts(prompts)
        names = None if is_one_prompt(prompts) else [f"prompts[{i}]" for i in range(len(listed))]
        options = list_options(len(listed), priority=priority, user=user, cache_salt=cache_salt)
        return self._answer([on_wire(p) for p in listed], listed, sampling_params, options, names)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ManyParams = None,
        *,
        priority: Many[int] = 0,
        user: Many[str] = "",
        cache_salt: Many[str | None] = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (`[{"role": "user", "content": "Hi"}]`) or a list of them, in order.

        tools, add_generation_prompt and chat_template_kwargs go to the model's chat template; see `ChatOptions`.
        """
        chat = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        conversations = list_conversations(messages)
        one = any(conversation is messages for conversation in conversations)
        wires = [conversation_on_wire(c, chat) for c in conversations]
        names = None if one else [f"conversations[{i}]" for i in range(len(wires))]
        options = list_options(len(wires), priority=priority, user=user, cache_salt=cache_salt)
        return self._answer(wires, [None] * len(wires), sampling_params, options, names)

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
        """Answer one prompt as its tokens come: each output holds all text so far. Leaving the loop aborts it."""
        listed = one_prompt(prompt)
        options = RequestOptions(priority=priority, user=user, cache_salt=cache_salt)
        return self._stream(on_wire(listed), listed, sampling_params, request_id, options)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """`stream` for one conversation, with `chat`'s options."""
        chat = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        options = RequestOptions(priority=priority, user=user, cache_salt=cache_salt)
        wire = conversation_on_wire(messages, chat)
        return self._stream(wire, None, sampling_params, request_id, options)

    def abort(self, request_id: str) -> None:
        """End a request of this client that another thread, or an open `stream`, waits for. Others are left alone."""
        with self._changed:
            counters = [r.counter for r in self._requests.values() if r.request_id == request_id]
        if counters:
            self._call(self._front.abort, self._uuid, counters)

    def close(self) -> None:
        """Abort what still runs and leave; the engine stays. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            live = list(self._requests)
            for request in self._requests.values():
                request.error = EngineFailed("the client was closed")
                request.version += 1
            self._changed.notify_all()
        atexit.unregister(self.close)
        try:
            if live:
                self._call(self._front.abort, self._uuid, live)
                self._call(self._front.poll, self._uuid, [], live, 0.0)
        except EngineFailed:
            pass  # the engine is gone, and with it what there was to abort
        self._thread.join(self._poll_s + 5)
        self._session.disconnect()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ requests

    def _answer(
        self,
        wires: Sequence[PromptOnWire],
        prompts: Sequence[Prompt | None],
        sampling_params: ManyParams,
        options: Sequence[RequestOptions],
        names: Sequence[str] | None,
    ) -> list[RequestOutput]:
        params = list_params(sampling_params, len(wires), self.info["sampling_defaults"])
        answers = [
            self._new(wire, prompt, wanted, None, said, streams=False)
            for wire, prompt, wanted, said in zip(wires, prompts, params, options, strict=True)
        ]
        requests = [request for one in answers for request in one]
        if names is not None:
            names = [name for name, one in zip(names, answers, strict=True) for _ in one]
        try:
            most = min(BATCH_REQUESTS, self.info["max_waiting"])
            for batch in batches(requests, most=most):
                self._wait_for_room(len(batch))
                self._send(batch)
                self._raise_first_error(requests, names)
            with self._changed:
                while not all(r.over for r in requests):
                    self._changed.wait()
                    self._raise_first_error(requests, names)
            self._raise_first_error(requests, names)
        except BaseException:
            self._give_up(requests)
            raise
        return [_output(one) for one in answers]

    def _wait_for_room(self, num_more: int) -> None:
        """Hold a long list back: beyond its queue the scheduler refuses."""
        with self._changed:
            while self._requests and len(self._requests) + num_more > self.info["max_waiting"]:
                self._changed.wait()

    def _stream(
        self,
        wire: PromptOnWire,
        prompt: Prompt | None,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> Iterator[RequestOutput]:
        (params,) = list_params(sampling_params, 1, self.info["sampling_defaults"])
        requests = self._new(wire, prompt, params, request_id, options, streams=True)
        return self._outputs(requests)

    def _outputs(self, requests: Sequence[ClientRequest]) -> Iterator[RequestOutput]:
        # Sent at the first `next`: a generator that is never started has no end to clean up at.
        seen = 0
        try:
            self._send(requests)
            while True:
                with self._changed:
                    while (version := sum(r.version for r in requests)) == seen:
                        self._changed.wait()
                    seen = version
                    self._raise_first_error(requests, None)
                    over = all(r.over for r in requests)
                    output = _output(requests)
                yield output
                if over:
                    return
        finally:
            self._give_up(requests)

    def _new(
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
        with self._changed:
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

    def _send(self, requests: Sequence[ClientRequest]) -> None:
        """Submit; what is rejected has its error afterwards."""
        with self._changed:
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
        with self._changed:
            self._requests |= {request.counter: request for request in requests}
        answers = self._call(self._front.submit, self._uuid, messages)
        with self._changed:
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
            self._changed.notify_all()

    def _give_up(self, requests: Sequence[ClientRequest]) -> None:
        """Abort those that are not over. Their ends are taken in by the poll thread, if the front knows them."""
        with self._changed:
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

    def _raise_first_error(
        self, requests: Sequence[ClientRequest], names: Sequence[str] | None
    ) -> None:
        for index, request in enumerate(requests):
            error = request.error
            if isinstance(error, ValueError) and names is not None:
                raise ValueError(f"{names[index]}: {error}")
            if error is not None:
                raise error

    # ------------------------------------------------------------ the poll thread

    def _poll(self) -> None:
        """Take updates in until closed. Whatever goes wrong, nobody is left waiting."""
        try:
            while self._poll_once():
                pass
        except BaseException as error:
            with self._changed:
                self._closed = True
                everything = list(self._requests)
            self._lose(
                everything, EngineFailed(f"the client failed: {type(error).__name__}: {error}")
            )
            raise

    def _poll_once(self) -> bool:
        """One long poll, once there is something to wait for or to tell; False when the client is closed."""
        with self._changed:
            while not self._closed and not self._ended and not self._waiting_for():
                self._changed.wait()
            if self._closed:
                return False
            cursors, self._cursors = list(self._cursors.items()), {}
            ended, self._ended = self._ended, []
            expected = self._waiting_for()
        timeout_s = self._poll_s if expected else 0.0
        try:
            answer: PollAnswer = self._call(self._front.poll, self._uuid, cursors, ended, timeout_s)
            with self._changed:
                strays = [u.counter for u in answer.updates if not self._take(u)]
                self._changed.notify_all()
            if strays:
                self._call(self._front.abort, self._uuid, strays)
        except EngineFailed as error:
            self._lose(expected, error)
            return True
        if not answer.known:
            idle_s = self.info["mailbox_idle_s"]
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
        with self._changed:
            for counter in counters:
                request = self._requests.pop(counter, None)
                if request is not None:
                    request.error = error
                    request.version += 1
            self._changed.notify_all()

    def _call(self, method: Any, *arguments: Any) -> Any:
        return call_front(self._name, method, *arguments)


def _output(answers: Sequence[ClientRequest]) -> RequestOutput:
    return join([answer.output() for answer in answers])
