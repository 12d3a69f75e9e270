"""The persistent table of live requests, one row each: lengths, token ids, sampling params.

Owns what this rank remembers of a request beyond its KV blocks (`block_tables.py`). Checks nothing: `state.py` checks a
whole step before it calls in here. A row is filled whole when a request is admitted and cleared when it leaves, so that
nothing of an earlier request can show through; freed rows are never moved or compacted.
"""

from __future__ import annotations

import numpy as np

from ..scheduler.messages import Admissions

# Every scalar column: its dtype and what a free row holds. A new column is added here and declared in __init__.
_COLUMNS = {
    "live": (np.bool_, False),
    "num_tokens": (np.int32, 0),
    "num_computed_tokens": (np.int32, 0),
    "num_prompt_tokens": (np.int32, 0),
    "temperature": (np.float32, 0.0),
    "top_p": (np.float32, 1.0),
    "top_k": (np.int32, 0),
    "seeds": (np.int64, 0),
}
# Which column of an admission fills it, where the two have other names; live has no source.
_SOURCE_OF = {"num_computed_tokens": "num_cached_tokens"}


class RequestStates:
    """Struct of arrays; index is the row.

    Shapes: token_ids [max_num_seqs, max_model_len] int32, 0 beyond num_tokens; request_ids max_num_seqs strings, None
        for a free row; all others [max_num_seqs].
    live, num_tokens and num_computed_tokens are what `scheduler.agreement.Lengths` asks for. num_tokens counts prompt
        and outputs, num_prompt_tokens the prompt alone.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.live: np.ndarray
        self.num_tokens: np.ndarray
        self.num_computed_tokens: np.ndarray
        self.num_prompt_tokens: np.ndarray
        self.temperature: np.ndarray
        self.top_p: np.ndarray
        self.top_k: np.ndarray
        self.seeds: np.ndarray
        for name, (dtype, free_value) in _COLUMNS.items():
            setattr(self, name, np.full(max_num_seqs, free_value, dtype))
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.request_ids: list[str | None] = [None] * max_num_seqs

    def add(self, admissions: Admissions) -> None:
        """Fill one row per admission, every column of it and the whole width of its token ids."""
        rows = admissions.rows
        for name in _COLUMNS:
            column = getattr(self, name)
            if name == "live":
                column[rows] = True
            else:
                column[rows] = getattr(admissions, _SOURCE_OF.get(name, name))
        ends = np.cumsum(admissions.num_tokens)
        for row, request_id, end, length in zip(
            rows.tolist(),
            admissions.request_ids,
            ends.tolist(),
            admissions.num_tokens.tolist(),
            strict=True,
        ):
            self.token_ids[row, :length] = admissions.token_ids[end - length : end]
            self.token_ids[row, length:] = 0
            self.request_ids[row] = request_id

    def remove(self, rows: np.ndarray) -> None:
        """Clear rows [n]: every column goes back to what a free row holds."""
        for row in rows.tolist():
            self.token_ids[row, : self.num_tokens[row]] = 0
            self.request_ids[row] = None
        for name, (_, free_value) in _COLUMNS.items():
            getattr(self, name)[rows] = free_value

    def describe(self, row: int) -> str:
        """Name a row for an error: `row 5 (request 'chat-17')`."""
        request_id = self.request_ids[row]
        return f"row {row} (free)" if request_id is None else f"row {row} (request {request_id!r})"
