"""Rows, batch places and requests never mix: whatever the batch order is, each request meets its own values."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.worker.sampling_inputs import sampling_rows

# request -> (row, prompt, temperature, top_k, top_p, seed)
OWN = {
    "a": (5, [10, 11, 12], 0.5, 3, 0.9, 41),
    "b": (2, [20], 1.5, 0, 1.0, 42),
    "c": (7, [30, 31], 0.0, 7, 0.5, 43),
}


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_each_request_keeps_its_own_values_in_any_batch_order(order):
    """W04: rows 5, 2, 7 in a batch of 2, 7, 5; sampled tokens come back to their rows, however they were admitted."""
    state = make_state()
    admitted = [
        request(row, prompt, temperature=t, top_k=k, top_p=p, seed=seed, request_id=name)
        for name, (row, prompt, t, k, p, seed) in ((name, OWN[name]) for name in order)
    ]
    plan = state.apply(step(*admitted, run={5: 3, 7: 2}, grow=[[1, 2, 3]]))
    assert plan.index_mapping.tolist() == [2, 7, 5]  # fewest tokens first
    rows = sampling_rows(state.requests, plan)
    assert rows.seeds.tolist() == [42, 43, 41]
    assert rows.temperature.tolist() == [1.5, 0.0, 0.5]
    assert rows.top_k.tolist() == [0, 7, 3]
    assert np.allclose(rows.top_p, [1.0, 0.5, 0.9])
    assert rows.positions.tolist() == [1, 2, 3]
    state.commit(plan, i32(25, 35, 15))
    for row, tokens in ((5, [10, 11, 12, 15]), (2, [20, 25]), (7, [30, 31, 35])):
        assert state.requests.token_ids[row, : len(tokens)].tolist() == tokens
    table = state.block_tables.table[0]
    assert [int(table[row, 0]) for row in (2, 5, 7)] == [1, 2, 3]  # growth is in row order
