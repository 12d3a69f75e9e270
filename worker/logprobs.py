"""The log-probabilities that a step was asked for: whose, from which rows of the logits, and as what they are reported.

Prompt rows are scored a few at a time, so that a long chunk never has all its logits in memory. What is asked for
follows from the tables (`agreement.asked_of_step`); how it is computed is `sampler/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..scheduler.agreement import Asked, StepPlan, asked_of_step
from ..scheduler.messages import Extras, LogprobRows, RowExtras
from .backend import Backend
from .models.decoder import Decoder
from .parallel import TensorParallelGroup
from .request_states import RequestStates
from .sampler.host_copy import HostCopy
from .sampler.logprobs import Logprobs
from .sampler.sampler import NAN_SCORES

# Of float32 logits at a time, on the rank that has most of them. A few such tensors live at once.
_PIECE_BYTES = 32 * 2**20


class StepScores:
    """What one step was asked for, on its way to the host. Every rank makes the same calls in the same order.

    rows_at_once: prompt rows whose logits are in memory at a time.
    """

    def __init__(
        self, asked: Sequence[Asked], plan: StepPlan, logprobs: Logprobs, *, rows_at_once: int
    ) -> None:
        self._asked = asked
        self._logprobs = logprobs
        self._rows_at_once = rows_at_once
        self._sampled = [one for one in asked if one.num_best is not None]
        # The place of a request among those that sample, whose logits lie in this order.
        places = np.cumsum(plan.samples) - 1
        self._places = places[[one.batch_index for one in self._sampled]]
        self._raw: torch.Tensor | None = None
        self._copies: dict[str, HostCopy] = {}

    def score_prompts(self, decoder: Decoder, hidden: torch.Tensor) -> None:
        """Score the prompt tokens that the step ran up to. Shapes: hidden as `Decoder.forward` returns it."""
        asked = [one for one in self._asked if len(one.targets)]
        if not asked:
            return
        flat = np.concatenate(
            [one.flat_token + np.arange(len(one.targets), dtype=np.int64) for one in asked]
        )
        flat_tokens = _on_device(flat, hidden)
        targets = _on_device(np.concatenate([one.targets for one in asked]), hidden)
        num_best = max(one.num_prompt_best for one in asked)
        pieces = [
            self._logprobs.of(decoder.logits(hidden, piece), of_piece, num_best)
            for piece, of_piece in zip(
                flat_tokens.split(self._rows_at_once),
                targets.split(self._rows_at_once),
                strict=True,
            )
        ]
        self._copies["prompt"] = HostCopy(torch.cat(pieces, dim=1))

    def keep(self, logits: torch.Tensor, *, adjusted: bool) -> None:
        """Take the logits of the rows that sample, before they are adjusted in place.

        Shapes: logits [num_sampling, vocabulary rows of this rank].
        """
        if len(self._places) == len(logits):
            self._raw = logits.clone() if adjusted else logits
        elif len(self._places):
            self._raw = logits.index_select(0, _on_device(self._places, logits))

    def score_sampled(self, tokens: torch.Tensor) -> None:
        """Score what was chosen. Shapes: tokens [num_sampling] int32, on the logits' device."""
        if self._raw is None:
            return
        places = _on_device(self._places, tokens)
        num_best = max(one.num_best or 0 for one in self._sampled)
        scored = self._logprobs.of(self._raw, tokens.index_select(0, places), num_best)
        self._raw = None
        self._copies["sampled"] = HostCopy(scored)

    def ready(self) -> bool:
        """Whether `extras` would return at once."""
        return all(copy.ready() for copy in self._copies.values())

    def extras(self) -> Extras:
        """Wait until they are here.

        Raises: RuntimeError if the scores were NaN.
        """
        of_prompts, of_sampled = self._fetch("prompt"), self._fetch("sampled")
        num_prompt_rows = num_sampled = 0
        extras = {}
        for one in self._asked:
            sampled = prompt = None
            if one.num_best is not None:
                assert of_sampled is not None, "a step that samples scored nothing"
                sampled = of_sampled[num_sampled : num_sampled + 1].best(one.num_best)
                num_sampled += 1
            if len(one.targets):
                assert of_prompts is not None, "a step with prompt tokens scored none"
                end = num_prompt_rows + len(one.targets)
                prompt = of_prompts[num_prompt_rows:end].best(one.num_prompt_best)
                num_prompt_rows = end
            extras[one.batch_index] = RowExtras(logprobs=sampled, prompt_logprobs=prompt)
        return extras

    def _fetch(self, what: str) -> LogprobRows | None:
        if what not in self._copies:
            return None
        ids, bits, ranks = self._copies[what].fetch()
        logprobs = bits.view(np.float32)
        if np.isnan(logprobs).any():
            raise RuntimeError(NAN_SCORES)
        return LogprobRows(token_ids=ids, logprobs=logprobs, ranks=ranks)


def _on_device(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Without waiting for the device: what is not pinned is staged at once."""
    return torch.from_numpy(array).to(like.device, non_blocking=True)


class Scorer:
    """Makes each step's `StepScores`. Shapes: vocab_rows_of_rank as for `Logprobs`."""

    def __init__(
        self,
        vocab_rows_of_rank: tuple[range, ...],
        parallel: TensorParallelGroup,
        backend: Backend,
    ) -> None:
        self._logprobs = Logprobs(vocab_rows_of_rank, parallel, backend)
        longest = max(map(len, vocab_rows_of_rank))  # so that all ranks cut alike
        self.rows_at_once = max(1, _PIECE_BYTES // (4 * longest))

    def of_step(self, requests: RequestStates, plan: StepPlan) -> StepScores | None:
        """What a step is asked for; None if that is nothing. Call it before the step's lengths count."""
        asked = asked_of_step(requests.asking, requests.token_ids, requests.num_prompt_tokens, plan)
        if asked is None:
            return None
        return StepScores(asked, plan, self._logprobs, rows_at_once=self.rows_at_once)
