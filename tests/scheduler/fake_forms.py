"""Forms that a person can work out: the outputs' remainders, in turn, and how many there are. No compiler, no thread.

A form is the text "period length": output i is an id with remainder i modulo period, and after `length` outputs nothing
may follow; from the second one on EOS may end it earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rowcast.launch.bench.fake_rank import next_allowed
from rowcast.scheduler.grammars import bits_of
from rowcast.scheduler.structured_outputs import StructuredOutputsParams


def form(period: int, length: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"{period} {length}")


def allowed_ids(
    text: str, outputs: Sequence[int], vocab_size: int, eos: Sequence[int]
) -> list[int]:
    """What may follow; nothing once the form is complete."""
    period, length = map(int, text.split())
    if len(outputs) == length or (outputs and outputs[-1] in eos):
        return []
    ids = [token for token in range(vocab_size) if token % period == len(outputs) % period]
    ends = set(eos)
    if len(outputs) < 2:
        return [token for token in ids if token not in ends]
    return sorted({*ids, *ends})


def choose(
    token: int,
    text: str,
    outputs: Sequence[int],
    vocab_size: int,
    eos: Sequence[int],
    *,
    ignore_eos: bool,
) -> int:
    """What a rank of `fakes` makes of the token that its model says."""
    ids = allowed_ids(text, outputs, vocab_size, eos)
    if ignore_eos:
        ids = [id_ for id_ in ids if id_ not in eos] or ids
    return next_allowed(token, bits_of(ids, -(-vocab_size // 32)))


class FakeMatcher:
    def __init__(self, grammars: FakeGrammars, text: str) -> None:
        self.grammars, self.text, self.outputs, self.error = grammars, text, [], ""

    @property
    def allowed(self) -> list[int]:
        return allowed_ids(
            self.text, self.outputs, self.grammars.vocab_size, self.grammars.eos_token_ids
        )

    @property
    def finished(self) -> bool:
        return not self.error and not self.allowed

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.finished:
                return
            if token not in self.allowed:
                self.error = f"token {token} does not follow"
                return
            self.outputs.append(token)


class FakeGrammars:
    """Compiles when it is told to; at once while `at_once`. A form "bad" fails, with a matcher of "1 9" that breaks."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.eos_token_ids = tuple(eos_token_ids)
        self.all_ones = bits_of(range(vocab_size), self.num_words)
        self.eos_bits = bits_of(eos_token_ids, self.num_words)
        self.at_once = True
        self.started: list[Callable[[], None]] = []
        self.breaks_after = 10**9  # outputs of whichever answer

    def start(
        self,
        form: StructuredOutputsParams,
        outputs: Sequence[int],
        then: Callable[[FakeMatcher | str], None],
    ) -> None:
        def finish() -> None:
            assert form.regex is not None
            if form.regex == "bad":
                then("the regex cannot be compiled")
                return
            matcher = FakeMatcher(self, form.regex)
            matcher.take(outputs)
            then(matcher.error or matcher)

        self.started.append(finish)
        if self.at_once:
            self.finish()

    def finish(self, count: int | None = None) -> None:
        """Compile the oldest ones, or all."""
        done, self.started = self.started[:count], self.started[len(self.started[:count]) :]
        for finish in done:
            finish()

    def allowed(self, matchers: Sequence[FakeMatcher]) -> np.ndarray:
        rows = []
        for matcher in matchers:
            if len(matcher.outputs) >= self.breaks_after:
                matcher.error = "a limit was reached"
            ids = [] if matcher.error else matcher.allowed
            rows.append(bits_of(ids, self.num_words))
        return np.array(rows)

    def close(self) -> None: ...
