"""Rows of log-probabilities: what no softmax gives is refused, and which rows a step owes follows from the tables."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from rowcast.scheduler.asked import asked_of_step
from rowcast.scheduler.extras import LogprobRows, RowExtras, extras_from_wire, extras_to_wire
from rowcast.scheduler.features import Features
from rowcast.scheduler.wire_form import ProtocolError
from rowcast.tests.scheduler.logprob_rows import rows_by_hand, some_rows

LOGITS = np.array([[0.5, 2.0, 1.0, -1.0], [0.0, 3.0, 3.0, 1.0]])
GOOD = rows_by_hand(LOGITS, [3, 2], 2)  # the first token is none of the best two, the second one is


def test_rows_by_hand():
    assert GOOD.token_ids.tolist() == [[3, 1, 2], [2, 1, 2]]
    assert GOOD.ranks.tolist() == [[4, 1, 2], [2, 2, 2]]
    assert np.exp(rows_by_hand(LOGITS, [3, 2], 4).logprobs[:, 1:]).sum(axis=1) == pytest.approx(1)
    GOOD.check("rows")


def changed(place: tuple[int, int], **values: float) -> LogprobRows:
    columns = {name: getattr(GOOD, name).copy() for name in ("token_ids", "logprobs", "ranks")}
    for name, value in values.items():
        columns[name][place] = value
    return LogprobRows(**columns)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (changed((1, 1), token_ids=-1), "a token id is negative"),
        (changed((0, 1), logprobs=np.nan), "finite and at most 0"),
        (changed((0, 0), logprobs=-np.inf), "finite and at most 0"),
        (changed((0, 1), logprobs=0.25), "finite and at most 0"),
        (changed((0, 0), ranks=0), "rank is too low"),
        (changed((0, 0), ranks=2), "rank is too low"),  # none of the best two, but second
        (changed((0, 2), ranks=1), "rank is too low"),
        (changed((0, 1), ranks=3), "rank is too low"),  # the best, behind the second
        (changed((0, 2), token_ids=1), "stands twice"),
        (changed((0, 2), logprobs=-0.01), "best ids must come first"),
        (changed((0, 0), logprobs=-0.01), "best ids must come first"),
        (changed((1, 0), logprobs=-3.0), "has two values"),
        (changed((1, 0), ranks=3), "has two values"),
    ],
)
def test_values_that_no_softmax_gives_are_refused(rows: LogprobRows, said: str):
    """E-08: a score that is off, a wrong rank, a swapped or a double entry, NaN, a positive value."""
    with pytest.raises(ProtocolError, match=said):
        rows.check("rows")
    extras = {1: RowExtras(logprobs=GOOD[:1]), 4: RowExtras(prompt_logprobs=rows)}
    with pytest.raises(ProtocolError, match=f"batch_index 4: prompt_logprobs: .*{said}"):
        extras_from_wire(extras_to_wire(extras), 5)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ([], "must carry 4 values"),
        ([0, b"", b"", b""], "at least one row"),
        ([21, b"", b"", b""], "at least one row"),
        ([22, b"", b"", b""], "width must be an integer"),
        ([2, b"1234", b"1234", b"1234"], "at least one row"),
        ([1, b"1234", b"12345678", b"1234"], "logprobs must have 1 entries"),
        ([1, b"1234", b"1234", b""], "ranks must have 1 entries"),
        ([1, b"123", b"1234", b"1234"], "token_ids must be bin"),
    ],
)
def test_rows_of_another_form_are_refused(wire, said):
    with pytest.raises(ProtocolError, match=said):
        LogprobRows.from_wire(wire, "rows")


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({0: [None, None]}, "must have rows"),
        ({0: [None]}, "must carry 2 values"),
        ({0: [some_rows([1, 2], 1).to_wire(), None]}, "logprobs must be one row, got 2"),
        ({3: [some_rows([1], 1).to_wire(), None]}, "a key of extras must be an integer"),
    ],
)
def test_extras_of_another_form_are_refused(extras, said):
    with pytest.raises(ProtocolError, match=said):
        extras_from_wire(extras, 3)


def test_fewer_of_the_best_and_some_of_the_rows():
    rows = some_rows([4, 5, 6], 7)
    assert rows.best(2) == some_rows([4, 5, 6], 2)
    assert LogprobRows.join([rows[:1], rows[1:]]) == rows
    assert LogprobRows.join([]) is None


def owed(start: int, count: int, **asked: int) -> tuple[int, list[int], int] | None:
    """Of a prompt of 13 tokens in row 3, whose ids are their positions: first, targets and flat token of a chunk."""
    batch = SimpleNamespace(rows=np.array([7, 3]), query_start_loc=np.array([0, 1, 1 + count]))
    plan = SimpleNamespace(
        batch=batch,
        samples=np.array([True, start + count >= 13]),
        num_computed_tokens=np.array([40, start]),
        seq_lens=np.array([41, start + count]),
    )
    table = np.tile(np.arange(20, dtype=np.int32), (8, 1))
    features = Features(prompt_logprobs=1, **asked)
    found = asked_of_step({3: features, 5: features}, table, np.full(8, 13), plan)  # type: ignore[arg-type]
    if found is None:
        return None
    (one,) = found
    assert (one.batch_index, one.row) == (1, 3)
    return one.first, one.targets.tolist(), one.flat_token


def test_a_chunk_owes_the_rows_of_the_tokens_behind_its_own():
    """SA-13: 13 tokens in chunks of 5, 5 and 3 give 12 rows; the last token's logits are those of an output."""
    assert owed(0, 5) == (1, [1, 2, 3, 4, 5], 1)
    assert owed(5, 5) == (6, [6, 7, 8, 9, 10], 1)
    assert owed(10, 3) == (11, [11, 12], 1)
    assert owed(12, 1) is None
    assert owed(13, 1) is None
    assert owed(0, 13) == (1, list(range(1, 13)), 1)
    # Resumed: what was delivered is owed to nobody.
    assert owed(0, 5, prompt_logprobs_from=4) == (4, [4, 5], 4)
    assert owed(0, 3, prompt_logprobs_from=4) is None
    assert owed(0, 13, prompt_logprobs_from=13) is None
