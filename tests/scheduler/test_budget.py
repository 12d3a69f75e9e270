"""How a token budget is divided among running rows."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.scheduler.budget import Share, share_budget
from rowcast.scheduler.policy import FirstComeFirstServed
from rowcast.scheduler.request import Request, RequestTable
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.fakes import FRONT


def table(rows: dict[int, tuple[int, int]], arrivals: dict[int, int] | None = None) -> RequestTable:
    """Rows from {row: (num_tokens, num_computed_tokens)}; they arrived in row order unless said."""
    made = RequestTable(8, 128)
    for row, (num_tokens, num_computed) in rows.items():
        request = Request(
            front=FRONT,
            number=row,
            key=(b"", row),
            request_id=f"r{row}",
            seed=0,
            params=SamplingParams(),
            num_prompt_tokens=num_tokens,
            end_len=128,
            tokens=np.zeros(num_tokens, np.int32),
            arrival=row if arrivals is None else arrivals[row],
            generation=row + 1,
        )
        made.occupy(row, request)
        made.num_computed_tokens[row] = num_computed
    return made


def share(made: RequestTable, budget: int, turn: int = 0, cap: int = 128) -> Share:
    return share_budget(made, FirstComeFirstServed(), budget, turn, cap)


def test_decodes_need_no_words():
    found = share(table({0: (5, 4), 3: (9, 8)}), 10)
    assert (found.left, len(found.run_rows), len(found.paused_rows)) == (8, 0, 0)
    assert found.next_turn is None


def test_the_docstrings_example():
    found = share(table({0: (5, 4), 1: (80, 0)}), 50)
    assert (found.run_rows.tolist(), found.run_counts.tolist(), found.left) == ([1], [49], 0)
    found = share(table({0: (5, 4), 1: (80, 0)}), 50, cap=8)
    assert (found.run_rows.tolist(), found.run_counts.tolist(), found.left) == ([1], [8], 41)


def test_prompts_share_in_the_order_in_which_they_arrived_not_of_their_rows():
    """Rows are reused: the row says nothing about who came first."""
    made = table({1: (30, 0), 2: (30, 10), 5: (30, 0), 6: (3, 2)}, {1: 7, 2: 9, 5: 4, 6: 1})
    found = share(made, 41)
    assert (found.run_rows.tolist(), found.run_counts.tolist()) == ([5, 1], [30, 10])
    assert found.left == 0
    found = share(made, 100)
    assert (found.run_rows.tolist(), found.run_counts.tolist()) == ([5, 1, 2], [30, 30, 20])
    assert found.left == 100 - 81


def test_a_cap_leaves_the_rest_to_the_prompts_behind():
    """S19: one long prompt takes at most its cap, and what is left is not lost to those who came later."""
    made = table({0: (100, 0), 1: (100, 40), 2: (3, 0), 3: (100, 0)})
    found = share(made, 30, cap=12)
    assert (found.run_rows.tolist(), found.run_counts.tolist()) == ([0, 1, 2, 3], [12, 12, 3, 3])


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_every_row_has_its_turn_within_one_round(budget):
    made = table({0: (5, 4), 2: (30, 0), 3: (5, 4), 6: (5, 4), 7: (9, 2)})
    served: list[int] = []
    turn = 0
    while len(served) < 20:
        found = share(made, budget, turn)
        assert found.next_turn is not None
        turn = found.next_turn
        paused = set(found.paused_rows.tolist())
        ran = [row for row in (0, 3, 6) if row not in paused] + found.run_rows.tolist()
        assert len(ran) == budget
        assert found.run_counts.tolist() == [1] * len(found.run_rows)
        start = len(served) % 5
        expected = [(0, 2, 3, 6, 7)[(start + place) % 5] for place in range(budget)]
        assert sorted(ran) == sorted(expected)
        served += expected
