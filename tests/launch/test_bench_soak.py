"""`rowcast bench soak` as a person types it. What a soak checks is tested in tests/scheduler/test_random_load.py."""

from __future__ import annotations

import json

import pytest
from rowcast.launch.bench import soak as soak_module
from rowcast.launch.cli import app
from typer.testing import CliRunner


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_the_last_line_is_json_of_every_run(runner: CliRunner):
    result = runner.invoke(app, ["bench", "soak", "--steps", "30", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert (figures["violations"], figures["leaks"]) == (0, 0)
    runs = [(run["profile"], run["prefix_caching"], run["steps"]) for run in figures["runs"]]
    assert runs == [
        (profile, caching, 30)
        for profile in ("prompts", "outputs", "hybrid")
        for caching in (False, True)
    ]
    assert {"steps_per_s", "preemptions", "hit_rate"} <= set(figures["runs"][0])
    assert "0 violations, 0 leaks" in result.output


def test_a_broken_rule_ends_the_command_with_1(runner: CliRunner, monkeypatch):
    monkeypatch.setattr(soak_module, "_alone", lambda submit: [0, 0, 0])
    result = runner.invoke(app, ["bench", "soak", "--steps", "30", "--profile", "hybrid", "--json"])
    assert result.exit_code == 1
    figures = json.loads(result.output.splitlines()[-1])
    assert figures["violations"] == 2
    assert "a token that the request does not get alone" in figures["runs"][0]["violation"]
