"""Who gets log-probabilities of the steps that have not settled, and what is delivered of them.

Rows go with their token: where that is dropped, so are they. Rows of a prompt's tokens are delivered once, whoever
computes them again after a preemption. Empty, and asked nothing, while nobody asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .agreement import Asked, StepPlan, asked_of_step
from .deliveries import Deliveries
from .extras import Extras, LogprobRows, PromptRows, check_extras
from .request import Request, RequestStatus, RequestTable

Askings = Sequence[tuple[Asked, Request]]


class Askers:
    """Steps are known by their number, counted from 0."""

    def __init__(self, table: RequestTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._of_step: dict[int, Askings] = {}

    def __len__(self) -> int:
        """Count the unsettled steps of which anything is expected."""
        return len(self._of_step)

    def issue(self, step: int, plan: StepPlan) -> None:
        """Note who gets what of a step that is being issued."""
        table = self._table
        asked = asked_of_step(table.asking, table.token_ids, table.num_prompt_tokens, plan)
        if asked is not None:
            self._of_step[step] = [(one, table.occupant(one.row)) for one in asked]

    def take(self, step: int, extras: Extras | None, tokens: np.ndarray) -> Askings:
        """Check what came of a step, before a token of it is taken in, and say who is to get it.

        Raises: ProtocolError if it is not what the step was asked for.
        """
        askings = self._of_step.get(step, ())
        check_extras(extras, [asked for asked, _ in askings], tokens, self._vocab_size)
        self._of_step.pop(step, None)
        # Who has ended gets no rows of his prompt; who ends by this step's token does.
        return [
            (asked, request)
            for asked, request in askings
            if request.status is not RequestStatus.FINISHED
        ]


def with_extras(deliveries: Deliveries, askings: Askings, extras: Extras) -> Deliveries:
    """Put the rows to the tokens of a step that are delivered. Notes at each request how far its prompt has come."""
    if not askings:
        return deliveries
    entries = zip(
        deliveries.front_index.tolist(),
        deliveries.numbers.tolist(),
        deliveries.tokens.tolist(),
        strict=True,
    )
    place_of = {
        (front, number): p for p, (front, number, token) in enumerate(entries) if token >= 0
    }
    logprobs: dict[int, LogprobRows] = {}
    of_prompts: list[tuple[int, PromptRows]] = []
    for asked, request in askings:
        one = extras[asked.batch_index]
        place = place_of.get((request.front_index, request.number))
        if one.logprobs is not None and place is not None:
            logprobs[place] = one.logprobs
        if one.prompt_logprobs is not None:
            rows = PromptRows(request.number, asked.first, one.prompt_logprobs)
            of_prompts.append((request.front_index, rows))
            assert request.features is not None, request.request_id
            assert request.features.prompt_logprobs_from == asked.first, request.request_id
            request.features = dataclasses.replace(
                request.features, prompt_logprobs_from=asked.first + len(asked.targets)
            )
    return dataclasses.replace(deliveries, logprobs=logprobs, prompt_logprobs=tuple(of_prompts))
