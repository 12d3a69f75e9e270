"""What a front keeps for its clients: new tokens and text of each request, until the client has acknowledged them.

Plain: no sockets, no Ray, a clock that a test advances. A client (a uuid) has one mailbox; its requests are numbered by
its own counter, so the same counter twice is the same request. A front's own `number` names a request towards the
scheduler.

What a poll returned is kept as a chunk and returned again until a later poll's cursor (tokens the caller has) covers
it: a lost answer loses nothing. The last chunk goes when the caller says that it has the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..scheduler.extras import LogprobRows
from ..scheduler.front_messages import FinishCode, Outputs, RefusalReason
from .answer_logprobs import AnswerRows, RowsOnTheWay
from .answer_text import AnswerText
from .outputs import FINISH_REASON_OF, FinishReason


class Delivery(NamedTuple):
    """What came of one outputs message.

    clients: those that have news. orphans: numbers that ended and belong to nobody any more. stopped: numbers whose
        text came to a stop string, which the scheduler does not know.
    """

    clients: set[bytes]
    orphans: list[int]
    stopped: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One request's news for its client.

    first: how many tokens precede token_ids (the cursor that this continues). text belongs to token_ids.
    error: set when the request is over without an answer. cached_tokens: of its prompt, known with its first token.
    logprobs: of token_ids and of the prompt, None if nobody asked.
    Times are seconds on the front's clock.
    """

    counter: int
    first: int
    token_ids: bytes  # little-endian int32
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: tuple[RefusalReason, str] | None = None
    cached_tokens: int = 0
    logprobs: RowsOnTheWay | None = None
    arrival_time_s: float
    first_token_time_s: float | None = None
    finished_time_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class _Entry:
    """One request. tokens are those not acknowledged; `acknowledged` came before them.

    num_read: how many tokens `answer` has read. untold_text: of those, what is in no chunk.
    rows: the log-probabilities of `tokens`, one each, and of the prompt until a token is acknowledged; None unless
        they were asked for.
    """

    number: int
    client: bytes
    counter: int
    answer: AnswerText
    streams: bool
    arrival_time_s: float
    acknowledged: int = 0
    tokens: list[int] = field(default_factory=list)
    chunks: list[tuple[int, str]] = field(default_factory=list)  # tokens up to, their text
    num_read: int = 0
    untold_text: str = ""
    cached_tokens: int = 0
    rows: AnswerRows | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    finish: FinishCode = FinishCode.RUNNING
    error: tuple[RefusalReason, str] | None = None
    told_end: bool = False  # the last chunk is made

    @property
    def num_tokens(self) -> int:
        return self.acknowledged + len(self.tokens)

    @property
    def ended(self) -> bool:
        return self.finish is not FinishCode.RUNNING

    @property
    def num_told(self) -> int:
        return self.chunks[-1][0] if self.chunks else self.acknowledged

    def has_news(self) -> bool:
        if self.ended:
            return True
        return self.streams and (bool(self.chunks) or self.num_tokens > self.num_told)

    def read(self) -> None:
        """Make text of the tokens that came since, and of the end."""
        new = self.tokens[self.num_read - self.acknowledged :]
        self.untold_text += self.answer.append(new, self.finish)
        self.num_read = self.num_tokens

    def advance(self, have: int) -> None:
        """The client has this many tokens, which is what some answer brought it up to: forget them."""
        if have <= self.acknowledged or all(end != have for end, _ in self.chunks):
            return
        while self.chunks and self.chunks[0][0] <= have and not self._only_end_is_left():
            del self.chunks[0]
        del self.tokens[: have - self.acknowledged]
        if self.rows is not None:
            del self.rows.tokens[: have - self.acknowledged]
            self.rows.prompt.clear()
        self.acknowledged = have

    def rows_on_the_way(self) -> RowsOnTheWay | None:
        """The log-probabilities of what an update tells."""
        if self.rows is None:
            return None
        tokens, prompt = LogprobRows.join(self.rows.tokens), LogprobRows.join(self.rows.prompt)
        texts = self.answer.texts_of((tokens, prompt))
        return RowsOnTheWay(tokens=tokens, prompt=prompt, texts=texts)

    def _only_end_is_left(self) -> bool:
        return self.told_end and len(self.chunks) == 1


