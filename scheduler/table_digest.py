"""The digest by which scheduler and ranks notice that they no longer hold, run or sample the same.

Owns what is folded, and how; `agreement.py` hands it on. Compares nothing but eight bytes a rank, changes no table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .kv_groups import AttentionKind, KVGroupSpec, first_needed_block

if TYPE_CHECKING:
    from .agreement import StepPlan

DIGEST_BYTES = 8
_PERIOD = 16  # a row's stored values are folded in one of this many steps
_MASK = 2**64 - 1
_CHAIN = 0x9E3779B97F4A7C15  # odd: what a step folds never loses a difference that an earlier one brought in
_BYTES = 0xAEF17502108EF2D9
_all_weights = np.empty(0, np.uint64)


class DigestedTable(Protocol):
    """The per-row columns that the digest covers; both sides' tables have them.

    Shapes: [max_num_seqs] int32, or as said: live bool; seeds int64; temperature and top_p float32; token_ids
        [max_num_seqs, max_model_len], 0 beyond a live row's tokens. What a row that is not live holds does not matter.
    """

    live: np.ndarray
    num_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids: np.ndarray
    seeds: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray


class TableDigest:
    """Folds one side's step and tables into eight bytes, in a chain over all steps of a life of the group.

    Call, for every step: `begin` with its plan, after its frees, admissions and growth and before its lengths count;
    `end` with the bytes of its frame; `sampled` with its tokens as soon as they are known, in step order.

    Folded in each step: the frame; index_mapping; query_start_loc; the tokens of step - depth; and of the live rows `i`
    with `i % 16 == step % 16` lengths, prompt length, sampling params, seed, the token ids that both sides must know
    by now, and per group how many blocks the row holds and the ids of those that attention may still read. One value
    that differs always changes the digest of its step, and so of every later one; several that differ do, but for
    chances of about 2**-59.

    What it cannot tell: with two ranks, whether rank 0 reported (and stored) a token that it did not sample. The
    scheduler knows rank 0's word alone, so rank 1 is the one that differs then. With three and more, all others differ.

    table, num_blocks and block_ids are referred to, never copied: they must stay the same arrays.
    Shapes: num_blocks by group [max_num_seqs] int32; block_ids by group [max_num_seqs, max_blocks] int32, 0 beyond a
        live row's blocks; what lies left of a window does not matter.
    """

    def __init__(
        self,
        table: DigestedTable,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        groups: Sequence[KVGroupSpec],
        *,
        depth: int,
    ) -> None:
        self._depth = depth
        max_num_seqs = len(table.live)
        self._parts = [
            _RowPart(table, num_blocks, block_ids, groups, range(first, max_num_seqs, _PERIOD))
            for first in range(min(_PERIOD, max_num_seqs))
        ]
        self._sampled: deque[np.ndarray] = deque()
        self._step = 0
        self._value = 0

    def begin(self, plan: StepPlan) -> None:
        """Fold everything of a step but its frame."""
        batch = plan.batch
        lists = [batch.index_mapping, batch.query_start_loc]
        if self._step >= self._depth and self._sampled:
            lists.append(self._sampled.popleft())
        self._add(len(batch.index_mapping))
        self._add(_fold(np.concatenate(lists).tobytes()))
        if (part := self._step % _PERIOD) < len(self._parts):
            self._add(self._parts[part].fold(self._depth))
        self._step += 1

    def end(self, frame: bytes) -> int:
        """Fold the frame's bytes; returns this step's digest, in [0, 2**64)."""
        self._add(_fold(frame))
        return self._value

    def sampled(self, tokens: np.ndarray) -> None:
        """Keep a step's tokens [num_reqs] int32, -1 where a row did not sample, until their turn. Not copied."""
        self._sampled.append(tokens)

    def _add(self, value: int) -> None:
        self._value = (self._value * _CHAIN + value) & _MASK


