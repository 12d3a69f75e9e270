"""One product for all experts: interpreted Triton and the CPU's torch twin against the reference.

What no expert's rows may touch is NaN: x behind the last row, the gap behind each row, weights of experts without rows.
"""

from __future__ import annotations

import mmap

import pytest
import torch
from rowcast.kernels import grouped_gemm

NAN = float("nan")
MARKER = 7.0


def starts_of(counts):
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def case(counts, *, n, k, padding_rows=0, dtype=torch.float32, seed=0):
    """x, weight, expert_start_loc and out, for experts of so many rows each."""
    generator = torch.Generator().manual_seed(seed)
    starts = starts_of(counts)
    num_rows = int(starts[-1]) + padding_rows
    x = torch.full((num_rows, k + 3), NAN, dtype=dtype)[:, :k]
    x[: starts[-1]] = torch.randn(int(starts[-1]), k, generator=generator).to(dtype)
    weight = torch.randn(len(counts), n, k, generator=generator).to(dtype)
    weight[torch.tensor(counts) == 0] = NAN
    out = torch.full((num_rows, n + 5), MARKER, dtype=dtype)
    return x, weight, starts, out


def product(kernel, x, weight, starts, out):
    """The rows that have an expert; asserts that nothing else of out was written."""
    num_rows, n = int(starts[-1]), weight.shape[1]
    out = out.clone()
    kernel(x, weight, starts, out=out[:, :n])
    assert (out[:, n:] == MARKER).all()
    assert (out[num_rows:] == MARKER).all()
    return out[:num_rows, :n]


def error(got, wanted):
    return (got.double() - wanted.double()).abs().max().item()


def test_the_docstrings_example(kernel):
    """Rows 0 and 1 go through weight[0], row 2 through weight[2], none through weight[1]."""
    x, weight, starts, out = case([2, 0, 1], n=4, k=8)
    got = product(kernel("grouped_gemm"), x, weight, starts, out)
    wanted = torch.stack([weight[expert] @ x[row] for row, expert in enumerate([0, 0, 2])])
    assert error(got, wanted) < 1e-5


@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [
        pytest.param([9, 7, 41], 9, 7, id="odd sizes"),
        pytest.param([1], 1, 1, id="one of everything"),
        pytest.param([32, 32, 64], 64, 32, id="whole tiles"),
        pytest.param([31, 33, 1, 63, 65], 65, 33, id="one more and one less than a tile"),
        pytest.param([0, 0, 5, 0], 20, 48, id="one expert has all rows"),
        pytest.param([1] * 40, 70, 50, id="more experts than rows in a tile"),
        pytest.param([3, 0, 130, 0, 0, 2, 0], 130, 100, id="empty experts between full ones"),
    ],
)
def test_equals_the_reference(kernel, reference, counts, n, k):
    arguments = case(counts, n=n, k=k, padding_rows=3)
    got = product(kernel("grouped_gemm"), *arguments)
    assert error(got, product(reference("grouped_gemm"), *arguments)) < 2e-6 * k


def test_no_rows_write_nothing(kernel):
    product(kernel("grouped_gemm"), *case([0, 0], n=6, k=8))
    product(kernel("grouped_gemm"), *case([0, 0], n=6, k=8, padding_rows=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_float32(reference, dtype):
    """Within a unit in the last place: the interpreter cuts bfloat16's last bits off where the hardware rounds them."""
    x, weight, starts, out = case([5, 0, 70], n=33, k=96, dtype=dtype)
    exact = product(reference("grouped_gemm"), x.float(), weight.float(), starts, out.float())
    got = product(grouped_gemm.grouped_gemm, x, weight, starts, out).float()
    unit = torch.finfo(dtype).eps
    assert ((got - exact).abs() <= unit * exact.abs() + 1e-5).all()


def test_offsets_pass_two_to_the_31(kernel, monkeypatch):
    """The last weight begins 2**31 numbers into the array, in address space that costs nothing until touched."""
    num_experts, n, k = 513, 64, 2**16
    assert (num_experts - 1) * n * k == 2**31
    config = grouped_gemm.grouped_gemm_config(itemsize=4) | {"BLOCK_K": 2**13}  # few turns
    monkeypatch.setattr(grouped_gemm, "grouped_gemm_config", lambda itemsize: config)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(
        -1, num_experts * n * k * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    )
    weight = torch.frombuffer(memory, dtype=torch.float32).view(num_experts, n, k)
    weight[-1, :, -1] = torch.arange(64.0)
    x = torch.zeros(1, k)
    x[0, -1] = 5.0
    starts = starts_of([0] * (num_experts - 1) + [1])
    got = product(kernel("grouped_gemm"), x, weight, starts, torch.full((1, n), MARKER))
    assert torch.equal(got, 5 * torch.arange(64.0).unsqueeze(0))


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("x", torch.zeros(3, 5), "x must be"),
        ("x", torch.zeros(4, 3).t(), "packed"),
        ("x", torch.zeros(3, 4, dtype=torch.float64), "x must be"),
        ("weight", torch.zeros(8, 4), "weight must be"),
        ("weight", torch.zeros(2, 4, 8).transpose(1, 2), "weight must be"),
        ("expert_start_loc", torch.zeros(3), "expert_start_loc must be"),
        ("expert_start_loc", torch.zeros(2, dtype=torch.int32), "2 experts need 3"),
        ("out", torch.zeros(3, 4), "out"),
        ("out", torch.zeros(2, 8), "out"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kernel, name, wrong, told):
    arguments = {
        "x": torch.zeros(3, 4),
        "weight": torch.zeros(2, 8, 4),
        "expert_start_loc": starts_of([1, 2]),
        "out": torch.zeros(3, 8),
    }
    with pytest.raises(ValueError, match=told):
        kernel("grouped_gemm")(**(arguments | {name: wrong}))
