"""The device's mirror of the tables: only what changed is sent, and what kernels read is always the newest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.tests.worker.toy_scheduler import ToyScheduler
from rowcast.worker.device_mirror import DeviceMirror
from rowcast.worker.state import WorkerState


def assert_mirrors(mirror: DeviceMirror, state: WorkerState) -> None:
    """Everything that a kernel may read of a live row."""
    for row in np.flatnonzero(state.requests.live):
        length = state.requests.num_tokens[row]
        assert np.array_equal(
            mirror.token_ids[row, :length], state.requests.token_ids[row, :length]
        )
        assert mirror.num_computed_tokens[row] == state.requests.num_computed_tokens[row]
        for size, same in enumerate(state.block_tables.sizes):
            held = same.num_blocks[row]
            assert mirror.num_blocks[size][row] == held
            assert np.array_equal(
                mirror.block_table[size][:, row, :held], same.table[:, row, :held]
            )


def test_a_steady_step_sends_two_cells_a_row_and_two_a_grown_block():
    """Sending whole rows would cost max_model_len cells a request and step."""
    state = make_state(16, 8)
    mirror = DeviceMirror(state, "cpu")
    tokens = list(range(23))
    plan = state.apply(
        step(
            *(request(row, tokens, [1, 2], [3, 4, 5], cached=22) for row in range(5)),
            grow=[[], []],
        )
    )
    mirror.upload()
    assert mirror.cells_sent == 5 * (23 + 2 + 3 + 1 + 2)  # tokens, blocks, computed, two counts
    assert_mirrors(mirror, state)
    state.commit(plan, i32(7, 7, 7, 7, 7))
    # 23 tokens computed; the 24th needs no block of either group, the 25th one of group 1
    plan = state.apply(step(grow=[[], []]))
    mirror.upload()
    assert mirror.cells_sent == 5 * 2
    state.commit(plan, i32(8, 8, 8, 8, 8))
    plan = state.apply(step(grow=[[], [21, 22, 23, 24, 25]]))
    mirror.upload()
    assert mirror.cells_sent == 5 * 2 + 5 * 2
    assert_mirrors(mirror, state)
    mirror.upload()
    assert mirror.cells_sent == 0  # nothing is left behind, nothing is sent twice


def test_the_mirror_follows_any_churn():
    """Rows that end, come back and change hands between two uploads."""
    toy, state = ToyScheduler(3, 16, 4, 16), make_state(16, 4, 16)
    mirror = DeviceMirror(state, "cpu")
    for number in range(200):
        state.commit(state.apply(toy.next_step()), toy.settle())
        if number % 3 == 0:  # several steps may go by
            mirror.upload()
            assert_mirrors(mirror, state)


def test_a_mirror_of_a_state_in_use_starts_with_what_it_holds():
    state = make_state(16)
    state.commit(state.apply(step(request(2, [4, 5, 6], [8]), run={2: 3})), i32(9))
    mirror = DeviceMirror(state, "cpu")
    assert_mirrors(mirror, state)
    assert mirror.token_ids[2, :5].tolist() == [4, 5, 6, 9, 0]


def test_arrays_travel_beside_the_cells_and_keep_shape_and_dtype():
    state = make_state(16)
    mirror = DeviceMirror(state, "cpu")
    state.apply(step(request(2, range(40), [8]), pause=[]))
    sent = mirror.upload(i32(7, 6, 5), np.array([2**40, 1]), i32(), np.arange(30_000))
    assert [tensor.dtype for tensor in sent] == [torch.int32, torch.int64, torch.int32, torch.int64]
    assert sent[0].tolist() == [7, 6, 5]
    assert sent[1].tolist() == [2**40, 1]
    assert sent[2].tolist() == []
    assert sent[3].tolist() == list(range(30_000))  # more than the first buffer holds
    assert all(tensor.data_ptr() % 16 == 0 for tensor in sent)
    assert_mirrors(mirror, state)


def test_a_state_has_one_mirror():
    state = make_state(16)
    DeviceMirror(state, "cpu")
    with pytest.raises(AssertionError, match="has a mirror already"):
        DeviceMirror(state, "cpu")
