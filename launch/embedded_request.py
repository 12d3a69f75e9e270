"""One answer of the embedded engine: what has come of it, and what its caller sees of that.

Filled by whichever thread has the engine, looked at by its own. Owns no queue and no turn (`embedded.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cluster.answer_logprobs import AnswerLogprobs, AnswerRows
from ..cluster.answer_text import AnswerText
from ..cluster.outputs import FINISH_REASON_OF, CompletionOutput, RequestMetrics, RequestOutput
from ..scheduler.extras import LogprobRows
from ..scheduler.front_messages import FinishCode, Submit


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One answer from its submission to its end, as its caller sees it.

    told: how many tokens are in the text, and the text; never changed but as a whole.
    rows: the log-probabilities that have come, never fewer than there are tokens if they were asked for.
    """

    submit: Submit
    prompt: str | None
    prompt_token_ids: list[int]
    answer: AnswerText
    metrics: RequestMetrics | None = None
    token_ids: list[int] = field(default_factory=list)
    told: tuple[int, str] = (0, "")
    cached_tokens: int = 0
    rows: AnswerRows = field(default_factory=AnswerRows)
    logprobs: AnswerLogprobs = field(init=False)
    finish: FinishCode = FinishCode.RUNNING
    error: ValueError | RuntimeError | None = None

    def __post_init__(self) -> None:
        self.logprobs = AnswerLogprobs(self.submit.params)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def finished(self) -> bool:
        return self.finish is not FinishCode.RUNNING

    def take(
        self, token: int, code: FinishCode, now: float, logprobs: LogprobRows | None = None
    ) -> bool:
        """One entry of an outputs message; token is -1 where an end brings none. What comes after the end is dropped.

        logprobs: the token's row, if it was asked for.
        Returns: whether the text came to a stop string: the scheduler, which does not know, is to end the request.
        """
        assert self.metrics is not None, "a request that was never queued has an output"
        if self.finished:
            return False
        if token >= 0:
            if not self.token_ids:
                self.metrics.first_token_time_s = now
            if logprobs is not None:  # first: another thread shows as many as there are tokens
                self.rows.tokens.append(logprobs)
            self.token_ids.append(token)
        if self.answer.searches:
            self._tell(len(self.token_ids), code)
        stopped = self.answer.stop_string is not None
        finish = FinishCode.STOP if stopped else code
        if finish is not FinishCode.RUNNING:
            self.metrics.finished_time_s = now
            self.finish = finish
        return stopped and code is FinishCode.RUNNING

    def output(self) -> RequestOutput:
        """What has come so far. Only here do tokens become text, unless any may be a stop: `generate` pays once."""
        # Another thread's step may bring the next token or the end meanwhile. The end comes after its token: so it is
        # read first, and everything after that speaks of one moment.
        finish = self.finish
        if not self.answer.searches:
            self._tell(len(self.token_ids), finish)
        num_tokens, text = self.told
        logprobs, token_ids = self._logprobs_of(num_tokens), self.token_ids[:num_tokens]
        completion = CompletionOutput(
            index=self.submit.n_index,
            text=text,
            token_ids=token_ids,
            finish_reason=FINISH_REASON_OF.get(finish),
            stop_reason=None if finish is FinishCode.RUNNING else self.answer.stop_reason,
            cumulative_logprob=logprobs.cumulative(token_ids),
            logprobs=logprobs.tokens(),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=completion.finished,
            metrics=self.metrics,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=logprobs.prompt(),
        )

    def _logprobs_of(self, num_tokens: int) -> AnswerLogprobs:
        """The log-probabilities of so many tokens, and of the prompt as far as they have come."""
        shown, rows = self.logprobs, self.rows
        if (first := shown.num_tokens) < num_tokens and rows.tokens:
            new = LogprobRows.join(rows.tokens[first:num_tokens])
            shown.put_tokens(first, new, self.answer.texts_of((new,)))
        if shown.num_prompt_rows < rows.num_prompt_rows:
            prompt = LogprobRows.join(list(rows.prompt))  # another thread may bring more meanwhile
            shown.put_prompt(1, prompt, self.answer.texts_of((prompt,)))
        return shown

    def _tell(self, num_tokens: int, finish: FinishCode) -> None:
        told, text = self.told
        new = self.token_ids[told:num_tokens]
        self.told = num_tokens, text + self.answer.append(new, finish)
