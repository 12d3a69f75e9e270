"""Token ids, positions and lengths of a step."""

from __future__ import annotations

import pytest
import torch

MAX_NUM_SEQS, MAX_MODEL_LEN = 10, 512


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def outputs(num_tokens, num_reqs):
    """Filled with what an earlier, larger step left."""
    return {
        "input_ids": torch.full((num_tokens,), 99, dtype=torch.int32),
        "positions": torch.full((num_tokens,), 99, dtype=torch.int64),
        "seq_lens": torch.full((num_reqs,), 99, dtype=torch.int32),
    }


@pytest.fixture
def token_ids():
    """Token p of row r is 1000 * r + p."""
    rows = torch.arange(MAX_NUM_SEQS, dtype=torch.int32)[:, None] * 1000
    return rows + torch.arange(MAX_MODEL_LEN, dtype=torch.int32)


def test_the_worked_example_number_for_number(kernel, token_ids):
    computed = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)
    computed[7], computed[6] = 31, 16
    out = outputs(9, 2)
    kernel("token_inputs")(i32(7, 6), i32(0, 1, 9), computed, token_ids, **out)
    assert out["positions"].tolist() == [31, 16, 17, 18, 19, 20, 21, 22, 23]
    assert out["seq_lens"].tolist() == [32, 24]
    assert out["input_ids"].tolist() == [7031, *range(6016, 6024)]


def test_padding_holds_nothing_of_an_earlier_larger_step(kernel, token_ids):
    computed = torch.full((MAX_NUM_SEQS,), 40, dtype=torch.int32)
    out = outputs(8, 4)
    kernel("token_inputs")(i32(3, 1), i32(0, 1, 2), computed, token_ids, **out)
    assert out["input_ids"].tolist() == [3040, 1040, 0, 0, 0, 0, 0, 0]
    assert out["positions"].tolist() == [40, 40, 0, 0, 0, 0, 0, 0]
    assert out["seq_lens"].tolist() == [41, 41, 0, 0]


def test_padded_requests_are_empty_and_their_rows_never_read(kernel, token_ids):
    """A padded request's row is whatever the buffer held: here one far outside the tables."""
    computed = torch.full((MAX_NUM_SEQS,), 40, dtype=torch.int32)
    out = outputs(4, 4)
    kernel("token_inputs")(
        i32(3, 1, 2**30, -(2**30)), i32(0, 1, 2, 2, 2), computed, token_ids, **out
    )
    assert out["seq_lens"].tolist() == [41, 41, 0, 0]
    assert out["input_ids"].tolist() == [3040, 1040, 0, 0]


def test_no_requests_leave_only_padding(kernel, token_ids):
    out = outputs(3, 2)
    computed = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)
    kernel("token_inputs")(i32(), i32(0), computed, token_ids, **out)
    assert [values.tolist() for values in out.values()] == [[0, 0, 0], [0, 0, 0], [0, 0]]


@pytest.mark.parametrize("query_lens", [(1,) * 9, (1, 2, 7, 41, 300), (512,)])
def test_equals_the_reference_at_odd_shapes(kernel, reference, token_ids, query_lens):
    generator = torch.Generator().manual_seed(len(query_lens))
    rows = torch.randperm(MAX_NUM_SEQS, generator=generator)[: len(query_lens)].to(torch.int32)
    computed = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32)
    for row, query_len in zip(rows.tolist(), query_lens, strict=True):
        computed[row] = (MAX_MODEL_LEN - query_len) // 3
    starts = torch.cumsum(torch.tensor((0, *query_lens)), 0).to(torch.int32)
    got, wanted = (outputs(sum(query_lens) + 5, len(query_lens) + 3) for _ in range(2))
    kernel("token_inputs")(rows, starts, computed, token_ids, **got)
    reference("token_inputs")(rows, starts, computed, token_ids, **wanted)
    for name in got:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("index_mapping", torch.zeros(1, dtype=torch.int64), "index_mapping must be"),
        ("query_start_loc", i32(0, 1, 2), "query_start_loc must have 2 entries, got 3"),
        ("token_ids", torch.zeros(4, dtype=torch.int32), "token_ids must"),
        ("seq_lens", i32(), "seq_lens must hold 1 requests, got 0"),
        ("positions", torch.zeros(4, dtype=torch.int32), "positions must be"),
        ("input_ids", torch.zeros(8, dtype=torch.int32)[::2], "input_ids must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kernel, token_ids, name, wrong, told):
    arguments = {
        "index_mapping": i32(0),
        "query_start_loc": i32(0, 1),
        "num_computed_tokens": torch.zeros(MAX_NUM_SEQS, dtype=torch.int32),
        "token_ids": token_ids,
        **outputs(4, 1),
    }
    with pytest.raises(ValueError, match=told):
        kernel("token_inputs")(**(arguments | {name: wrong}))
