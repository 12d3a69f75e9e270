"""The digest by which scheduler and ranks notice that they no longer hold, run or sample the same.

Owns what is folded, and how; `agreement.py` hands it on. Compares nothing but eight bytes a rank, changes no table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from .kv_groups import AttentionKind, KVGroupSpec, first_needed_block

if TYPE_CHECKING:
    from .agreement import StepPlan

DIGEST_BYTES = 8
_PERIOD = 16  # a row's stored values are folded in one of this many steps
_MASK = 2**64 - 1
_CHAIN = 0x9E3779B97F4A7C15  # odd: what a step folds never loses a difference that an earlier one brought in
_BYTES = 0xAEF17502108EF2D9
_HELD = np.uint64(0xD1342543DE82EF95)
_NO_WORDS = np.empty(0, np.uint64)
_all_weights = _NO_WORDS


class RowColumns:
    """What scheduler and workers both hold of each row, in one piece of memory: the digest folds all of it every step.

    A row that nobody holds has 0 in every column, on both sides.
    Shapes: all [max_num_seqs]; live bool, seeds int64, temperature, top_p, min_p and the penalties float32, the others
    int32; words uint64, all of them behind each other. features is the checksum of what cannot be a column. admitted
    [10, max_num_seqs] int32: the columns that an admission fills, line by line as `Admissions.numbers`.
    """

    def __init__(self, max_num_seqs: int) -> None:
        size = max_num_seqs
        self.words = np.zeros(-(-53 * size // 8), np.uint64)
        memory = self.words.view(np.uint8)
        self.seeds = memory[: 8 * size].view(np.int64)
        self._narrow = memory[8 * size : 52 * size].view(np.int32).reshape(11, size)
        self.num_tokens, self.num_computed_tokens, self.num_prompt_tokens = self._narrow[:3]
        self.top_k = self._narrow[3]
        reals = self._narrow[4:10].view(np.float32)
        self.temperature, self.top_p, self.min_p = reals[:3]
        self.presence_penalty, self.frequency_penalty, self.repetition_penalty = reals[3:]
        self.admitted, self.features = self._narrow[:10], self._narrow[10]
        self.live = memory[52 * size : 53 * size].view(bool)

    def clear(self, rows: np.ndarray) -> None:
        """Empty rows."""
        self.live[rows] = False
        self.seeds[rows] = 0
        self._narrow[:, rows] = 0


class TableDigest:
    """Folds one side's step and tables into eight bytes, in a chain over all steps of a life of the group.

    Call, for every step: `begin` with its plan, after its frees, admissions and growth and before its lengths count;
    `end` with the bytes of its frame, and again with those of its mask's if it waits for one; `sampled` with its tokens
    as soon as they are known, in step order.

    Folded in each step: the frame; index_mapping; query_start_loc; the tokens of step - depth; of all rows lengths,
    sampling params and seed; and of the rows `i` with `i % 16 == step % 16` the token ids that both sides must know by
    now, how many blocks they hold, and the ids of those that attention may still read. One value that differs
    always changes the digest of its step, and so of every later one; several that differ do, but for chances of about
    2**-59, and 2**-32 within a frame's bytes.

    What it cannot tell: with two ranks, whether rank 0 reported (and stored) a token that it did not sample. The
    scheduler knows rank 0's word alone, so rank 1 is the one that differs then. With three and more, all others differ.
    And a block id that went wrong and left its window again before its row had its turn is never seen: the scheduler
    has let go of it by then.

    columns, token_ids, num_blocks and block_ids are referred to, never copied: they must stay the same arrays.
    Shapes, int32: token_ids [max_num_seqs, max_model_len]; num_blocks by group [max_num_seqs]; block_ids by group
        [max_num_seqs, max_blocks]. What lies beyond a row's tokens and blocks is 0; what lies left of a window does not
        matter. Groups of one block size hold as many blocks.
    """

    def __init__(
        self,
        columns: RowColumns,
        token_ids: np.ndarray,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        groups: Sequence[KVGroupSpec],
        *,
        depth: int,
    ) -> None:
        self._depth = depth
        self._columns = columns.words
        max_num_seqs = len(token_ids)
        self._parts = [
            _RowPart(
                columns,
                token_ids,
                num_blocks,
                block_ids,
                groups,
                range(first, max_num_seqs, _PERIOD),
            )
            for first in range(min(_PERIOD, max_num_seqs))
        ]
        self._sampled: deque[np.ndarray] = deque()
        self._step = 0
        self._value = 0

    def begin(self, plan: StepPlan) -> bytes:
        """Fold everything of a step but its frame; returns the digest so far, which the frame itself carries.

        A rank compares it before the step's first collective: a rank that runs another batch than the others, or
        samples it by other rules, would leave them waiting for a message of another size.
        """
        # A lasting batch too is folded anew in every step: it may have gone wrong where it lies.
        self._add(_sum(plan.batch.words))
        if self._step >= self._depth and self._sampled:
            self._add(_sum_of_integers(self._sampled.popleft()))
        self._add(_sum(self._columns))
        if (part := self._step % _PERIOD) < len(self._parts):
            self._add(self._parts[part].fold(self._depth))
        self._step += 1
        return self._value.to_bytes(DIGEST_BYTES, "little")

    def end(self, frame: bytes) -> int:
        """Fold the frame's bytes; returns this step's digest, in [0, 2**64)."""
        self._add(len(frame) * _BYTES + crc32(frame))
        return self._value

    def sampled(self, tokens: np.ndarray) -> None:
        """Keep a step's tokens [num_reqs] int32, -1 where a row did not sample, until their turn. Not copied."""
        self._sampled.append(tokens)

    def _add(self, value: int) -> None:
        self._value = (self._value * _CHAIN + value) & _MASK