class _RowPart:
    """Every 16th row of the tables, as views. In shapes, n is how many those are; sums are of weighted values.

    Rows are summed whole, not up to their lengths: it takes a third of the time, and what lies beyond is 0.
    """

    def __init__(
        self,
        table: DigestedTable,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        groups: Sequence[KVGroupSpec],
        rows: range,
    ) -> None:
        part = slice(rows.start, rows.stop, rows.step)
        self._num_rows = len(rows)
        self._live = table.live[part]
        self._num_tokens = table.num_tokens[part]
        self._num_computed = table.num_computed_tokens[part]
        self._num_prompt = table.num_prompt_tokens[part]
        halves_of_seeds = table.seeds[part, None].view(np.uint32)
        self._columns = [
            np.ones(len(rows), np.uint32),  # that the row is live
            halves_of_seeds[:, 0],
            halves_of_seeds[:, 1],
            *(
                column.view(np.uint32)
                for column in (
                    self._num_tokens,
                    self._num_computed,
                    self._num_prompt,
                    table.top_k[part],
                    table.temperature[part],
                    table.top_p[part],
                    *(held[part] for held in num_blocks),
                )
            ),
        ]
        # Two ids are summed as one word, where a row is a whole number of words.
        self._ids_per_word = 1 if table.token_ids.shape[1] % 2 else 2
        self._token_ids = table.token_ids[part].view(np.uint32)
        self._token_words = self._token_ids.view(
            np.uint64 if self._ids_per_word == 2 else np.uint32
        )
        # What an id of each place weighs within a word.
        num_words = self._token_words.shape[1]
        self._id_weights = np.repeat(_weights(num_words), self._ids_per_word)
        self._id_weights[1 :: self._ids_per_word] <<= np.uint64(32 * (self._ids_per_word - 1))
        self._all_ids = table.token_ids.reshape(-1).view(np.uint32)
        self._row_starts = np.arange(rows.start, rows.stop, rows.step) * table.token_ids.shape[1]
        # Groups that see alike are folded together: their spec, counts, and the block ids of each.
        alike: dict[tuple[AttentionKind, int, int], list[int]] = {}
        for group, spec in enumerate(groups):
            alike.setdefault((spec.kind, spec.window, spec.block_size), []).append(group)
        self._blocks = [
            (
                groups[same[0]],
                num_blocks[same[0]][part],
                [block_ids[group][part].view(np.uint32) for group in same],
            )
            for same in alike.values()
        ]

    def fold(self, depth: int) -> int:
        """One number for everything that is stored of these rows, not reduced."""
        sums = self._sums_of_columns()
        sums += self._sums_of_tokens(depth)
        for index, of_blocks in enumerate(self._blocks):
            sums += self._sums_of_blocks(*of_blocks) * _weights(index + 40)[-1]
        sums *= self._live
        return int(np.dot(sums, _weights(self._num_rows)))

    def _sums_of_columns(self) -> np.ndarray:
        """[n] uint64, over lengths, params, seed and counts of blocks."""
        values = np.concatenate(self._columns).astype(np.uint64)
        return np.dot(_weights(len(self._columns)), values.reshape(-1, self._num_rows))

    def _sums_of_tokens(self, depth: int) -> np.ndarray:
        """[n] uint64, over the token ids that both sides know."""
        longest = max(0, int(self._num_tokens.max()))
        words = self._token_words[:, : -(-longest // self._ids_per_word)]
        sums = np.dot(words.astype(np.uint64, copy=False), _weights(words.shape[1]))
        # The last depth - 1 outputs of a row may be known to the workers alone: taken out again.
        for back in range(1, depth):
            places = self._num_tokens - back
            ids = self._all_ids.take(self._row_starts + places, mode="clip")
            weights = self._id_weights.take(places, mode="clip")
            weights *= places >= self._num_prompt  # a prompt is known whole
            sums -= ids * weights
        return sums

    def _sums_of_blocks(
        self, spec: KVGroupSpec, held: np.ndarray, block_ids: list[np.ndarray]
    ) -> np.ndarray:
        """[n] uint64, over the block ids of all groups that see alike."""
        width = min(max(0, int(held.max())), block_ids[0].shape[1])
        if len(block_ids) == 1:
            cells = block_ids[0][:, :width].astype(np.uint64)
        else:
            cells = np.concatenate([ids[:, :width] for ids in block_ids]).astype(np.uint64)
            cells = cells.reshape(len(block_ids), self._num_rows, width)
        if spec.kind is not AttentionKind.FULL:
            first = first_needed_block(spec, self._num_computed)
            cells *= np.arange(width) >= first[:, None]
        sums = np.dot(cells, _weights(width))
        return sums if len(block_ids) == 1 else np.dot(_weights(len(sums)), sums)


def _fold(data: bytes) -> int:
    """Any difference of length or content gives another number, not reduced."""
    count = len(data) // 8
    weights = _weights(count + 1)
    total = len(data) * _BYTES + int.from_bytes(data[8 * count :], "little") * int(weights[count])
    if count:
        total += int(np.dot(np.frombuffer(data, np.uint64, count), weights[:count]))
    return total


def _weights(count: int) -> np.ndarray:
    """The first `count` of an endless row of odd numbers: [count] uint64. An odd factor mod 2**64 loses nothing.

    Source: splitmix64's finalizer (Steele, Lea, Flood, 2014) of 1, 2, 3, ..., with the lowest bit set.
    """
    global _all_weights
    if count > len(_all_weights):
        z = np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(_CHAIN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        _all_weights = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return _all_weights[:count]


def disagreement(expected: int, digests: bytes) -> str | None:
    """Compare the digests of a step, 8 bytes a rank in rank order, with the scheduler's; None if all are the same.

    Returns: who differs, for a sentence: `rank 1 disagrees with the scheduler`.
    """
    values = np.frombuffer(digests, "<u8")
    wrong = np.flatnonzero(values != np.uint64(expected)).tolist()
    if not wrong:
        return None
    if len(wrong) == 1:
        return f"rank {wrong[0]} disagrees with the scheduler"
    names = f"{', '.join(map(str, wrong[:-1]))} and {wrong[-1]}"
    one = len(wrong) == len(values) and (values == values[0]).all()
    return f"ranks {names} disagree with the scheduler" + (
        ", though not among themselves" if one else ""
    )
