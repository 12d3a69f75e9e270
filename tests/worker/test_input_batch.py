"""Input batches: positions, lengths, slots, block rows and padding, with both sets of kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.tests.worker.toy_scheduler import ToyScheduler
from rowcast.worker.backend import Backend, select_backend
from rowcast.worker.input_batch import InputBatch, InputBuilder
from rowcast.worker.state import WorkerState


def make_builder(
    state: WorkerState, kernel_backend: str, max_num_batched_tokens: int = 64
) -> InputBuilder:
    return InputBuilder(
        state,
        select_backend(kernel_backend, "cpu"),
        max_num_batched_tokens=max_num_batched_tokens,
        device="cpu",
    )


def test_a_mixed_batch_of_decode_first_and_later_chunk(kernel_backend: str):
    """W05: block 4; one row decodes, one runs 6 of its first 10 tokens, one 3 tokens further on."""
    state = make_state(4)
    builder = make_builder(state, kernel_backend)
    plan = state.apply(
        step(
            request(0, range(10), [2, 5, 7], cached=9),
            request(1, range(20, 30), [1, 3]),
            request(2, range(40, 49), [4, 6, 8], cached=6),
            run={1: 6, 2: 3},
        )
    )
    batch = builder.build(plan)
    # rowcast's order: fewest tokens first, so the rows come as 0, 2, 1
    assert batch.index_mapping.tolist() == [0, 2, 1]
    assert batch.query_start_loc.tolist() == [0, 1, 4, 10]
    assert batch.positions.tolist() == [9, 6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert batch.seq_lens.tolist() == [10, 9, 6]
    assert batch.slot_mappings[0].tolist() == [29, 26, 27, 32, 4, 5, 6, 7, 12, 13]
    assert batch.input_ids.tolist() == [9, 46, 47, 48, 20, 21, 22, 23, 24, 25]
    assert batch.logits_indices.tolist() == [0, 3]  # row 1's prompt goes on
    assert batch.sample_batch_indices.tolist() == [0, 1]


def test_logits_are_taken_at_the_last_token_of_each_request_that_samples(kernel_backend: str):
    """W-09: (computed, query) = (10, 1), (0, 5), (48, 7)."""
    state = make_state(16)
    builder = make_builder(state, kernel_backend)
    plan = state.apply(
        step(
            request(0, range(5), [1]),
            request(1, range(11), [2], cached=10),
            request(2, range(55), [3, 4, 5, 6], cached=48),
            run={0: 5, 2: 7},
        )
    )
    batch = builder.build(plan)
    assert batch.index_mapping.tolist() == [1, 0, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 6, 13]
    assert batch.positions.tolist() == [10, *range(5), *range(48, 55)]
    assert batch.seq_lens.tolist() == [11, 5, 55]
    assert batch.logits_indices.tolist() == [0, 5, 12]


def test_slots_of_small_and_of_huge_blocks(kernel_backend: str):
    """W-04: a slot is a 64-bit number; 12 * 262144 fits 32 bits, 9000 * 262144 does not."""
    state = make_state(4)
    plan = state.apply(step(request(3, [5, 6, 7, 8], [7, 8], cached=1), run={3: 3}))
    assert make_builder(state, kernel_backend).build(plan).slot_mappings[0].tolist() == [29, 30, 31]

    size = 262_144
    for block, position, slot in (
        (12, 153_797, 3_299_525),
        (12, 165_757, 3_311_485),
        (9000, 5, 9000 * size + 5),
    ):
        state = make_state(size, max_num_seqs=2, max_model_len=size, num_blocks=9001)
        plan = state.apply(step(request(1, [3] * (position + 1), [block], cached=position)))
        batch = make_builder(state, kernel_backend).build(plan)
        assert batch.slot_mappings[0].tolist() == [slot]


def test_padding_is_inert_and_nothing_of_a_larger_step_shows(kernel_backend: str):
    """W08, W-05: 4 decodes, then 2 padded to 4: old lengths, starts, block rows and slots must not survive."""
    state = make_state(16, 8)
    builder = make_builder(state, kernel_backend)
    plan = state.apply(
        step(
            *(request(row, range(row + 20), [5 * row + 1, 5 * row + 2],
                      [4 * row + 1, 4 * row + 2, 4 * row + 3], cached=row + 19)
              for row in range(4)),
            grow=[[], []],
        )
    )  # fmt: skip
    first = builder.build(plan)
    address = first.input_block_tables[0].data_ptr(), first.slot_mappings[1].data_ptr()
    assert first.max_seq_len == 23
    state.commit(plan, i32(1, 2, 3, 4))
    plan = state.apply(step(free=[2, 3], grow=[[], []]))
    batch = builder.build(plan, pad_to=(4, 6))
    assert (batch.num_reqs, batch.num_tokens, batch.max_seq_len) == (2, 2, 22)
    assert batch.index_mapping.tolist() == [0, 1]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert batch.seq_lens.tolist() == [21, 22, 0, 0]
    assert batch.input_ids.tolist() == [1, 2, 0, 0, 0, 0]
    assert batch.positions.tolist() == [20, 21, 0, 0, 0, 0]
    assert batch.input_block_tables[0].tolist() == [[1, 2], [6, 7], [0, 0], [0, 0]]
    assert batch.input_block_tables[1].tolist() == [[1, 2, 3], [5, 6, 7], [0] * 3, [0] * 3]
    assert batch.slot_mappings[0].tolist() == [2 * 16 + 4, 7 * 16 + 5, -1, -1, -1, -1]
    assert batch.slot_mappings[1].tolist() == [3 * 8 + 4, 7 * 8 + 5, -1, -1, -1, -1]
    assert batch.logits_indices.tolist() == [0, 1]
    assert address == (batch.input_block_tables[0].data_ptr(), batch.slot_mappings[1].data_ptr())


def test_a_batch_of_padding_alone_has_no_lengths_blocks_or_slots(kernel_backend: str):
    """W-05: a dummy run sees zeroed rows in the storage that real runs use."""
    state = make_state(16)
    builder = make_builder(state, kernel_backend)
    real = builder.build(state.apply(step(request(5, [1, 2], [9], cached=1))))
    assert real.slot_mappings[0].tolist() == [9 * 16 + 1]
    plan = state.apply(step(pause=[5]))
    dummy = builder.build(plan, pad_to=(2, 3))
    assert dummy.query_start_loc.tolist() == [0, 0, 0]
    assert dummy.seq_lens.tolist() == [0, 0]
    assert dummy.input_block_tables[0].tolist() == [[0], [0]]
    assert dummy.slot_mappings[0].tolist() == [-1, -1, -1]
    assert dummy.slot_mappings[0].data_ptr() == real.slot_mappings[0].data_ptr()


def test_the_padding_slot_writes_nothing(kernel_backend: str):
    """W06: -1 taken for an index is the last slot of the cache."""
    state = make_state(4, num_blocks=4)
    plan = state.apply(step(request(0, [7, 8, 9], [1]), run={0: 3}))
    batch = make_builder(state, kernel_backend).build(plan, pad_to=(1, 8))
    assert batch.slot_mappings[0].tolist() == [4, 5, 6, -1, -1, -1, -1, -1]
    marker = 99.0  # none of the values that are written
    guarded = torch.full((2, 6, 1, 4, 8), marker)  # a block before and one behind each cache
    caches = guarded[:, 1:5]  # K and V: 4 blocks of 4 slots
    new = torch.arange(8.0).reshape(8, 1, 1).expand(8, 1, 8).contiguous()
    select_backend(kernel_backend, "cpu").kv_write(new, new, *caches, batch.slot_mappings[0])
    for cache in caches:
        assert cache[1, 0, :3, 0].tolist() == [0, 1, 2]
        cache[1, :, :3] = marker
    assert (guarded == marker).all()  # slot 15, the last one, and block 0 too


def test_an_empty_step_launches_no_kernel(kernel_backend: str):
    """S22: frees alone, no tokens."""
    state = make_state(16)

    def launched(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel was launched")

    chosen = select_backend(kernel_backend, "cpu")
    silent = {
        field.name: launched
        for field in dataclasses.fields(Backend)
        if field.name not in ("name", "uses_mirror")
    }
    builder = InputBuilder(
        state, dataclasses.replace(chosen, **silent), max_num_batched_tokens=8, device="cpu"
    )
    state.apply(step(request(0, [1], [3]), pause=[0]))
    batch = builder.build(state.apply(step(free=[0])))
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (0,) * 4
    assert batch.query_start_loc.tolist() == [0]
    assert batch.input_ids.shape == (0,)
    assert batch.input_block_tables[0].shape == (0, 1)
    assert batch.logits_indices.shape == (0,)


def assert_batch_is(batch: InputBatch, toy: ToyScheduler) -> None:
    expected = toy.inputs()
    assert batch.index_mapping.tolist() == expected.index_mapping
    assert batch.query_start_loc.tolist() == expected.query_start_loc
    assert batch.input_ids.tolist() == expected.input_ids
    assert batch.positions.tolist() == expected.positions
    assert batch.seq_lens.tolist() == expected.seq_lens
    assert batch.logits_indices.tolist() == expected.logits_indices
    assert batch.sample_batch_indices.tolist() == expected.sample_batch_indices
    for group, rows in enumerate(expected.block_tables):
        width = max([1, *map(len, rows)])
        padded = [ids + [0] * (width - len(ids)) for ids in rows]
        assert batch.input_block_tables[group].tolist() == padded
        assert batch.slot_mappings[group].tolist() == expected.slots[group]
    dtypes = {
        "input_ids": torch.int32, "index_mapping": torch.int32, "query_start_loc": torch.int32,
        "seq_lens": torch.int32, "positions": torch.int64, "logits_indices": torch.int64,
        "sample_batch_indices": torch.int64,
    }  # fmt: skip
    for name, dtype in dtypes.items():
        assert getattr(batch, name).dtype == dtype, name


def test_random_churn_gives_what_plain_lists_give(kernel_backend: str):
    """W-08: any sequence of admissions, chunks, pauses and frees; every array against a second implementation."""
    toy = ToyScheduler(7, 16, 4, 8, 4)
    state = make_state(16, 4, 8, 4)
    builder = make_builder(state, kernel_backend, max_num_batched_tokens=8 * 64)
    for _ in range(300 if kernel_backend == "cpu" else 40):
        plan = state.apply(toy.next_step())
        assert_batch_is(builder.build(plan), toy)
        state.commit(plan, toy.settle())


def test_a_step_larger_than_the_buffers_is_refused():
    state = make_state(16)
    builder = make_builder(state, "cpu", max_num_batched_tokens=8)
    plan = state.apply(step(request(0, range(9), [1]), run={0: 9}))
    with pytest.raises(ValueError, match="9 tokens exceeds the input buffers of 8 requests and 8"):
        builder.build(plan)
    plan = state.apply(step(run={0: 3}))
    for pad_to in ((1, 2), (0, 3)):
        with pytest.raises(ValueError, match="pad_to must be at least the step's 1 requests and 3"):
            builder.build(plan, pad_to=pad_to)
    with pytest.raises(ValueError, match="9 requests"):
        builder.build(plan, pad_to=(9, 8))


def test_a_batch_that_goes_on_has_the_blocks_it_took_since_it_was_gathered(kernel_backend: str):
    """30 decode steps of three rows, four groups of two block sizes; a padded step and one that is not built between.

    Gathering every row of every group again in each step was most of what building a step's inputs cost.
    """
    sizes = (1, 4, 1, 4)
    lengths = {1: 3, 4: 9, 6: 20}
    state = make_state(*sizes, num_blocks=400)
    chosen = select_backend(kernel_backend, "cpu")
    gathered: list[int] = []

    def gather(*args: object, **kwargs: object) -> None:
        gathered.append(number)
        chosen.block_table_gather(*args, **kwargs)

    builder = InputBuilder(
        state,
        dataclasses.replace(chosen, block_table_gather=gather),
        max_num_batched_tokens=64,
        device="cpu",
    )
    blocks = iter(range(1, 400))

    def take(count: int) -> list[list[int]]:
        return [[next(blocks) for _ in range(-(-count // size))] for size in sizes]

    first = step(
        *(request(row, range(n), *take(n), cached=n - 1) for row, n in lengths.items()),
        grow=[[]] * 4,
    )
    for number in range(30):
        grown = [
            [next(blocks) for n in lengths.values() if (n + number) % size == 1 % size]
            for size in sizes
        ]
        plan = state.apply(step(grow=grown) if number else first)
        if number != 14:
            batch = builder.build(plan, pad_to=(5, 7) if number == 10 else None)
            for group, size in enumerate(sizes):
                table = batch.input_block_tables[group].tolist()
                assert len(table[0]) == -(-(20 + number) // size)
                for batch_index, (row, n) in enumerate(lengths.items()):
                    position = n + number - 1
                    held = state.block_tables.table[group][row, : position // size + 1].tolist()
                    assert len(set(held) - {0}) == len(held)
                    assert table[batch_index] == held + [0] * (len(table[0]) - len(held))
                    slot = held[-1] * size + position % size
                    assert batch.slot_mappings[group][batch_index] == slot
                assert table[3:] == ([[0] * len(table[0])] * 2 if number == 10 else [])
        state.commit(plan, i32(5, 5, 5))
    # once a block size; with columns to spare when the batch goes on and the longest row takes a block; in the padded
    # step and after it, and after the one that was not built; at block size 1 when the longest has taken 8 blocks more
    assert gathered == [0, 0, 1, 1, 10, 10, 11, 11, 15, 15, 24]
