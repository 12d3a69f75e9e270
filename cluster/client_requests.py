"""What a client keeps of one request, how prompts go on the wire, and how long lists are cut into calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..scheduler.front_messages import RefusalReason
from ..scheduler.request_options import RequestOptions
from ..scheduler.sampling_params import SamplingParams
from .answer_logprobs import AnswerLogprobs
from .chat_options import ChatOptions
from .engine import EngineFailed
from .front import ChatPrompt, PromptOnWire
from .mailboxes import Update
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .prompts import Conversation, Prompt

BATCH_REQUESTS = 256
_BATCH_BYTES = 4 * 2**20


class Overloaded(EngineFailed):
    """Too many requests wait at the engine: try again later."""


@dataclass(kw_only=True, slots=True, eq=False)
class ClientRequest:
    """One answer as this client sees it. Changed by the poll thread, under the client's lock.

    The n answers to one prompt have one request_id and counters in a row, from n_index 0 on.
    """

    counter: int
    request_id: str
    n_index: int
    given: PromptOnWire
    params: SamplingParams
    options: RequestOptions
    streams: bool
    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_len_at: dict[int, int] = field(default_factory=lambda: {0: 0})  # by number of tokens
    logprobs: AnswerLogprobs = field(init=False)
    sent: bool = False  # the front has taken it
    update: Update | None = None  # the newest
    error: Exception | None = None
    version: int = 0  # grows with every change

    def __post_init__(self) -> None:
        self.logprobs = AnswerLogprobs(self.params)

    @property
    def over(self) -> bool:
        return self.error is not None or (self.update is not None and self.update.finished)

    def take(self, update: Update) -> None:
        """Put an update in its place: it continues at `first`, and may repeat what an earlier answer held."""
        self.token_ids[update.first :] = np.frombuffer(update.token_ids, "<i4").tolist()
        self.text = self.text[: self.text_len_at[update.first]] + update.text
        self.text_len_at = {
            num_tokens: length
            for num_tokens, length in self.text_len_at.items()
            if num_tokens >= update.first
        } | {len(self.token_ids): len(self.text)}
        rows = update.logprobs
        if rows is not None:
            self.logprobs.put_tokens(update.first, rows.tokens, rows.texts)
            self.logprobs.put_prompt(1, rows.prompt, rows.texts)
        self.update = update
        if update.error is not None:
            self.error = exception_of(*update.error)
        self.version += 1

    def output(self) -> RequestOutput:
        update, logprobs = self.update, self.logprobs
        completion = CompletionOutput(
            index=self.n_index,
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=None if update is None else update.finish_reason,
            stop_reason=None if update is None else update.stop_reason,
            cumulative_logprob=logprobs.cumulative(self.token_ids),
            logprobs=logprobs.tokens(),
        )
        metrics = update and RequestMetrics(
            arrival_time_s=update.arrival_time_s,
            first_token_time_s=update.first_token_time_s,
            finished_time_s=update.finished_time_s,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=completion.finished,
            metrics=metrics,
            cached_tokens=0 if update is None else update.cached_tokens,
            prompt_logprobs=logprobs.prompt(),
        )


def exception_of(reason: RefusalReason, text: str) -> Exception:
    if reason is RefusalReason.INVALID:
        return ValueError(text)
    return Overloaded(text) if reason is RefusalReason.OVERLOADED else EngineFailed(text)


def on_wire(prompt: Prompt) -> PromptOnWire:
    return prompt if isinstance(prompt, str) else np.array(prompt, "<i4").tobytes()


def conversation_on_wire(messages: Conversation, options: ChatOptions) -> ChatPrompt:
    if isinstance(messages, str | bytes | Mapping) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        raise ValueError(
            'a conversation must be a list of messages such as {"role": "user", "content": "Hi"}, '
            f"got {messages!r:.60}"
        )
    return ChatPrompt(messages=[dict(message) for message in messages], options=options)


def batches(requests: Sequence[ClientRequest], *, most: int) -> Iterator[list[ClientRequest]]:
    """Cut a long list so that no one call carries too much, nor more than `most` requests."""
    batch: list[ClientRequest] = []
    size = 0
    for request in requests:
        given = request.given
        cost = len(given) if isinstance(given, bytes | str) else len(str(given))
        if batch and (len(batch) >= most or size + cost > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(request)
        size += cost
    if batch:
        yield batch
