"""n answers to one prompt: each is a request of its own to the engine, and one `RequestOutput` to its caller.

Owns what each answer's request asks for and how they are put together again. Whoever submits them gives them one
request_id and one submit key, and tells them apart by `n_index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..scheduler.sampling_params import MAX_SEED, SamplingParams
from .outputs import RequestMetrics, RequestOutput


def params_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """One answer's params for each of `n`. With a seed the answers have seed, seed + 1, ...; else each draws its own.

    The first alone asks for the prompt's log-probabilities.
    Example: n 3 and seed 2**63 - 1 -> seeds 2**63 - 1, 0, 1.
    """
    if params.n == 1:
        return [params]
    seeds = [
        None if params.seed is None else (params.seed + n_index) % (MAX_SEED + 1)
        for n_index in range(params.n)
    ]
    answers = [replace(params, n=1, seed=seed) for seed in seeds]
    # They share the prompt: the first answer's request scores it for all.
    return [answers[0], *(replace(one, prompt_logprobs=None) for one in answers[1:])]


def join(answers: Sequence[RequestOutput]) -> RequestOutput:
    """Put the outputs of one prompt's answers, in order, together. It is finished when all of them are.

    cached_tokens and prompt_logprobs are the first answer's: the others may find the prompt that it has just computed.
    """
    first = answers[0]
    if len(answers) == 1:
        return first
    finished = all(answer.finished for answer in answers)
    return replace(
        first,
        outputs=[output for answer in answers for output in answer.outputs],
        finished=finished,
        metrics=_metrics([answer.metrics for answer in answers], finished),
    )


def _metrics(metrics: Sequence[RequestMetrics | None], finished: bool) -> RequestMetrics | None:
    known = [one for one in metrics if one is not None]
    if not known:
        return None
    firsts = [one.first_token_time_s for one in known if one.first_token_time_s is not None]
    ends = [one.finished_time_s for one in known if one.finished_time_s is not None]
    return RequestMetrics(
        arrival_time_s=min(one.arrival_time_s for one in known),
        first_token_time_s=min(firsts, default=None),
        finished_time_s=max(ends, default=None) if finished else None,
    )
