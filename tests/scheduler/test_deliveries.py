"""Tokens back to fronts: grouped by front, in the order of each request's tokens."""

from __future__ import annotations

import numpy as np
from rowcast.scheduler.deliveries import Deliveries, join
from rowcast.scheduler.front_messages import Submit
from rowcast.tests.scheduler.fakes import Bench


def deliveries(
    *entries: tuple[int, int, int, int], cached: tuple[tuple[int, int, int], ...] = ()
) -> Deliveries:
    front_index, numbers, tokens, codes = zip(*entries, strict=True) if entries else ([],) * 4
    cached_front_index, cached_numbers, cached_tokens = (
        zip(*cached, strict=True) if cached else ([],) * 3
    )
    return Deliveries(
        fronts={0: "a", 1: "b", 2: "c"},
        cached_front_index=np.array(cached_front_index, np.int32),
        cached_numbers=np.array(cached_numbers, np.int64),
        cached_tokens=np.array(cached_tokens, np.int32),
        front_index=np.array(front_index, np.int32),
        numbers=np.array(numbers, np.int64),
        tokens=np.array(tokens, np.int32),
        finish_codes=np.array(codes, np.int8),
    )


def split(found: Deliveries) -> list[tuple]:
    return [
        (part.front, part.numbers.tolist(), part.tokens.tolist(), part.finish_codes.tolist())
        for part in found.by_front()
    ]


def split_cached(found: Deliveries) -> list[tuple]:
    return [
        (
            part.front,
            part.numbers.tolist(),
            part.cached_numbers.tolist(),
            part.cached_tokens.tolist(),
        )
        for part in found.by_front()
    ]


def test_one_part_a_front_with_the_order_kept():
    found = deliveries((2, 5, 10, 0), (0, 5, 11, 0), (2, 4, 12, 2), (2, 5, 13, 1))
    assert split(found) == [("a", [5], [11], [0]), ("c", [5, 4, 5], [10, 12, 13], [0, 2, 1])]


def test_one_front_gets_the_columns_as_they_are():
    found = deliveries((1, 5, 10, 0), (1, 6, 11, 0))
    assert split(found) == [("b", [5, 6], [10, 11], [0, 0])]


def test_nothing_to_deliver_is_no_message():
    assert split(deliveries()) == []


def test_two_steps_become_one_message_a_front():
    found = join([deliveries((0, 1, 10, 0), (1, 1, 11, 0)), deliveries((0, 1, 12, 1))])
    assert split(found) == [("a", [1, 1], [10, 12], [0, 1]), ("b", [1], [11], [0])]


def test_cached_counts_go_to_their_fronts_also_where_no_token_goes():
    """A count that is sent with the next token of another front never arrives, or arrives at the wrong one."""
    found = deliveries((2, 5, 10, 0), cached=((0, 7, 32), (2, 5, 16), (0, 8, 48)))
    assert split_cached(found) == [("a", [], [7, 8], [32, 48]), ("c", [5], [5], [16])]
    assert len(found) == 4
    joined = join([deliveries((1, 4, 9, 0)), deliveries(cached=((1, 4, 64),))])
    assert split_cached(joined) == [("b", [4], [4], [64])]


def test_fronts_number_their_requests_alike_and_get_their_own():
    """Keyed by number alone, two fronts' requests would be one."""
    bench = Bench()
    bench.add(5, request_id="a", max_tokens=1)
    bench.scheduler.add(
        b"second",
        Submit(
            number=0,
            submit_key=b"k" * 24,
            request_id="b",
            prompt_token_ids=np.arange(6, dtype=np.int32),
            seed=1,
            params=bench.submits[0].params,
        ),
    )
    step = bench.scheduler.schedule()
    assert step.admissions.request_ids == ("a", "b")
    found = bench.scheduler.settle(np.array([50, 60], np.int32))
    assert split(found) == [(b"front", [0], [50], [2]), (b"second", [0], [60], [2])]
