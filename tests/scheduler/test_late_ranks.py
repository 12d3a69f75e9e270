"""The sentence that names who keeps a step from ending."""

from __future__ import annotations

import pytest
from rowcast.scheduler.late_ranks import RankProgress, who_is_late

BUSY = RankProgress(41, 40)  # in the middle of step 41


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([BUSY, None], "rank 1 does not answer: stopped, hung or cut off"),
        ([None, BUSY, None], "ranks 0 and 2 do not answer: stopped, hung or cut off"),
        ([None], "rank 0 does not answer: stopped, hung or cut off"),
        ([BUSY, RankProgress(39, 39)], "rank 1 took step 39 last, the others step 41"),
        ([BUSY, RankProgress(41, 41)], "rank 0 carried out step 40 last, the others step 41"),
        (
            [RankProgress(42, 41), BUSY, BUSY],
            "ranks 1 and 2 took step 41 last, the others step 42",
        ),
        ([BUSY, BUSY], "every rank took step 41 and has not finished it"),
        ([BUSY], "rank 0 took step 41 and has not finished it"),
        ([RankProgress(40, 40)] * 2, "every rank took step 40 last: the frames since were lost"),
        ([RankProgress(42, 42)] * 2, "every rank carried it out: rank 0's result was lost"),
    ],
)
def test_who_is_late_is_named(ranks, said):
    """T07, T08: all that was known of a hung group was that it hung."""
    assert who_is_late(41, ranks) == said