class _RowPart:
    """Token and block ids of every 16th row, as views. In shapes, n is how many rows those are.

    Rows are summed whole, not up to their lengths: it takes a third of the time, and what lies beyond is 0.
    """

    def __init__(
        self,
        columns: RowColumns,
        token_ids: np.ndarray,
        num_blocks: Sequence[np.ndarray],
        block_ids: Sequence[np.ndarray],
        groups: Sequence[KVGroupSpec],
        rows: range,
    ) -> None:
        part = slice(rows.start, rows.stop, rows.step)
        self._num_rows = len(rows)
        self._live = columns.live[part]
        self._num_tokens = columns.num_tokens[part]
        self._num_computed = columns.num_computed_tokens[part]
        # Two ids are summed as one word, where a row is a whole number of words.
        ids_per_word = 1 if token_ids.shape[1] % 2 else 2
        self._ids_per_word = ids_per_word
        self._token_words = token_ids[part].view(np.uint64 if ids_per_word == 2 else np.uint32)
        # What the id before each place weighs within a word; before the first there is none.
        id_weights = np.repeat(_weights(self._token_words.shape[1]), ids_per_word)
        id_weights[1::ids_per_word] <<= np.uint64(32 * (ids_per_word - 1))
        self._weights_before = np.concatenate((np.zeros(1, np.uint64), id_weights))
        self._all_ids = token_ids.reshape(-1).view(np.uint32)
        self._before_rows = np.array(rows) * token_ids.shape[1] - 1
        # Groups that see alike are folded together: their spec, counts, and the block ids of each.
        alike: dict[tuple[AttentionKind, int, int], list[int]] = {}
        for group, spec in enumerate(groups):
            alike.setdefault((spec.kind, spec.window, spec.block_size), []).append(group)
        self._blocks = [
            (
                groups[same[0]],
                num_blocks[same[0]][part].view(np.uint32),
                [block_ids[group][part].view(np.uint32) for group in same],
            )
            for same in alike.values()
        ]

    def fold(self, depth: int) -> int:
        """One number for all ids of these rows, not reduced."""
        sums = self._sums_of_tokens(depth)
        for index, of_blocks in enumerate(self._blocks):
            sums += self._sums_of_blocks(*of_blocks) * _weights(index + 40)[-1]
        return _sum(sums)

    def _sums_of_tokens(self, depth: int) -> np.ndarray:
        """[n] uint64, over the token ids that both sides know."""
        num_tokens = self._num_tokens.astype(np.intp)
        longest = max(0, int(num_tokens.max()))
        words = self._token_words[:, : -(-longest // self._ids_per_word)]
        sums = np.dot(words.astype(np.uint64, copy=False), _weights(words.shape[1]))
        # The last depth - 1 tokens of a row may be known to the workers alone: taken out again. Where a prompt's last
        # token is among them it is folded once an output follows it.
        for back in range(depth - 1):
            # below 1 in a row of fewer tokens: clipped, it weighs nothing
            ends = num_tokens - back if back else num_tokens
            ids = self._all_ids.take(self._before_rows + ends, mode="clip")
            sums -= ids * self._weights_before.take(ends, mode="clip")
        return sums

    def _sums_of_blocks(
        self, spec: KVGroupSpec, held: np.ndarray, block_ids: list[np.ndarray]
    ) -> np.ndarray:
        """[n] uint64, over the count and the ids of the blocks of all groups that see alike."""
        start, width = 0, min(max(0, int(held.max())), block_ids[0].shape[1])
        first = None
        if spec.kind is not AttentionKind.FULL:
            first = first_needed_block(spec, self._num_computed)
            # What no live row sees any more is most of a long row: left out before it is read.
            start = int(np.where(self._live, first, width).min(initial=width))
        cells = block_ids[0][:, start:width]
        if len(block_ids) > 1:
            cells = np.concatenate([ids[:, start:width] for ids in block_ids])
            cells = cells.reshape(len(block_ids), self._num_rows, -1)
        if first is not None:
            cells = cells * (np.arange(start, width) >= first[:, None])
        sums = np.dot(cells.astype(np.uint64), _weights(width)[start:])
        if len(block_ids) > 1:
            sums = np.dot(_weights(len(sums)), sums)
        return sums + held * _HELD


def _sum_of_integers(values: np.ndarray) -> int:
    """Values [n] int32; another count of them gives another number too."""
    count = len(values)
    total = count * _BYTES + _sum(values[: count & ~1].view(np.uint64))
    if count & 1:
        total += int(values[-1]) * int(_weights(count)[-1])
    return total


def _sum(words: np.ndarray) -> int:
    """Words [n] uint64, each by its own weight."""
    return int(np.dot(words, _weights(len(words))))


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
    if digests == expected.to_bytes(DIGEST_BYTES, "little") * (len(digests) // DIGEST_BYTES):
        return None
    values = np.frombuffer(digests, "<u8")
    wrong = np.flatnonzero(values != np.uint64(expected)).tolist()
    if len(wrong) == 1:
        return f"rank {wrong[0]} disagrees with the scheduler"
    names = f"{', '.join(map(str, wrong[:-1]))} and {wrong[-1]}"
    one = len(wrong) == len(values) and (values == values[0]).all()
    return f"ranks {names} disagree with the scheduler" + (
        ", though not among themselves" if one else ""
    )
