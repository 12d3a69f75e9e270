"""Random load: what must hold after every step, whatever comes. `rowcast bench soak` is the same for longer."""

from __future__ import annotations

import pytest
from rowcast.launch.bench import soak as soak_module
from rowcast.launch.bench.soak import soak

NUM_STEPS = 2_000


@pytest.mark.parametrize(
    ("profile", "prefix_caching"),
    [
        ("prompts", False),
        ("prompts", True),
        ("outputs", False),
        ("outputs", True),
        ("hybrid", True),
    ],
)
def test_every_rule_holds_under_random_load(profile, prefix_caching):
    """S-09: each step runs at most the budget, only known requests, and loses no block; tokens are those of alone."""
    whole = profile != "hybrid" and prefix_caching
    steps = NUM_STEPS if whole else NUM_STEPS // 2
    figures = soak(profile, steps=steps, prefix_caching=prefix_caching)
    assert (figures["violations"], figures["leaks"]) == (0, 0), figures["violation"]
    assert figures["steps"] == steps
    assert figures["ended"] == figures["requests"] >= 90
    assert figures["preemptions"] >= 10
    assert (figures["hit_rate"] > 0) == prefix_caching


def test_the_same_seed_is_the_same_load():
    """A violation that a soak finds can be found again."""
    runs = [soak("hybrid", steps=60, prefix_caching=True, seed=5) for _ in range(2)]
    for run in runs:
        del run["steps_per_s"]
    assert runs[0] == runs[1]
    other = soak("hybrid", steps=60, prefix_caching=True, seed=6)
    assert other["requests"] != runs[0]["requests"]


def test_a_broken_rule_ends_the_run_and_is_told(monkeypatch):
    """A soak that cannot fail shows nothing: here the rank samples another token once in a while."""

    def wrong(requests, plan):
        tokens = sample(requests, plan)
        return (tokens + (requests.num_tokens[plan.index_mapping] % 50 == 0)) % 89

    sample = soak_module._sample
    monkeypatch.setattr(soak_module, "_sample", wrong)
    figures = soak("outputs", steps=200, prefix_caching=True)
    assert figures["violations"] == 1
    assert figures["steps"] < 200
    assert "a token that the request does not get alone" in figures["violation"]


def test_a_leak_is_told(monkeypatch):
    forget = soak_module.Scheduler.forget
    monkeypatch.setattr(soak_module.Scheduler, "forget", lambda self, front, numbers: None)
    figures = soak("hybrid", steps=30, prefix_caching=True)
    assert (figures["violations"], figures["leaks"]) == (0, 1)
    assert "left when all is over" in figures["violation"]
    monkeypatch.setattr(soak_module.Scheduler, "forget", forget)
    assert soak("hybrid", steps=30, prefix_caching=True)["leaks"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"profile": "gentle"}, "profile must be one of prompts, outputs, hybrid, got 'gentle'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
    ],
)
def test_a_soak_that_cannot_be_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        soak(**({"profile": "hybrid", "steps": 1, "prefix_caching": True} | options))
