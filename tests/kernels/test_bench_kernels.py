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
    "sliding_reqs": 2,
    "sliding_len": 40,
    "window": 10,
    "experts": (3, 2, 8, 12),
    "expert_tokens": (2, 7),
    "input_rows": 8,
    "sampling": ((3, 500),),
    "repeats": 2,
    "num_threads": 1,
}


def test_every_kernel_has_a_figure_and_all_fit_into_json():
    figures = json.loads(json.dumps(kernels.bench_kernels(**TINY)))
    assert figures["backend"] == "cpu"
    for name in (
        "decode_attention",
        "prefill_attention",
        "kv_write",
        "full_decode_attention",
        "sliding_decode_attention",
    ):
        assert 0 < figures[name]["ms_p10"] <= figures[name]["ms"] <= figures[name]["ms_p90"]
        assert figures[name]["share_of_peak"] > 0
    assert figures["sliding_decode_attention"]["window"] == 10
    for name, tokens in (("decode_experts", 2), ("prefill_experts", 7)):
        assert figures[name]["tokens"] == tokens
        assert figures[name]["ms"] > 0
    for name in ("gumbel_argmax", "softmax_mass"):
        assert figures["sampling_3_x_500"][name]["share_of_peak"] > 0
    for num_groups in (1, 6):
        assert set(figures[f"inputs_of_{num_groups}_groups"]) == {
            "rows",
            "token_inputs_us",
            "block_table_gather_us",
            "slot_mapping_us",
        }


def _zeros(*_, out, **__):
    out.zero_()


def _blind_to_the_window(right):
    def paged_attention(*args, window, **kwargs):
        right(*args, window=0, **kwargs)

    return paged_attention


def _swapped(right):
    return lambda key, value, *rest: right(value, key, *rest)


def _one_off(right):
    def launch(*args, out, **kwargs):
        right(*args, out=out, **kwargs)
        out[..., -1] += 1

    return launch


def _late(right):
    def token_inputs(*args, positions, **kwargs):
        right(*args, positions=positions, **kwargs)
        positions += 1

    return token_inputs


@pytest.mark.parametrize(
    ("kernel", "break_it"),
    [
        ("paged_attention", lambda right: _zeros),
        ("paged_attention", _blind_to_the_window),
        ("kv_write", _swapped),
        ("token_inputs", _late),
        ("block_table_gather", _one_off),
        ("slot_mapping", _one_off),
        ("grouped_gemm", _one_off),
        ("gumbel_argmax", _one_off),
        ("softmax_mass", _one_off),
    ],
)
def test_a_wrong_kernel_is_not_timed(monkeypatch, kernel, break_it):
    select = kernels.select_backend

    def broken(*args, **kwargs):
        backend = select(*args, **kwargs)
        return dataclasses.replace(backend, **{kernel: break_it(getattr(backend, kernel))})

    monkeypatch.setattr(kernels, "select_backend", broken)
    with pytest.raises(ValueError, match=rf"^{kernel} \(cpu\): differs from its .*; not timed"):
        kernels.bench_kernels(**TINY)
