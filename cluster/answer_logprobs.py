"""The log-probabilities of one answer: rows as they come from the scheduler, and the dicts that its caller sees.

Rows stay numbers until somebody looks: a front hands them on with the text of each id, since a client has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..scheduler.extras import LogprobRows
from ..scheduler.sampling_params import SamplingParams
from .outputs import Logprob, TokenLogprobs

TokenTexts = Mapping[int, str]


@dataclass(kw_only=True, slots=True)
class AnswerRows:
    """One answer's rows: of its prompt, and one for each of its tokens, if it asked for them.

    tokens: one row each, in step with the answer's tokens. prompt: in order, from the prompt's second token on.
    """

    tokens: list[LogprobRows] = field(default_factory=list)
    prompt: list[LogprobRows] = field(default_factory=list)
    num_prompt_rows: int = 0

    def take_prompt(self, first: int, rows: LogprobRows) -> None:
        """Take rows of the prompt's tokens at positions first, first + 1, ...; those that are here are passed by."""
        new = rows[max(0, self.num_prompt_rows + 1 - first) :]
        if len(new):
            self.prompt.append(new)
            self.num_prompt_rows += len(new)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOnTheWay:
    """What a client gets of them. texts: of each id that they name, none without detokenization.

    tokens: of the update's tokens. prompt: of the whole prompt, until the client has a token.
    """

    tokens: LogprobRows | None
    prompt: LogprobRows | None
    texts: TokenTexts


class AnswerLogprobs:
    """The dicts of one answer, as far as it has come."""

    def __init__(self, params: SamplingParams) -> None:
        self._of_tokens: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._of_prompt: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )

    @property
    def num_tokens(self) -> int:
        """How many tokens' dicts are here."""
        return len(self._of_tokens or ())

    @property
    def num_prompt_rows(self) -> int:
        """How many prompt tokens' dicts are here: the first has none."""
        return len(self._of_prompt or (None,)) - 1

    def tokens(self) -> list[TokenLogprobs] | None:
        """One dict a token, as a list of the caller's own; None if they were not asked for."""
        return None if self._of_tokens is None else list(self._of_tokens)

    def prompt(self) -> list[TokenLogprobs | None] | None:
        """One dict a prompt token, None for the first; None if they were not asked for."""
        return None if self._of_prompt is None else list(self._of_prompt)

    def put_tokens(self, first: int, rows: LogprobRows | None, texts: TokenTexts) -> None:
        """Put the rows of an answer's tokens from `first` on in their place; what was there is dropped."""
        if self._of_tokens is not None:
            self._of_tokens[first:] = [] if rows is None else dicts_of(rows, texts)

    def put_prompt(self, first: int, rows: LogprobRows | None, texts: TokenTexts) -> None:
        """Put the rows of the prompt's tokens from `first` on in their place."""
        if self._of_prompt is not None and rows is not None:
            self._of_prompt[first:] = dicts_of(rows, texts)

    def cumulative(self, token_ids: Sequence[int]) -> float | None:
        """The sum over so many of the answer's tokens; None if they were not asked for."""
        if self._of_tokens is None:
            return None
        pairs = zip(token_ids, self._of_tokens, strict=False)
        return sum(logprobs[token_id].logprob for token_id, logprobs in pairs)


def dicts_of(rows: LogprobRows, texts: TokenTexts) -> list[TokenLogprobs]:
    """One dict a row: its own token first, then the best ids, best first."""
    columns = zip(rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), strict=True)
    return [
        {
            token_id: Logprob(logprob, rank, texts.get(token_id))
            for token_id, logprob, rank in zip(*row, strict=True)
        }
        for row in columns
    ]
