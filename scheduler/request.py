"""One request, and the table of those that hold a row: token ids, lengths, status.

Owns what the scheduler remembers of a request. Decides nothing: `scheduler.py` and `policy.py` do.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from .agreement import RowColumns
from .features import Features
from .sampling_params import SamplingParams

NO_END = np.iinfo(np.int32).max  # end_len of a row that nobody holds: no length ever reaches it


class RequestStatus(Enum):
    COMPILING = auto()  # not queued yet: the form that its answer must have is being compiled
    WAITING = auto()  # holds no row; new, or preempted
    RUNNING = auto()  # holds a row
    ENDING = auto()  # its last token by length is in flight; its row is already given back
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request, from the door to its end. Compared by identity.

    features: what it asks of sampling beyond numbers, if anything.
    tokens: [n] int32, prompt and settled outputs, the truth while the request holds no row; the table's row is while it
        runs.
    end_len: tokens (prompt and outputs) at which it ends by length.
    priority: small is urgent. user: who shares fairly with others. cache_salt: whose cached prefixes it may hit.
    generation: number of its latest admission, 0 before the first. A record names a row's occupant by it.
    num_in_flight: unsettled steps that ran it before it gave its row back; it is not resumed before they settled.
    chain_root, hashes: its prefix-cache names, one a full base block of its tokens, as far as they were made.
    form_is_complete: whether its answer has the form that was asked for, so that nothing may follow.
    held_blocks: by KV group, what it still holds without a row (ENDING): to be named when its last step has settled.
    """

    front: Hashable
    number: int
    key: tuple[bytes, int]
    request_id: str
    seed: int
    params: SamplingParams
    num_prompt_tokens: int
    end_len: int
    tokens: np.ndarray
    features: Features | None = None
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    arrival: int = 0
    front_index: int = 0
    user_index: int = 0
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    generation: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
    chain_root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    held_blocks: tuple[np.ndarray, ...] = ()
    form_is_complete: bool = False

    @property
    def owes_prompt_rows(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be delivered: they are computed, cached or not."""
        features = self.features
        return (
            features is not None
            and features.prompt_logprobs is not None
            and features.prompt_logprobs_from < self.num_prompt_tokens
        )


class RequestTable:
    """The rows: one column an attribute, one row a running request.

    Shapes: token_ids [max_num_seqs, max_model_len] int32, and token_cells the same memory flat, which NumPy scatters to
        twice as fast; everything else [max_num_seqs]. num_settled_tokens, num_cached_tokens, end_len, front_index,
        priority, user_index int32; generation, number, arrival int64; the others as in `RowColumns`.
    num_tokens counts tokens that issued steps are still sampling, num_settled_tokens only those that came back and
    stand in token_ids, which holds 0 beyond them. num_cached_tokens were not computed by this occupant. A vacant row
    has no tokens, generation 0 (which nobody has) and an end_len that is never reached.
    version: changes with every occupant that comes or goes.
    asking: by row, the features of those that ask for log-probabilities.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.columns = columns = RowColumns(max_num_seqs)
        self.live, self.seeds = columns.live, columns.seeds
        self.num_tokens = columns.num_tokens
        self.num_computed_tokens = columns.num_computed_tokens
        self.num_prompt_tokens = columns.num_prompt_tokens
        self.num_settled_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_cached_tokens = np.zeros(max_num_seqs, np.int32)
        self.end_len = np.full(max_num_seqs, NO_END, np.int32)
        self.front_index = np.zeros(max_num_seqs, np.int32)
        self.generation = np.zeros(max_num_seqs, np.int64)
        self.number = np.zeros(max_num_seqs, np.int64)
        self.arrival = np.zeros(max_num_seqs, np.int64)
        self.priority = np.zeros(max_num_seqs, np.int32)
        self.user_index = np.zeros(max_num_seqs, np.int32)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.token_cells = self.token_ids.reshape(-1)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.asking: dict[int, Features] = {}
        self.num_live = 0
        self.version = 0

    def occupant(self, row: int) -> Request:
        """Name the request that holds a row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is vacant"
        return request

    def occupy(self, row: int, request: Request, num_cached_tokens: int = 0) -> None:
        """Give a vacant row to a request, of which nothing is computed but the cached tokens."""
        assert self.requests[row] is None, f"row {row} is held by {self.occupant(row).request_id}"
        length, params = len(request.tokens), request.params
        columns = self.columns
        self.live[row] = True
        self.num_tokens[row] = length
        self.num_settled_tokens[row] = length
        self.num_computed_tokens[row] = num_cached_tokens
        self.num_cached_tokens[row] = num_cached_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.end_len[row] = request.end_len
        self.front_index[row] = request.front_index
        self.generation[row] = request.generation
        self.number[row] = request.number
        self.arrival[row] = request.arrival
        self.priority[row] = request.priority
        self.user_index[row] = request.user_index
        self.seeds[row] = request.seed
        columns.temperature[row] = params.temperature
        columns.top_p[row] = params.top_p
        columns.top_k[row] = params.top_k
        columns.min_p[row] = params.min_p
        columns.presence_penalty[row] = params.presence_penalty
        columns.frequency_penalty[row] = params.frequency_penalty
        columns.repetition_penalty[row] = params.repetition_penalty
        columns.features[row] = 0 if request.features is None else request.features.checksum
        if request.features is not None and request.features.asks:
            self.asking[row] = request.features
        self.token_ids[row, :length] = request.tokens
        self.requests[row] = request
        self.num_live += 1
        self.version += 1

    def save_tokens(self, row: int) -> None:
        """Let a row's occupant keep the tokens that settled, before it loses the row."""
        self.occupant(row).tokens = self.token_ids[row, : self.num_settled_tokens[row]].copy()

    def vacate(self, rows: list[int]) -> None:
        """Take rows back."""
        for row in rows:
            self.token_ids[row, : self.num_settled_tokens[row]] = 0
            self.asking.pop(row, None)
            self.occupant(row).row = -1
            self.requests[row] = None
        at = np.array(rows)
        self.columns.clear(at)
        self.num_settled_tokens[at] = 0
        self.generation[at] = 0
        self.end_len[at] = NO_END
        self.num_live -= len(rows)
        self.version += 1
