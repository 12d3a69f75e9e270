"""Whether a step fits the tables it is about to change: one named function per rule, one sentence per refusal.

Owns the checks, changes nothing. A step whose form is right (`messages.decode_frame`) can still name rows that do not
exist, admit into a taken row or bring the wrong number of blocks; all of that is a ProtocolError before any cell moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from ..scheduler.agreement import Lengths, StepPlan
from ..scheduler.kv_groups import KVGroupSpec, blocks_needed, first_needed_block
from ..scheduler.messages import Admissions, Mask, ProtocolError, SchedulerOutput
from .block_tables import BlockTables, ragged_cells
from .request_states import RequestStates


def _first(wrong: np.ndarray) -> int | None:
    """The first index where `wrong` [n] is true, or None."""
    i = int(wrong.argmax()) if len(wrong) else 0
    return i if len(wrong) and wrong[i] else None


def check_rows(rows: np.ndarray, max_num_seqs: int, what: str) -> None:
    """Each of rows [n] exists and is named once."""
    values = rows.tolist()  # mostly few: Python looks at them before NumPy has begun
    if values and not 0 <= min(values) <= max(values) < max_num_seqs:
        outside = rows[(rows < 0) | (rows >= max_num_seqs)][0]
        raise ProtocolError(f"step: {what}: rows are [0, {max_num_seqs}), got {outside}")
    if len(set(values)) < len(values):
        seen = np.bincount(rows)
        row = int(seen.argmax())
        raise ProtocolError(f"step: {what}: row {row} is named {seen[row]} times, expected once")


def check_freed_rows(rows: np.ndarray, live: np.ndarray) -> None:
    """Only a live row can be freed."""
    check_rows(rows, len(live), "freed_rows")
    there = live[rows]
    if not there.all():
        i = there.argmin()
        raise ProtocolError(f"step: freed_rows: row {rows[i]} must be live, it is free already")


def check_exceptions(step: SchedulerOutput, lengths: Lengths) -> None:
    """run_rows are live with more than one uncomputed token and run 1 to all of them; paused rows have exactly one."""
    if len(step.run_rows):
        rows, counts = step.run_rows, step.run_counts
        left = _uncomputed(rows, lengths, "run_rows")
        if (i := _first(left < 2)) is not None:
            raise ProtocolError(
                f"step: run_rows: row {rows[i]} must have more than one uncomputed token "
                f"(a row with one runs unasked), it has {left[i]}"
            )
        if (i := _first((counts < 1) | (counts > left))) is not None:
            raise ProtocolError(
                f"step: run_counts: row {rows[i]} can run 1 to {left[i]} tokens, got {counts[i]}"
            )
    if len(step.paused_rows):
        rows = step.paused_rows
        left = _uncomputed(rows, lengths, "paused_rows")
        if (i := _first(left != 1)) is not None:
            raise ProtocolError(
                f"step: paused_rows: row {rows[i]} must have exactly one uncomputed token, "
                f"it has {left[i]}"
            )


def _uncomputed(rows: np.ndarray, lengths: Lengths, what: str) -> np.ndarray:
    """How many uncomputed tokens each of some live rows has: [n] int32."""
    check_rows(rows, len(lengths.live), what)
    if (i := _first(~lengths.live[rows])) is not None:
        raise ProtocolError(f"step: {what}: row {rows[i]} must be live, it is free")
    return lengths.num_tokens[rows] - lengths.num_computed_tokens[rows]


def check_masked_rows(rows: np.ndarray, plan: StepPlan) -> None:
    """masked_rows are some of the rows that sample in this step, in batch order."""
    sampling = plan.index_mapping[plan.samples]
    if not np.array_equal(sampling[np.isin(sampling, rows)], rows):
        raise ProtocolError(
            "step: masked_rows must be rows that sample in this step, each named once and in batch order, got "
            f"{_listed(rows)} where {_listed(sampling)} sample"
        )


def check_mask(mask: Mask, masked_rows: np.ndarray, vocab_size: int) -> None:
    """A mask allows each row that waits for one at least one id of the vocabulary, and nothing beyond it."""
    if not np.array_equal(mask.rows, masked_rows):
        raise ProtocolError(
            f"mask: rows must be the step's masked_rows {_listed(masked_rows)}, got {_listed(mask.rows)}"
        )
    num_words = -(-vocab_size // 32)
    if mask.bits.shape[1] != num_words:
        raise ProtocolError(
            f"mask: words_per_row must be {num_words} for a vocabulary of {vocab_size} ids, got {mask.bits.shape[1]}"
        )
    beyond = np.zeros(32, np.uint8)
    beyond[(vocab_size - 1) % 32 + 1 :] = 1
    word = np.packbits(beyond, bitorder="little").view("<i4")
    if (i := _first((mask.bits[:, -1] & word[0]) != 0)) is not None:
        raise ProtocolError(
            f"mask: row {mask.rows[i]} allows ids beyond the vocabulary [0, {vocab_size})"
        )
    if (i := _first((mask.bits == 0).all(axis=1))) is not None:
        raise ProtocolError(f"mask: row {mask.rows[i]} must allow at least one id, it allows none")


def _listed(rows: np.ndarray) -> str:
    """A few of them."""
    return f"[{', '.join(map(str, rows[:8].tolist()))}{', ...' if len(rows) > 8 else ''}]"


def check_block_ids(block_ids: np.ndarray, num_blocks: int, what: str) -> None:
    """Each id is a pool block, and not the null block 0."""
    if not len(block_ids):
        return
    low, high = int(block_ids.min()), int(block_ids.max())
    if low < 1 or high >= num_blocks:
        wrong = low if low < 1 else high
        raise ProtocolError(f"step: {what}: block ids are [1, {num_blocks}), got {wrong}")


def check_growth_counts(
    groups: Sequence[int], rows: np.ndarray, counts: np.ndarray, grown: Sequence[np.ndarray]
) -> None:
    """The blocks sent are exactly as many as the rows that grow need: both sides derive the same rows."""
    expected = int(counts.sum()) if len(counts) else 0
    for group in groups:
        if len(grown[group]) != expected:
            raise ProtocolError(
                f"step: grown_block_ids of KV group {group} must have {expected} ids for "
                f"{len(rows)} rows that grow, got {len(grown[group])}"
            )


def check_grown_blocks(grown: Sequence[np.ndarray], num_blocks: int) -> None:
    """Each new block of each group is a pool block."""
    together = grown[0] if len(grown) == 1 else np.concatenate(grown)
    # One less, and read as unsigned: 0 and whatever lies below it are very high.
    if len(together) and (together - 1).view(np.uint32).max() >= num_blocks - 1:
        for group, block_ids in enumerate(grown):
            check_block_ids(block_ids, num_blocks, f"grown_block_ids of KV group {group}")


def check_features(admissions: Admissions, vocab_size: int) -> None:
    """Every token id that a request names is one of the vocabulary."""
    for request_id, features in zip(admissions.request_ids, admissions.features, strict=True):
        if features is None:
            continue
        for name, ids in features.ids():
            if (i := _first((ids < 0) | (ids >= vocab_size))) is not None:
                raise ProtocolError(
                    f"step: admission of request {request_id!r}: {name}: token ids are [0, {vocab_size}), got {ids[i]}"
                )


@cache
def _range_of_numbers(max_model_len: int) -> tuple[np.ndarray, np.ndarray]:
    """By line of `Admissions.numbers`: the least that it can be, and how much more, as bits. Both [10, 1] uint32."""
    least = [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]  # of a real number 1 is the least above 0
    integers = [max_model_len, max_model_len - 1, max_model_len, np.iinfo(np.int32).max]
    reals = np.array([np.finfo(np.float32).max, 1, 1, 2, 2, 2], np.float32)
    most = np.concatenate((integers, reals.view(np.uint32)))
    return np.array(least, np.uint32)[:, None], (most - least).astype(np.uint32)[:, None]


def _numbers_fit(admissions: Admissions, max_model_len: int) -> bool:
    """Whether every length and option is surely in its range, all looked at together: nearly always each is.

    Real numbers that are not negative are in the order of their bits; whatever is negative is very high, and so is NaN.
    So a negative penalty is not sure, nor is -0.
    """
    least, more = _range_of_numbers(max_model_len)
    lengths = admissions.num_tokens
    return bool(
        (admissions.numbers.view(np.uint32) - least <= more).all()
        and (admissions.num_cached_tokens < lengths).all()
        and (admissions.num_prompt_tokens <= lengths).all()
        and admissions.seeds.min() >= 0
    )


def _refuse_number(
    admissions: Admissions,
    max_model_len: int,
    refuse: Callable[[np.ndarray, np.ndarray, str], None],
) -> None:
    """Say which of the numbers is out of range, the first of them."""
    tokens, limit = admissions.num_tokens, max_model_len
    prompt, cached = admissions.num_prompt_tokens, admissions.num_cached_tokens
    refuse((tokens < 1) | (tokens > limit), tokens, f"num_tokens must be in [1, {limit}]")
    refuse((prompt < 1) | (prompt > tokens), prompt, "num_prompt_tokens must be in [1, num_tokens]")
    refuse(
        (cached < 0) | (cached >= tokens), cached, "num_cached_tokens must be in [0, num_tokens)"
    )
    seeds, top_k = admissions.seeds, admissions.top_k
    refuse(seeds < 0, seeds, "seed must be in [0, 2**63)")
    temperature, top_p, min_p, presence, frequency, repetition = admissions.reals
    finite = np.isfinite(temperature)
    refuse(~finite | (temperature < 0), temperature, "temperature must be finite and at least 0")
    refuse(~((top_p > 0) & (top_p <= 1)), top_p, "top_p must be in (0, 1]")
    refuse(top_k < 0, top_k, "top_k must be at least 0")
    refuse(~((min_p >= 0) & (min_p <= 1)), min_p, "min_p must be in [0, 1]")
    refuse(
        ~((repetition > 0) & (repetition <= 2)), repetition, "repetition_penalty must be in (0, 2]"
    )
    for name, penalty in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        refuse(~(np.abs(penalty) <= 2), penalty, f"{name} must be in [-2, 2]")


def check_admissions(
    admissions: Admissions,
    *,
    live: np.ndarray,
    requests: RequestStates,
    block_tables: BlockTables,
    groups: Sequence[KVGroupSpec],
    num_blocks: int,
    vocab_size: int,
) -> None:
    """Each admitted request goes into a free row and everything it brings lies within the tables' limits.

    Shapes: live [max_num_seqs] bool, after this step's frees.
    """
    rows = admissions.rows
    check_rows(rows, len(live), "admissions")

    def refuse(wrong: np.ndarray, values: np.ndarray, what: str) -> None:
        if (i := _first(wrong)) is not None:
            raise ProtocolError(
                f"step: admission of request {admissions.request_ids[i]!r} to row {rows[i]}: "
                f"{what}, got {values[i]}"
            )

    if (i := _first(live[rows])) is not None:
        raise ProtocolError(
            f"step: admission of request {admissions.request_ids[i]!r}: row {rows[i]} must be free, "
            f"it holds request {requests.request_ids[rows[i]]!r}"
        )
    cached = admissions.num_cached_tokens
    if not _numbers_fit(admissions, requests.max_model_len):
        _refuse_number(admissions, requests.max_model_len, refuse)
    check_features(admissions, vocab_size)
    if admissions.token_ids.view(np.uint32).max() >= vocab_size:  # a negative one is very high
        low, high = int(admissions.token_ids.min()), int(admissions.token_ids.max())
        wrong = low if low < 0 else high
        raise ProtocolError(
            f"step: admissions: token ids are [0, {vocab_size}), got {wrong}; "
            "does the scheduler know the same model?"
        )
    if cached.any() or any(map(len, admissions.block_ids)):
        _check_hits(admissions, block_tables, groups, num_blocks, refuse)


def _check_hits(
    admissions: Admissions,
    block_tables: BlockTables,
    groups: Sequence[KVGroupSpec],
    num_blocks: int,
    refuse: Callable[[np.ndarray, np.ndarray, str], None],
) -> None:
    """The blocks that come with admissions are those of the cached tokens."""
    rows, cached = admissions.rows, admissions.num_cached_tokens
    sizes: dict[int, int] = {}  # the first group of each block size
    for group, (counts, block_ids) in enumerate(
        zip(admissions.num_blocks, admissions.block_ids, strict=True)
    ):
        width = block_tables.max_blocks[group]
        covering = blocks_needed(cached, groups[group].block_size)
        refuse(counts > width, counts, f"KV group {group} has room for {width} blocks in a row")
        refuse(counts < covering, counts, f"KV group {group} needs blocks for every cached token")
        twin = sizes.setdefault(groups[group].block_size, group)
        refuse(
            counts != admissions.num_blocks[twin],
            counts,
            f"KV group {group} holds as many blocks as KV group {twin}, which has the same block size",
        )
        # What lies left of the window of everything that is left to compute is never read: it has no block.
        _, columns = ragged_cells(rows, counts)
        unseen = columns < np.repeat(first_needed_block(groups[group], cached), counts)
        if (i := _first(unseen & (block_ids != 0))) is not None:
            raise ProtocolError(
                f"step: admissions: KV group {group}: block {columns[i]} of a row lies left of its window "
                f"and must be 0, got {block_ids[i]}"
            )
        check_block_ids(block_ids[~unseen], num_blocks, f"admissions: KV group {group}")
