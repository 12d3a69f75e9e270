"""The control-plane benchmark: its byte counts are facts and stay within DESIGN.md's budget; its times are printed."""

from __future__ import annotations

import json

import pytest
from rowcast.launch.bench.control_plane import PHASES, bench_control_plane, table


@pytest.fixture(scope="module")
def full_size() -> dict:
    return bench_control_plane(rows=1024, steps=64)


def test_a_steady_step_of_1024_rows_stays_within_600_bytes(full_size: dict):
    """vLLM sends 52,830 bytes there. 64 steps of 1,024 rows cross 4 block borders a row: 64 ids a step on average."""
    assert full_size["bytes_per_step"] == pytest.approx(1024 / 16 * 4, abs=24)
    assert full_size["max_bytes_per_step"] <= 600


def test_the_result_is_4_bytes_a_row_and_a_small_header(full_size: dict):
    assert 1024 * 4 < full_size["result_bytes"] <= 1024 * 4 + 32


def test_each_further_kv_group_adds_at_most_300_bytes(full_size: dict):
    two = bench_control_plane(rows=1024, steps=16, kv_groups=2)
    assert two["bytes_per_step"] <= full_size["bytes_per_step"] + 300


def test_the_figures_are_json_and_a_table(full_size: dict):
    assert json.loads(json.dumps(full_size)) == full_size
    assert list(full_size["us_per_step"]) == [*PHASES, "total"]
    parts = sum(full_size["us_per_step"][phase] for phase in PHASES)
    assert 0 < parts <= full_size["us_per_step"]["total"] + len(PHASES)
    assert full_size["sizes"] == {
        "rows": 1024, "steps": 64, "block_size": 16, "kv_groups": 1, "warmup": 5
    }  # fmt: skip
    text = table(full_size)
    assert all(phase in text for phase in (*PHASES, "total", "bytes a step"))


@pytest.mark.parametrize("rows", [1, 3])
def test_any_number_of_rows_is_measured(rows: int):
    """One row crosses a block border every 16 steps: most frames carry no id at all."""
    figures = bench_control_plane(rows=rows, steps=20, warmup=0)
    assert figures["bytes_per_step"] < 50
    assert figures["result_bytes"] < 32


@pytest.mark.parametrize("name", ["rows", "steps", "block_size", "kv_groups"])
def test_a_size_below_one_is_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        bench_control_plane(**{name: 0})


def test_more_rows_than_an_engine_can_have_are_refused():
    """It ended as an internal error: 35 TiB of block ids."""
    with pytest.raises(ValueError, match="rows must be at most 65536, as max_num_seqs, got 99999"):
        bench_control_plane(rows=99_999_999)
