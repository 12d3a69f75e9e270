"""What a caller gets back for one request. Names and meanings follow vLLM's, so that a script ports by its import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..scheduler.front_messages import FinishCode

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASON_OF: dict[FinishCode, FinishReason] = {
    FinishCode.STOP: "stop",
    FinishCode.LENGTH: "length",
    FinishCode.ABORT: "abort",
    FinishCode.ERROR: "error",
}


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the clock of the process that took it in.

    Only differences mean something. A time is None until it has come.
    """

    arrival_time_s: float
    first_token_time_s: float | None = None
    finished_time_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        if self.first_token_time_s is None:
            return None
        return self.first_token_time_s - self.arrival_time_s

    @property
    def total_s(self) -> float | None:
        if self.finished_time_s is None:
            return None
        return self.finished_time_s - self.arrival_time_s


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was at its place: the natural logarithm of its probability.

    rank: how many ids score at least as high; 1 is the best. decoded_token: the token's own text, in which bytes that
        are only part of a character show as U+FFFD; None without detokenization.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Of one place: the token that stands there, and the best ids, by token id."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One answer to a prompt, as far as it has come; `index` tells the n answers apart.

    token_ids: every sampled token, the one that ended the answer too. text: what they say, up to a stop string;
        while the answer runs it may lack the last few, which a later token could change or make a stop string.
    finish_reason: None while it runs; "stop" by an end or stop token or a stop string, "length" by max_tokens or
        max_model_len.
    stop_reason: the stop string or stop token id that ended it, when the caller named it; None for the model's own end.
    logprobs: one dict a token of token_ids, where they were asked for; the token itself comes first, then the best ids,
        best first. cumulative_logprob: the sum over the tokens themselves.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One request and its answers. prompt is None when the caller gave token ids.

    cached_tokens: prompt tokens that were found in the prefix cache and not computed. Settled with the first token.
    prompt_logprobs: one entry a prompt token, where they were asked for; None for the first, which nothing precedes.
        Complete with the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