@dataclass(kw_only=True, slots=True)
class _Mailbox:
    polled_at: float
    entries: dict[int, _Entry] = field(default_factory=dict)  # by the client's counter
    done: set[int] = field(default_factory=set)  # counters that ended and were acknowledged
    all_done_below: int = 0  # every counter below has


class Mailboxes:
    """All clients of one front. A mailbox that is not polled for idle_s is dropped by `expire`."""

    def __init__(self, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._mailboxes: dict[bytes, _Mailbox] = {}
        self._entries: dict[int, _Entry] = {}  # by number, until the client has the end

    # ------------------------------------------------------------ counts

    @property
    def num_clients(self) -> int:
        return len(self._mailboxes)

    @property
    def num_requests(self) -> int:
        """Requests whose end their client has not acknowledged."""
        return len(self._entries)

    def knows(self, client: bytes) -> bool:
        return client in self._mailboxes

    # ------------------------------------------------------------ a client's calls

    def open(
        self,
        client: bytes,
        counter: int,
        *,
        answer: AnswerText,
        streams: bool = True,
    ) -> int | None:
        """Take a request in and give it a number; None when this client's request is known already.

        streams: whether the client wants tokens as they come, or all at the end.
        """
        now = self._clock()
        mailbox = self._mailboxes.setdefault(client, _Mailbox(polled_at=now))
        if self.is_known(client, counter):
            return None
        entry = _Entry(
            number=next(self._numbers),
            client=client,
            counter=counter,
            answer=answer,
            streams=streams,
            arrival_time_s=now,
        )
        mailbox.entries[counter] = entry
        self._entries[entry.number] = entry
        return entry.number

    def is_known(self, client: bytes, counter: int) -> bool:
        mailbox = self._mailboxes.get(client)
        return mailbox is not None and (
            counter < mailbox.all_done_below
            or counter in mailbox.done
            or counter in mailbox.entries
        )

    def acknowledge(
        self, client: bytes, cursors: Iterable[tuple[int, int]], ended: Iterable[int]
    ) -> list[int]:
        """Note a poll. cursors: (counter, tokens the client has); ended: counters whose end it has.

        Returns: the numbers of `ended`, which are forgotten here.
        """
        mailbox = self._mailboxes.get(client)
        if mailbox is None:
            return []
        mailbox.polled_at = self._clock()
        for counter, have in cursors:
            entry = mailbox.entries.get(counter)
            if entry is not None:
                entry.advance(have)
        numbers = []
        for counter in ended:
            entry = mailbox.entries.get(counter)
            if entry is not None and entry.ended:
                del mailbox.entries[counter]
                del self._entries[entry.number]
                mailbox.done.add(counter)
                numbers.append(entry.number)
        while mailbox.all_done_below in mailbox.done:
            mailbox.done.remove(mailbox.all_done_below)
            mailbox.all_done_below += 1
        return numbers

    def has_news(self, client: bytes) -> bool:
        mailbox = self._mailboxes.get(client)
        return mailbox is not None and any(e.has_news() for e in mailbox.entries.values())

    def news(self, client: bytes) -> list[Update]:
        """Everything the client has not acknowledged, what an earlier answer held included."""
        mailbox = self._mailboxes.get(client)
        if mailbox is None:
            return []
        return [self._update(entry) for entry in mailbox.entries.values() if entry.has_news()]

    def live_numbers(self, client: bytes, counters: Iterable[int]) -> list[int]:
        """The numbers of those of a client's requests that have not ended."""
        mailbox = self._mailboxes.get(client)
        if mailbox is None:
            return []
        entries = (mailbox.entries.get(counter) for counter in counters)
        return [entry.number for entry in entries if entry is not None and not entry.ended]

    # ------------------------------------------------------------ what the scheduler says

    def deliver(self, outputs: Outputs) -> Delivery:
        """Put one outputs message into the mailboxes. What comes for a request after its end is dropped."""
        now = self._clock()
        delivery = Delivery(set(), [], [])
        cached = (outputs.cached_numbers.tolist(), outputs.cached_tokens.tolist())
        for number, count in zip(*cached, strict=True):
            if number in self._entries:
                self._entries[number].cached_tokens = count
        for number, first, rows in outputs.prompt_logprobs:
            entry = self._entries.get(number)
            if entry is not None and not entry.ended:
                entry.rows = entry.rows or AnswerRows()
                entry.rows.take_prompt(first, rows)
        columns = (outputs.numbers, outputs.tokens, outputs.finish_codes)
        entries = zip(*(c.tolist() for c in columns), strict=True)
        for place, (number, token, code) in enumerate(entries):
            entry = self._entries.get(number)
            if entry is None or entry.ended:
                if code != FinishCode.RUNNING:
                    delivery.orphans.append(number)
                continue
            if token >= 0:
                if entry.first_token_time_s is None:
                    entry.first_token_time_s = now
                entry.tokens.append(token)
                if place in outputs.logprobs:
                    entry.rows = entry.rows or AnswerRows()
                    entry.rows.tokens.append(outputs.logprobs[place])
            if code != FinishCode.RUNNING:
                entry.finish = FinishCode(code)
                entry.finished_time_s = now
            if entry.answer.searches:
                entry.read()
                if entry.answer.stop_string is not None:
                    if not entry.ended:
                        delivery.stopped.append(number)
                    entry.finish = FinishCode.STOP
                    entry.finished_time_s = now
            if entry.has_news():
                delivery.clients.add(entry.client)
        return delivery

    def refuse(self, number: int, reason: RefusalReason, text: str) -> bytes | None:
        """End a request with an error; the client that has news, or None when nobody waits."""
        entry = self._entries.get(number)
        if entry is None or entry.ended:
            return None
        entry.finish = FinishCode.ERROR
        entry.finished_time_s = self._clock()
        entry.error = (reason, text)
        return entry.client

    def refuse_all(self, reason: RefusalReason, text: str) -> set[bytes]:
        clients = {self.refuse(number, reason, text) for number in self._entries}
        return {client for client in clients if client is not None}

    # ------------------------------------------------------------ time

    def expire(self) -> tuple[list[bytes], list[int], list[int]]:
        """Drop the mailboxes that nobody polls.

        Returns: their clients; the numbers that are to be aborted; the numbers that had ended.
        """
        now = self._clock()
        gone = [c for c, box in self._mailboxes.items() if now - box.polled_at >= self._idle_s]
        live: list[int] = []
        ended: list[int] = []
        for client in gone:
            for entry in self._mailboxes.pop(client).entries.values():
                del self._entries[entry.number]
                (ended if entry.ended else live).append(entry.number)
        return gone, live, ended

    # ------------------------------------------------------------ one request

    def _update(self, entry: _Entry) -> Update:
        if entry.num_tokens > entry.num_told or (entry.ended and not entry.told_end):
            entry.read()
            entry.chunks.append((entry.num_tokens, entry.untold_text))
            entry.untold_text = ""
            entry.told_end = entry.ended
        return Update(
            counter=entry.counter,
            first=entry.acknowledged,
            token_ids=np.array(entry.tokens, "<i4").tobytes(),
            text="".join(text for _, text in entry.chunks),
            finish_reason=FINISH_REASON_OF.get(entry.finish),
            stop_reason=entry.answer.stop_reason,
            error=entry.error,
            cached_tokens=entry.cached_tokens,
            logprobs=entry.rows_on_the_way(),
            arrival_time_s=entry.arrival_time_s,
            first_token_time_s=entry.first_token_time_s,
            finished_time_s=entry.finished_time_s,
        )
