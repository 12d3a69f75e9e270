"""The front: text in, text out, between clients that poll over Ray and the scheduler's ROUTER socket.

Owns tokenizer, chat template and detokenizer (`text.py`), the mailboxes, and the check of each request with the
scheduler's own door. An async Ray actor: one event loop, one thread, so that mailboxes and socket need no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import ray.exceptions
import zmq.asyncio

from ..scheduler.config import SchedulerConfig
from ..scheduler.door import Door
from ..scheduler.front_messages import (
    Abort,
    Ack,
    Outputs,
    RefusalReason,
    Refused,
    Register,
    Submit,
    decode,
    encode,
    make_submit_key,
)
from ..scheduler.kv_groups import KVGroupSpec
from ..scheduler.messages import ProtocolError
from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import SamplingParams
from .answer_text import AnswerText
from .bad_words import with_bad_words
from .channel import FrontDealer
from .chat_options import ChatOptions
from .mailboxes import Mailboxes, Update
from .text import TextProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: list[dict[str, Any]]
    options: ChatOptions


PromptOnWire = bytes | str | ChatPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontRequest:
    """One answer's request as a client sends it. prompt: little-endian int32 ids as bytes, text, or a conversation.

    counter: the client's own number of it. n_index: which of its prompt's n answers this is: they are requests of
        their own, with counters in a row, and share the first one's submit key. seed is always drawn.
    streams: whether the client wants tokens as they come.
    """

    counter: int
    request_id: str
    prompt: PromptOnWire
    params: SamplingParams
    seed: int
    n_index: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)
    streams: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The prompt as the model sees it: ids (little-endian int32), and its text if it was made here."""

    prompt_token_ids: bytes
    prompt: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    reason: RefusalReason
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PollAnswer:
    """known is False when this client has no mailbox: it never had one, or did not poll for too long."""

    known: bool
    updates: list[Update]


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontConfig:
    """What a front needs to know of its engine. Units: seconds. num_blocks counts the null block."""

    engine_name: str
    front_name: str
    model_name: str
    model_dir: str
    scheduler_address: str
    scheduler: SchedulerConfig
    groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    mailbox_idle_s: float


