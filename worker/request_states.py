"""The persistent table of live requests, one row each: lengths, token ids, sampling params.

Owns what this rank remembers of a request beyond its KV blocks (`block_tables.py`). Checks nothing: `state.py` checks a
whole step before it calls in here. A row is filled whole when a request is admitted and cleared when it leaves, so that
nothing of an earlier request can show through; freed rows are never moved or compacted.
"""

from __future__ import annotations

import numpy as np

from ..scheduler.agreement import RowColumns
from ..scheduler.messages import Admissions, Features

_NO_PENALTIES = np.array([[0], [0], [1]], np.float32)  # presence, frequency, repetition


class RequestStates:
    """Struct of arrays; index is the row.

    Shapes: token_ids [max_num_seqs, max_model_len] int32, 0 beyond num_tokens; request_ids max_num_seqs strings, None
        for a free row; all others [max_num_seqs], 0 in a free row. columns: all others, as the digest reads them.
    features, penalized, asking: what few rows ask of the logits, which rows have a penalty, and which ask for
        log-probabilities. Most of the time all are empty, and nobody looks at any row.
    live, num_tokens and num_computed_tokens are what `scheduler.agreement.Lengths` asks for. num_tokens counts prompt
        and outputs, num_prompt_tokens the prompt alone.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.columns = columns = RowColumns(max_num_seqs)
        self.live = columns.live
        self.num_tokens = columns.num_tokens
        self.num_computed_tokens = columns.num_computed_tokens
        self.num_prompt_tokens = columns.num_prompt_tokens
        self.temperature = columns.temperature
        self.top_p = columns.top_p
        self.top_k = columns.top_k
        self.min_p = columns.min_p
        self.presence_penalty = columns.presence_penalty
        self.frequency_penalty = columns.frequency_penalty
        self.repetition_penalty = columns.repetition_penalty
        self.feature_checksums = columns.features
        self.seeds = columns.seeds
        self.features: dict[int, Features] = {}
        self.asking: dict[int, Features] = {}
        self.penalized: set[int] = set()
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.request_ids: list[str | None] = [None] * max_num_seqs

    def add(self, admissions: Admissions) -> None:
        """Fill one row per admission, every column of it and the whole width of its token ids."""
        rows = admissions.rows.astype(np.intp)
        self.live[rows] = True
        self.columns.admitted[:, rows] = admissions.numbers
        self.seeds[rows] = admissions.seeds
        self.feature_checksums[rows] = 0
        start = 0
        for row, request_id, features, length in zip(
            rows.tolist(),
            admissions.request_ids,
            admissions.features,
            admissions.num_tokens.tolist(),
            strict=True,
        ):
            self.token_ids[row, :length] = admissions.token_ids[start : start + length]
            self.token_ids[row, length:] = 0
            self.request_ids[row] = request_id
            start += length
            self._forget(row)
            if features is not None:
                self._add_features(row, features)
        penalties = admissions.reals[3:]
        if not (penalties == _NO_PENALTIES).all():
            has_penalty = (penalties != _NO_PENALTIES).any(axis=0)
            self.penalized.update(rows[has_penalty].tolist())

    def _add_features(self, row: int, features: Features) -> None:
        if features.adjusts:
            self.features[row] = features
        if features.asks:
            self.asking[row] = features
        self.feature_checksums[row] = features.checksum

    def _forget(self, row: int) -> None:
        """Drop what few rows ask for."""
        self.features.pop(row, None)
        self.asking.pop(row, None)
        self.penalized.discard(row)

    def remove(self, rows: np.ndarray) -> None:
        """Clear rows [n]: every column goes back to what a free row holds."""
        for row in rows.tolist():
            self.token_ids[row, : self.num_tokens[row]] = 0
            self.request_ids[row] = None
            self._forget(row)
        self.columns.clear(rows)

    def describe(self, row: int) -> str:
        """Name a row for an error: `row 5 (request 'chat-17')`."""
        request_id = self.request_ids[row]
        return f"row {row} (free)" if request_id is None else f"row {row} (request {request_id!r})"
