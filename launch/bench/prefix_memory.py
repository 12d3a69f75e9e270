"""A KV cache without numbers: each slot remembers which prefix was computed there; reading another one is a fault.

Stands where a rank's cache would, behind the real block tables. What the attention of a token may see is asked slot by
slot: a cached block of another prefix, a window block that was reused too early, a block that two rows write, a stale
table cell: each is named at the read that would have been wrong. The windows are spelled out here once more, on
purpose: a checker that shared the scheduler's arithmetic would share its faults.
"""

from __future__ import annotations

import numpy as np

from ...scheduler.agreement import StepPlan
from ...scheduler.kv_groups import AttentionKind, KVGroupSpec
from ...worker.block_tables import ragged_cells
from ...worker.state import WorkerState

_WEIGHT = np.uint64(6364136223846793005)  # odd: no token's place loses a bit modulo 2**64
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15)


class Violation(AssertionError):
    """A rule that must hold after every step does not; the sentence says which, where, and what was found."""


def first_seen(spec: KVGroupSpec, positions: np.ndarray) -> np.ndarray:
    """Name the first position that a token at each of `positions` [n] sees in a group of this kind.

    Example: window 4, position 9 -> 6 sliding (6..9), 8 chunked (8..9).
    """
    if spec.kind is AttentionKind.SLIDING_WINDOW:
        return np.maximum(positions - spec.window + 1, 0)
    if spec.kind is AttentionKind.CHUNKED:
        return positions - positions % spec.window
    return np.zeros_like(positions)


class PrefixMemory:
    """The slots of one rank's pool, all groups in one memory as in the real one.

    Shapes: slots [num_blocks, largest block_size] uint64, 0 where nothing was written; prefixes [max_num_seqs,
        max_model_len] uint64: a hash of each row's tokens up to and including each position that has a token.
    probes: how many positions each row reads of a step, beside the first that it sees; None reads all.
    """

    def __init__(self, state: WorkerState, *, probes: int | None = None) -> None:
        self._state = state
        self._probes = probes
        self._random = np.random.default_rng(0)
        self.slots = np.zeros(
            (state.num_blocks, max(spec.block_size for spec in state.groups)), np.uint64
        )
        self.prefixes = np.zeros((state.max_num_seqs, state.max_model_len), np.uint64)
        self._weights = np.cumprod(np.full(state.max_model_len, _WEIGHT))

    def admit(self, rows: np.ndarray) -> None:
        """Learn the tokens of rows that were just admitted."""
        requests = self._state.requests
        for row in rows.tolist():
            length = int(requests.num_tokens[row])
            terms = self._terms(requests.token_ids[row, :length], slice(0, length))
            self.prefixes[row, :length] = np.cumsum(terms)

    def run(self, plan: StepPlan) -> None:
        """Write what the step computes, then read what its tokens see: each layer writes before it attends.

        Call it after `state.apply`, before `state.commit`.
        Raises: Violation.
        """
        rows = plan.index_mapping
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        written = ragged_cells(rows, plan.num_scheduled_tokens, plan.num_computed_tokens)
        for group in range(len(self._state.groups)):
            self._write(group, *written)
        self._no_slot_twice(*written)
        for group, spec in enumerate(self._state.groups):
            first = first_seen(spec, plan.num_computed_tokens)
            self._read(group, *self._cells_to_read(rows, first, ends))

    def append(self, plan: StepPlan, tokens: np.ndarray) -> None:
        """Learn the tokens that a step sampled, [num_reqs], where plan.samples is true."""
        rows = plan.index_mapping[plan.samples]
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens)[plan.samples]
        terms = self._terms(tokens[plan.samples], ends)
        self.prefixes[rows, ends] = self.prefixes[rows, ends - 1] + terms

    def _terms(self, tokens: np.ndarray, places: np.ndarray | slice) -> np.ndarray:
        return self._weights[places] * (tokens.astype(np.uint64) + np.uint64(1))

    def _content(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """What a group's slot holds for each token: another group's keys are other keys."""
        return (self.prefixes[rows, positions] ^ np.uint64(group + 1)) * _MULTIPLIERS

    def _places(
        self, group: int, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        block_size = self._state.groups[group].block_size
        block_ids = self._state.block_tables.table[group][rows, positions // block_size]
        return block_ids, positions % block_size

    def _write(self, group: int, rows: np.ndarray, positions: np.ndarray) -> None:
        block_ids, offsets = self._places(group, rows, positions)
        self._refuse(
            block_ids == 0, group, rows, positions, block_ids, "would be written to the null block"
        )
        self.slots[block_ids, offsets] = self._content(group, rows, positions)

    def _no_slot_twice(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Two tokens of one step in one slot: a read need not notice, if both happen to be the same prefix."""
        width = self.slots.shape[1]
        places = [self._places(group, rows, positions) for group in range(len(self._state.groups))]
        slots = np.concatenate([ids.astype(np.int64) * width + offsets for ids, offsets in places])
        if len(np.unique(slots)) != len(slots):
            ids, counts = np.unique(slots, return_counts=True)
            raise Violation(f"slots {ids[counts > 1][:4].tolist()} are written twice in one step")

    def _cells_to_read(
        self, rows: np.ndarray, first: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._probes is None:
            return ragged_cells(rows, ends - first, first)
        probes = self._random.integers(
            first[:, None], ends[:, None], (len(rows), self._probes), np.int64
        )
        return np.repeat(rows, self._probes + 1), np.column_stack((first, probes)).ravel()

    def _read(self, group: int, rows: np.ndarray, positions: np.ndarray) -> None:
        block_ids, offsets = self._places(group, rows, positions)
        wrong = self.slots[block_ids, offsets] != self._content(group, rows, positions)
        self._refuse(wrong, group, rows, positions, block_ids, "holds another prefix")

    def _refuse(
        self,
        wrong: np.ndarray,
        group: int,
        rows: np.ndarray,
        positions: np.ndarray,
        block_ids: np.ndarray,
        what: str,
    ) -> None:
        if not wrong.any():
            return
        i = int(np.argmax(wrong))
        raise Violation(
            f"{self._state.requests.describe(int(rows[i]))}: position {positions[i]} of KV group {group}, "
            f"block {block_ids[i]}, {what} ({int(wrong.sum())} of {len(wrong)} positions of the step)"
        )
