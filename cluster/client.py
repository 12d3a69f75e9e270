"""`rowcast.Client`: prompts to a running engine, text back, from any process that reaches its Ray cluster.

Works as an ordinary Ray driver and through Ray Client (`ray://`). Owns what people call; what travels between this
process and the engine's front is `client_link.py`'s. Loads no torch.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import SamplingParams
from .answers import join
from .attach import connect
from .chat_options import ChatOptions, Tools
from .client_link import FrontLink
from .client_requests import (
    BATCH_REQUESTS,
    ClientRequest,
    Overloaded,
    batches,
    conversation_on_wire,
    on_wire,
)
from .config import RAY_NAMESPACE
from .engine import EngineFailed
from .front import PromptOnWire
from .front_call import call_front
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
        try:
            front = ray.get_actor(f"{name}/front-0", namespace=RAY_NAMESPACE)
            self.info: dict[str, Any] = call_front(name, front.info)
        except ValueError:
            self._session.disconnect()
            raise ValueError(
                f"no engine named {name!r} runs on the Ray cluster at {self._session.address}; start it with "
                "`rowcast serve`, or say which with --name (see `rowcast status`)"
            ) from None
        except BaseException:
            self._session.disconnect()
            raise
        self._link = FrontLink(name, front, self.info)
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
            any, what the model's generation_config.json recommends. One for all or a list are also priority (the
            smaller the more urgent), user (who shares fairly with others) and cache_salt (only requests of the same
            salt share cached prefixes); see `RequestOptions`.
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
        self._link.abort(request_id)

    def close(self) -> None:
        """Abort what still runs and leave; the engine stays. A second call does nothing."""
        if self._link.close():
            atexit.unregister(self.close)
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
            self._link.new(wire, prompt, wanted, None, said, streams=False)
            for wire, prompt, wanted, said in zip(wires, prompts, params, options, strict=True)
        ]
        requests = [request for one in answers for request in one]
        if names is not None:
            names = [name for name, one in zip(names, answers, strict=True) for _ in one]
        try:
            most = min(BATCH_REQUESTS, self.info["max_waiting"])
            for batch in batches(requests, most=most):
                self._link.wait_for_room(len(batch))
                self._link.send(batch)
                _raise_first_error(requests, names)
            with self._link.changed:
                while not all(r.over for r in requests):
                    self._link.changed.wait()
                    _raise_first_error(requests, names)
            _raise_first_error(requests, names)
        except BaseException:
            self._link.give_up(requests)
            raise
        return [_output(one) for one in answers]

    def _stream(
        self,
        wire: PromptOnWire,
        prompt: Prompt | None,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
    ) -> Iterator[RequestOutput]:
        (params,) = list_params(sampling_params, 1, self.info["sampling_defaults"])
        requests = self._link.new(wire, prompt, params, request_id, options, streams=True)
        return self._outputs(requests)

    def _outputs(self, requests: Sequence[ClientRequest]) -> Iterator[RequestOutput]:
        # Sent at the first `next`: a generator that is never started has no end to clean up at.
        seen = 0
        try:
            self._link.send(requests)
            while True:
                with self._link.changed:
                    while (version := sum(r.version for r in requests)) == seen:
                        self._link.changed.wait()
                    seen = version
                    _raise_first_error(requests, None)
                    over = all(r.over for r in requests)
                    output = _output(requests)
                yield output
                if over:
                    return
        finally:
            self._link.give_up(requests)


def _output(answers: Sequence[ClientRequest]) -> RequestOutput:
    return join([answer.output() for answer in answers])


def _raise_first_error(requests: Sequence[ClientRequest], names: Sequence[str] | None) -> None:
    for index, request in enumerate(requests):
        error = request.error
        if isinstance(error, ValueError) and names is not None:
            raise ValueError(f"{names[index]}: {error}")
        if error is not None:
            raise error
