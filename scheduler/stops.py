"""When a request ends on its own: its form is complete; EOS, then its stop ids, but neither before its min_tokens; then
its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .front_messages import FinishCode
from .request import Request
from .sampling_params import SamplingParams


class StopRules:
    """Finds ended requests without looking at each row.

    suspect: [vocab_size] bool, true for ids that end somebody's request: EOS, and the stop ids of live requests. A step
    gathers it once; only rows that hit it, or reached their length, are looked at one by one.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._eos = frozenset(eos_token_ids)
        self._users: Counter[int] = Counter()
        self.suspect = np.zeros(vocab_size, bool)
        self.suspect[list(self._eos)] = True

    @property
    def num_watched(self) -> int:
        """Count the stop ids that live requests have; 0 once all have ended."""
        return len(self._users)

    def add(self, params: SamplingParams) -> None:
        """Watch for one more request's stop ids."""
        for token in set(params.stop_token_ids):
            self._users[token] += 1
            self.suspect[token] = True

    def remove(self, params: SamplingParams) -> None:
        """Stop watching for a request's stop ids, unless others share them."""
        for token in set(params.stop_token_ids):
            self._users[token] -= 1
            if not self._users[token]:
                del self._users[token]
                self.suspect[token] = token in self._eos

    def finish_code(self, request: Request, token: int, length: int) -> FinishCode:
        """Say whether `token`, which makes the request `length` tokens long, is its last, and why.

        Example: max_tokens 1 and the token is EOS -> STOP, not LENGTH. The ranks choose no end before min_tokens, but
            where allowed_token_ids leaves nothing else.
        """
        params = request.params
        if request.form_is_complete:
            return FinishCode.STOP
        if length - request.num_prompt_tokens >= params.min_tokens:
            if token in self._eos and not params.ignore_eos:
                return FinishCode.STOP
            if token in params.stop_token_ids:
                return FinishCode.STOP
        return FinishCode.LENGTH if length >= request.end_len else FinishCode.RUNNING
