"""The table over the vocabulary: whose ids it watches, and for how long."""

from __future__ import annotations

import numpy as np
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.stops import StopRules


def watched(rules: StopRules) -> list[int]:
    return np.flatnonzero(rules.suspect).tolist()


def test_an_id_is_watched_as_long_as_someone_stops_at_it():
    """Cleared with the first of two requests, the second would run past its stop."""
    rules = StopRules(50, (3,))
    one, two = SamplingParams(stop_token_ids=(7, 9, 7)), SamplingParams(stop_token_ids=(9, 3))
    rules.add(one)
    rules.add(two)
    assert watched(rules) == [3, 7, 9]
    rules.remove(one)
    assert watched(rules) == [3, 9]
    rules.remove(two)
    assert watched(rules) == [3]
    assert rules.num_watched == 0


def test_several_eos_ids_are_watched():
    """generation_config.json may name more than one."""
    assert watched(StopRules(50, (3, 11))) == [3, 11]
