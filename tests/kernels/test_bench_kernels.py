"""The kernel benchmark measures right kernels, and refuses a wrong one."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rowcast.launch.bench import kernels

TINY = {
    "num_layers": 2,
    "decode_reqs": 3,
    "decode_len": 20,
    "prefill_reqs": 2,
    "prefill_len": 9,
    "input_rows": 8,
    "repeats": 2,
    "num_threads": 1,
}


def test_every_kernel_has_a_figure_and_all_fit_into_json():
    figures = json.loads(json.dumps(kernels.bench_kernels(**TINY)))
    assert figures["backend"] == "cpu"
    for name in ("decode_attention", "prefill_attention", "kv_write"):
        assert 0 < figures[name]["ms_p10"] <= figures[name]["ms"] <= figures[name]["ms_p90"]
        assert figures[name]["share_of_peak"] > 0
    assert set(figures["inputs"]) == {
        "rows",
        "token_inputs_us",
        "block_table_gather_us",
        "slot_mapping_us",
    }


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    select = kernels.select_backend

    def broken(*args, **kwargs):
        return dataclasses.replace(
            select(*args, **kwargs), paged_attention=lambda *_, scale, out: out.zero_()
        )

    monkeypatch.setattr(kernels, "select_backend", broken)
    with pytest.raises(ValueError, match=r"differs from its reference by .*; not timed"):
        kernels.bench_kernels(**TINY)
