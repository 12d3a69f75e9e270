"""The picture of a step: `rowcast explain` shows the worked example of the design, number for number."""

from __future__ import annotations

import re

import pytest
from rowcast.launch.cli import run_command
from rowcast.launch.explain import worked_example


def test_the_picture_holds_the_worked_example():
    picture = worked_example().to_json()
    assert picture["index_mapping"] == [7, 6]
    assert picture["request_ids"] == ["B", "A"]
    assert picture["query_start_loc"] == [0, 1, 9]
    assert picture["positions"] == [31, 16, 17, 18, 19, 20, 21, 22, 23]
    assert picture["seq_lens"] == [32, 24]
    assert picture["slot_mapping"] == [[12 * 16 + 15, *range(44 * 16, 44 * 16 + 8)]]
    assert picture["input_block_tables"] == [[[37, 12], [81, 44]]]


def test_explain_prints_the_worked_example(capsys: pytest.CaptureFixture[str]):
    assert run_command(["explain"]) == 0
    numbers = [re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines()]
    # flat_token, batch_index, position, input_id, block_index, block_offset, block_id, slot_id
    assert ["0", "0", "31", "331", "1", "15", "12", "207"] in numbers
    assert ["8", "1", "23", "523", "1", "7", "44", "711"] in numbers
    assert ["0", "7", "37", "12"] in numbers
