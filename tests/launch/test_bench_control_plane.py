"""The control-plane benchmark: its byte counts are facts and stay within DESIGN.md's budget; its times are printed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rowcast.launch.bench.control_plane import (
    DEPTH,
    PHASES,
    ControlPlane,
    bench_control_plane,
    table,
)


@pytest.fixture(scope="module")
def full_size() -> dict:
    return bench_control_plane(rows=1024, steps=64)


def test_a_steady_step_of_1024_rows_stays_within_600_bytes(full_size: dict):
    """vLLM sends 52,830 bytes there. 64 steps of 1,024 rows cross 4 block borders a row: 64 ids a step on average."""
    assert full_size["bytes_per_step"] == pytest.approx(1024 / 16 * 4, abs=32)
    assert full_size["max_bytes_per_step"] <= 600


def test_the_result_is_4_bytes_a_row_and_a_small_header(full_size: dict):
    assert 1024 * 4 < full_size["result_bytes"] <= 1024 * 4 + 32


def test_each_further_kv_group_adds_at_most_300_bytes(full_size: dict):
    six = bench_control_plane(rows=1024, steps=16, kv_groups=6)
    assert six["bytes_per_step"] <= full_size["bytes_per_step"] + 5 * 300


def test_the_figures_are_json_and_a_table(full_size: dict):
    assert json.loads(json.dumps(full_size)) == full_size
    assert list(full_size["us_per_step"]) == [*PHASES, "total"]
    parts = sum(full_size["us_per_step"][phase] for phase in PHASES)
    assert 0 < parts <= full_size["us_per_step"]["total"] + len(PHASES)
    assert full_size["sizes"] == {
        "rows": 1024, "steps": 64, "block_size": 16, "kv_groups": 1, "prompt_len": 64, "warmup": 5,
        "churn": 0, "depth": 2,
    }  # fmt: skip
    text = table(full_size)
    assert all(phase in text for phase in (*PHASES, "total", "bytes a step"))


@pytest.mark.parametrize("rows", [1, 3])
def test_any_number_of_rows_is_measured(rows: int):
    """One row crosses a block border every 16 steps: most frames carry no id at all."""
    figures = bench_control_plane(rows=rows, steps=20, warmup=0)
    assert figures["bytes_per_step"] < 50
    assert figures["result_bytes"] < 32


def test_windows_that_slide_are_measured_too():
    """Prompts beyond the window of 512: blocks come back in steady steps, and both sides' tables stay equal."""
    figures = bench_control_plane(rows=4, steps=40, kv_groups=2, prompt_len=520)
    assert figures["sizes"]["prompt_len"] == 520


def test_churn_sends_8_admissions_of_100_tokens_in_every_step():
    """Each brings 100 token ids of 4 bytes, and takes a block of every 16 of them in one step."""
    figures = bench_control_plane(rows=64, steps=20, churn=8)
    assert figures["bytes_per_step"] >= 8 * (100 + 7) * 4
    assert figures["max_bytes_per_step"] <= 8 * (100 + 7) * 4 + 64 * 4 + 600
    assert figures["submit_us_per_step"] > 0
    assert "8 requests come and 8 end a step" in table(figures)


def test_cold_and_border_stand_beside_the_warm_mean():
    """All 32 rows cross at once in every 16th step: the ratio is that step's time to the mean."""
    figures = bench_control_plane(rows=32, steps=10, cold=True, border=True)
    assert list(figures["cold"]["us_per_step"]) == [*PHASES, "total"]
    border = figures["border"]
    assert border["ratio"] == pytest.approx(
        border["us"] / figures["us_per_step"]["total"], abs=0.01
    )
    assert border["worst_us"] >= border["us"] > 0
    assert border["cpu_ratio"] == pytest.approx(
        border["cpu_us"] / figures["cpu_us_per_step"], abs=0.01
    )
    text = table(figures)
    assert "cold us" in text
    assert f"{border['ratio']:.1f} x the mean; of CPU {border['cpu_us']:.0f} us" in text


def test_all_rows_decode_to_the_end_after_a_prefill_of_many_steps():
    """Rows that decoded already took from the prefill's tokens: it took longer, and the first rows ended by length
    before the last step. With churn that was an internal error, without it fewer rows than the figures said.
    """
    rows, prompt_len, prefill_tokens = 64, 100, 80
    plane = ControlPlane(
        prompt_lens=np.full(rows, prompt_len),
        max_steps=rows * prompt_len // prefill_tokens + DEPTH,
        block_size=16,
        kv_groups=1,
        prefill_tokens=prefill_tokens,
    )
    plane.prefill()
    plane.check()


def test_churn_that_rows_cannot_carry_is_refused():
    with pytest.raises(ValueError, match=r"churn must be at most a 4th of rows.*got 8 of 31"):
        bench_control_plane(rows=31, churn=8)


@pytest.mark.parametrize("name", ["steps", "prompt_len"])
def test_tables_that_this_machine_cannot_hold_are_refused(name: str):
    """It ended as an internal error (MemoryError), or the kernel ended it."""
    with pytest.raises(ValueError, match=r"need tables of \d+ GiB.*lower --rows, --prompt-len or"):
        bench_control_plane(rows=64, **{name: 10**10})


@pytest.mark.parametrize("name", ["churn", "warmup"])
def test_a_negative_number_is_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        bench_control_plane(**{name: -1})


@pytest.mark.parametrize("name", ["rows", "steps", "block_size", "kv_groups", "prompt_len"])
def test_a_size_below_one_is_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        bench_control_plane(**{name: 0})


def test_more_rows_than_an_engine_can_have_are_refused():
    """It ended as an internal error: 35 TiB of block ids."""
    with pytest.raises(ValueError, match="rows must be at most 65536, as max_num_seqs, got 99999"):
        bench_control_plane(rows=99_999_999)