class Front:
    """The front's life in one event loop; `FrontActor` is the same under Ray."""

    def __init__(self, config: FrontConfig) -> None:
        self.config = config
        self.text = TextProcessor(config.model_dir)
        self.mailboxes = Mailboxes(idle_s=config.mailbox_idle_s)
        self._door = Door(config.scheduler, config.groups, config.num_blocks - 1)
        self._dealer: FrontDealer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._news: dict[bytes, asyncio.Event] = {}
        self._failure: str | None = None
        self._epoch = 0
        self._dropped_messages = 0

    async def start(self) -> None:
        """Meet the scheduler; from now on requests are taken."""
        front_id = f"{self.config.front_name}/{os.urandom(4).hex()}".encode()
        context = zmq.asyncio.Context.instance()
        self._dealer = FrontDealer(context, self.config.scheduler_address, front_id)
        await self._dealer.send(encode(Register(front_name=self.config.front_name)))
        self._tasks = [
            asyncio.create_task(self._take_messages()),
            asyncio.create_task(self._drop_idle_mailboxes()),
        ]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._dealer is not None:
            self._dealer.close()

    def fail(self, text: str) -> None:
        """The engine is over: every request ends with this sentence, and so does every new one."""
        if self._failure is None:
            self._failure = text
            self._ring(self.mailboxes.refuse_all(RefusalReason.ENGINE_FAILED, text))

    # ------------------------------------------------------------ what clients call

    async def submit(
        self, client: bytes, requests: Sequence[FrontRequest]
    ) -> list[Accepted | Rejected]:
        """Take requests in, each for itself. The same (client, counter) again is the same request."""
        answers: list[Accepted | Rejected] = []
        read: dict[int, tuple[np.ndarray, str | None]] = {}
        for request in requests:
            answers.append(await self._submit(client, request, read))
        return answers

    async def poll(
        self,
        client: bytes,
        cursors: Sequence[tuple[int, int]],
        ended: Sequence[int],
        timeout_s: float,
    ) -> PollAnswer:
        """Acknowledge, then wait up to timeout_s for news of this client's requests.

        cursors: (counter, tokens the client has) where that changed; ended: counters whose end it has.
        """
        done = self.mailboxes.acknowledge(client, cursors, ended)
        if done:
            await self._say(Ack(numbers=np.array(done, np.int64)))
        if timeout_s > 0 and self.mailboxes.knows(client) and not self.mailboxes.has_news(client):
            event = self._news.setdefault(client, asyncio.Event())
            event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        return PollAnswer(known=self.mailboxes.knows(client), updates=self.mailboxes.news(client))

    async def abort(self, client: bytes, counters: Sequence[int]) -> None:
        """End requests; their end arrives as any other does."""
        await self._abort(self.mailboxes.live_numbers(client, counters))

    def info(self) -> dict[str, Any]:
        scheduler = self.config.scheduler
        return {
            "name": self.config.engine_name,
            "model": self.config.model_name,
            "max_model_len": scheduler.max_model_len,
            "max_waiting": scheduler.max_waiting,
            "mailbox_idle_s": self.config.mailbox_idle_s,
            "sampling_defaults": self.text.sampling_defaults,
            "clients": self.mailboxes.num_clients,
            "requests": self.mailboxes.num_requests,
            "dropped_messages": self._dropped_messages,
            "failure": self._failure,
        }

    # ------------------------------------------------------------ one request

    async def _submit(
        self,
        client: bytes,
        request: FrontRequest,
        read: dict[int, tuple[np.ndarray, str | None]],
    ) -> Accepted | Rejected:
        """read: the prompts of this call that were read already, by identity: n answers share one."""
        if self._failure is not None:
            return Rejected(reason=RefusalReason.ENGINE_FAILED, text=self._failure)
        try:
            if id(request.prompt) not in read:
                # Tokenizing lets go of the interpreter lock: meanwhile polls are answered.
                read[id(request.prompt)] = await asyncio.to_thread(
                    self._read_prompt, request.prompt
                )
            ids, prompt = read[id(request.prompt)]
            params = request.params
            if params.bad_words or params.bad_words_token_ids:
                params = await asyncio.to_thread(with_bad_words, params, self.text)
            submit = Submit(
                number=0,
                submit_key=make_submit_key(client, request.counter - request.n_index),
                request_id=request.request_id,
                prompt_token_ids=ids,
                seed=request.seed,
                n_index=request.n_index,
                params=params,
                priority=request.options.priority,
                user=request.options.user,
                cache_salt=request.options.cache_salt,
            )
            self._door.check(self.config.front_name, submit)
            answer = AnswerText(self.text, ids.tolist(), request.params)
        except (ValueError, TypeError) as error:
            return Rejected(reason=RefusalReason.INVALID, text=str(error))
        number = self.mailboxes.open(
            client,
            request.counter,
            answer=answer,
            streams=request.streams,
        )
        if number is not None:
            await self._say(replace(submit, number=number))
        return Accepted(prompt_token_ids=ids.tobytes(), prompt=prompt)

    def _read_prompt(self, prompt: PromptOnWire) -> tuple[np.ndarray, str | None]:
        """Token ids of a prompt, and its text where that was not the client's own."""
        if isinstance(prompt, bytes):
            return np.frombuffer(prompt, "<i4"), None
        if isinstance(prompt, str):
            return np.array(self.text.encode(prompt), "<i4"), None
        said = prompt.options
        text = self.text.apply_chat_template(
            prompt.messages, said.add_generation_prompt, **said.variables
        )
        return np.array(self.text.encode(text, add_special_tokens=False), "<i4"), text

    # ------------------------------------------------------------ the scheduler

    async def _say(self, message: Submit | Abort | Ack) -> None:
        assert self._dealer is not None, "front used before start"
        await self._dealer.send(encode(message))

    async def _abort(self, numbers: Sequence[int]) -> None:
        if numbers:
            await self._say(Abort(numbers=np.array(numbers, np.int64)))

    async def _take_messages(self) -> None:
        assert self._dealer is not None
        while True:
            try:
                message = decode(await self._dealer.receive())
            except ProtocolError:
                self._dropped_messages += 1
                continue
            if isinstance(message, Outputs):
                await self._take_outputs(message)
            elif isinstance(message, Refused):
                client = self.mailboxes.refuse(message.number, message.reason, message.text)
                self._ring(set() if client is None else {client})
            else:
                self._dropped_messages += 1

    async def _take_outputs(self, outputs: Outputs) -> None:
        if outputs.epoch < self._epoch:  # of a worker group that has been replaced
            self._dropped_messages += 1
            return
        self._epoch = outputs.epoch
        delivery = self.mailboxes.deliver(outputs)
        self._ring(delivery.clients)
        await self._abort(delivery.stopped)
        if delivery.orphans:
            await self._say(Ack(numbers=np.array(delivery.orphans, np.int64)))

    async def _drop_idle_mailboxes(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.config.mailbox_idle_s / 4))
            gone, live, ended = self.mailboxes.expire()
            for client in gone:
                if (event := self._news.pop(client, None)) is not None:
                    event.set()
            await self._abort(live)
            if ended:
                await self._say(Ack(numbers=np.array(ended, np.int64)))

    def _ring(self, clients: set[bytes]) -> None:
        for client in clients:
            if (event := self._news.get(client)) is not None:
                event.set()


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=10_000)  # pyright: ignore[reportCallIssue]
class FrontActor:
    """`Front` as an actor. Never on the token path of the scheduler's process: it talks to that by socket."""

    def __init__(self, config: FrontConfig) -> None:
        self._front = Front(config)
        self._watch: asyncio.Task[None] | None = None

    async def start(self, scheduler: Any) -> int:
        """Meet the scheduler; returns this process's id.

        scheduler: the scheduler actor's handle; its end ends every request here, however it comes.
        """
        await self._front.start()
        self._watch = asyncio.create_task(self._watch_scheduler(scheduler))
        return os.getpid()

    async def _watch_scheduler(self, scheduler: Any) -> None:
        try:
            text = await scheduler.ended.remote()
        except ray.exceptions.RayError:
            text = f"the scheduler of engine {self._front.config.engine_name!r} died; start the engine again"
        self._front.fail(text)

    async def submit(
        self, client: bytes, requests: list[FrontRequest]
    ) -> list[Accepted | Rejected]:
        return await self._front.submit(client, requests)

    async def poll(
        self,
        client: bytes,
        cursors: list[tuple[int, int]],
        ended: list[int],
        timeout_s: float,
    ) -> PollAnswer:
        return await self._front.poll(client, cursors, ended, timeout_s)

    async def abort(self, client: bytes, counters: list[int]) -> None:
        await self._front.abort(client, counters)

    async def info(self) -> dict[str, Any]:
        return self._front.info()

    async def stay(self) -> None:
        """Never returns: whoever calls this learns of this process's end."""
        await asyncio.Event().wait()

    async def loaded_modules(self) -> list[str]:
        import sys

        return sorted(sys.modules)
