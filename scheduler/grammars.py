"""Compiles the forms that answers must have, on a thread pool, and keeps the latest; follows one answer's tokens.

llguidance does the work and is imported with the first form that is asked for. Owns the pool and the cache. Knows no
rows and no steps (`masks.py`). Nothing here waits: who asks is called back.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from .structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT = 64  # compiled forms
_MAX_THREADS = 8
# Two line breaks, then an indentation. A small model that may go on with white space does, to its token limit.
_WHITESPACE = r"(\x0D?\x0A){1,2}[\x20\x09]{0,32}|[\x20\x09]{1,32}"
_MAX_ITEMS = 20_000  # that a parser follows side by side, about 1 ms of work: a schema of thousands of optional keys
_NO_OPTIONS = "%llguidance {}\n"  # as it stands before a GBNF grammar that was converted
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_NOTHING_FOLLOWS = "NoExtensionBias"  # llguidance's word for a grammar that leads to no text
_LISTING = "\n   1 | "
_MAX_REASON = 500  # characters of what a compiler says


class Matcher:
    """How far one answer is in its form. Belongs to one thread at a time.

    error: why nothing can follow, one sentence, or "".
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error = ""

    @property
    def finished(self) -> bool:
        """Whether the answer has its form, and nothing but an end token may follow."""
        return not self.error and self._matcher.is_stopped()

    def take(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were sampled; what comes after the end of the form is not looked at."""
        if self.error:
            return
        for token in tokens:
            if self._matcher.is_stopped():
                break
            if not self._matcher.consume_token(token):
                break
        self.check()

    def check(self) -> None:
        """Set `error` if the matcher has given up: at a token that its form does not have, or at a limit."""
        if not self.error and self._matcher.is_error():
            self.error = _cannot_go_on(self._matcher.get_error())


class Grammars:
    """The forms of one model's answers.

    tokenizer_json: called once, on the pool: the contents of the model's tokenizer.json. eos_token_ids: what may follow
    an answer that is complete. wake: called on the pool whenever an answer to `start` has come.
    Shapes: a mask is num_words int32 a row, bit i of word w for id 32 * w + i; no bit at or beyond vocab_size is set.
    all_ones, eos_bits [num_words]: the mask of the whole vocabulary, and that of the EOS ids.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        wake: Callable[[], None],
    ) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.all_ones = bits_of(range(vocab_size), self.num_words)
        self.eos_bits = bits_of(eos_token_ids, self.num_words)
        self._usable = self.all_ones
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1))
        self._pool: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = Lock()
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[StructuredOutputsParams, Future[LLMatcher]] = OrderedDict()

    # ------------------------------------------------------------ compiling

    def start(
        self,
        form: StructuredOutputsParams,
        outputs: Sequence[int],
        then: Callable[[Matcher | str], None],
    ) -> None:
        """Compile a form, unless it is kept, and hand `then` a matcher that has taken the outputs, or what is wrong.

        `then` is called on any thread, this one too, and once, unless the pool is closed before.
        """
        kept = self._kept.get(form)
        # One that failed is tried again: what was missing may have come.
        if kept is None or (kept.done() and (kept.cancelled() or kept.exception() is not None)):
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="grammar")
            kept = self._kept[form] = self._pool.submit(self._compile, form)
        self._kept.move_to_end(form)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        kept.add_done_callback(partial(self._begin, outputs, then))

    def _begin(
        self,
        outputs: Sequence[int],
        then: Callable[[Matcher | str], None],
        compiled: Future[LLMatcher],
    ) -> None:
        if compiled.cancelled():
            return
        try:
            matcher = Matcher(compiled.result().deep_copy())
            matcher.take(outputs)
            answer = matcher.error or matcher
        except ValueError as error:
            answer = str(error)
        except Exception as error:  # whoever waits must hear of it, and nobody else is listening
            answer = f"structured_outputs: {type(error).__name__}: {error}"
        then(answer)
        self._wake()

    def _compile(self, form: StructuredOutputsParams) -> LLMatcher:
        """Raises: ValueError, one sentence, for a form that cannot be compiled or a model without a tokenizer."""
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._known_tokenizer()
        limits = LLParserLimits(max_items_in_row=_MAX_ITEMS, verbose_errors=False)
        refused = f"structured_outputs: the {form.kind} cannot be compiled"
        try:
            text = _grammar_text(form)
        except ValueError as error:
            raise ValueError(f"{refused}: {_reason(str(error))}") from None
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        # Some forms are only found impossible, or beyond a limit, where an answer begins.
        possible = matcher.is_error() or any(matcher.compute_bitmask())
        error = matcher.get_error()
        if not possible or error.startswith(_NOTHING_FOLLOWS):
            raise ValueError(f"{refused}: no answer has it")
        if matcher.is_error():
            # The line and its listing are of a text that only who gave a grammar has written.
            why = error if form.kind == "grammar" else _PLACE.sub("", error.split(_LISTING)[0])
            raise ValueError(f"{refused}: {_reason(why)}")
        return matcher

    def _known_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(
                    self._tokenizer_json(), self.vocab_size, self._eos_token_ids
                )
                if not self._eos_token_ids:  # llguidance takes some id for one all the same
                    guessed = [i for i in self._tokenizer.eos_tokens if i < self.vocab_size]
                    self._usable = self.all_ones & ~bits_of(guessed, self.num_words)
            return self._tokenizer

    def close(self) -> None:
        """Compile nothing more, and wait for nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ what may follow

    def allowed(self, matchers: Sequence[Matcher]) -> np.ndarray:
        """Say what may follow each of some answers that are not finished: [len(matchers), num_words] int32.

        A row in which nothing may follow is all zeros, and its matcher has an error.
        """
        assert self._tokenizer is not None, "a matcher without a tokenizer"
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        bits = allocate_token_bitmask(len(matchers), self._tokenizer.vocab_size)
        fill_next_token_bitmask_par(
            self._executor,
            [(matcher._matcher, place) for place, matcher in enumerate(matchers)],
            bits,
        )
        bits = np.ascontiguousarray(bits[:, : self.num_words])
        bits &= self._usable  # a tokenizer may know more ids than the model
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.check()
            if not matcher.error and not row.any():
                matcher.error = _cannot_go_on("no token of this model can follow")
            if matcher.error:
                row[:] = 0
        return bits


def _make_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    eos = eos_token_ids or None
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        if "vocab size too small" not in str(error):
            raise ValueError(
                f"structured_outputs: the model's tokenizer cannot be used: {_reason(str(error))}"
            ) from None
    # The tokenizer names ids that the model's head does not have: masks are cut.
    return LLTokenizer(text, eos_token=eos)


def _grammar_text(form: StructuredOutputsParams) -> str:
    """The form as llguidance's Lark. Raises: ValueError for what is none."""
    from llguidance import LLMatcher, grammar_from

    if form.json is not None or form.json_object:
        schema: Any = form.json if form.json is not None else '{"type": "object"}'
        if form.disable_any_whitespace:
            made = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_flexible": False}
            )
        else:
            made = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _WHITESPACE}
            )
        return _unforced(f"start: %json {json.dumps(_only_grammar(made)['json_schema'])}")
    if form.regex is not None:
        return _unforced(_only_grammar(LLMatcher.grammar_from_regex(form.regex))["lark_grammar"])
    if form.choice is not None:
        # One lexeme, not one rule each: a parser would follow thousands side by side.
        choices = " | ".join(map(json.dumps, form.choice))
        return _unforced(f"start: CHOICE\nCHOICE: {choices}")
    assert form.grammar is not None, form
    return _unforced(grammar_from("grammar", form.grammar))


def _only_grammar(made: str) -> dict[str, Any]:
    """What llguidance makes of one form, out of the list that it puts it in."""
    (grammar,) = json.loads(made)["grammars"]
    return grammar


def _unforced(lark: str) -> str:
    """Lark in which any tokens may spell a text that must come; one with options of its own keeps them.

    Else llguidance allows only the tokens that the tokenizer makes of that text, which of "<|im_end|>" is the special
    token: that has no text, so the answer cannot go on.
    """
    if "%llguidance" in lark.replace(_NO_OPTIONS, ""):
        return lark
    # Behind it, so that a message's line is the line of who wrote it.
    return lark.replace(_NO_OPTIONS, "") + '\n%llguidance {"no_forcing": true}\n'


def bits_of(ids: Iterable[int], num_words: int) -> np.ndarray:
    """A mask of these ids: [num_words] int32."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _cannot_go_on(why: str) -> str:
    return f"structured_outputs: the answer cannot go on: {_reason(why)}"


def _reason(text: str) -> str:
    """What llguidance says, on one line."""
    reason = " ".join(text.replace("<non-verbose/>", "").split())
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
