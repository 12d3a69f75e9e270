"""The CPU's twin of kernels/grouped_gemm.py: torch's own product, once for each expert that has rows.

Torch and not Numba: its library's product is as fast as reading the weight for one row, and much faster for many. It
runs on torch's threads, as many as the worker sets. Weights stay as they lie: in oneDNN's own layout, as `Linear` has
them, 8 rows of 1,024 x 1,024 would take 0.34 ms in place of 0.53 (one EPYC core), but no other kernel could read them.
"""

from __future__ import annotations

import numpy as np
import torch

from . import _numba


def grouped_gemm(
    x: np.ndarray,  # [num_rows, k] float32
    weight: np.ndarray,  # [num_experts, n, k] float32
    expert_start_loc: np.ndarray,  # [num_experts + 1] int32
    *,
    out: np.ndarray,  # [num_rows, n] float32, written
) -> None:
    """See kernels/grouped_gemm.py."""
    for name, array, dtype, ndim in (
        ("x", x, np.float32, 2),
        ("weight", weight, np.float32, 3),
        ("expert_start_loc", expert_start_loc, np.int32, 1),
        ("out", out, np.float32, 2),
    ):
        if array.dtype != dtype or array.ndim != ndim or not _numba.is_packed(array):
            raise ValueError(
                f"grouped_gemm: {name} must be {np.dtype(dtype)} with {ndim} dimensions, packed behind the first, "
                f"got {array.dtype} of shape {array.shape} with strides {array.strides}"
            )
    num_experts, n, k = weight.shape
    if expert_start_loc.shape[0] != num_experts + 1:
        raise ValueError(
            f"grouped_gemm: {num_experts} experts need {num_experts + 1} expert_start_loc, got "
            f"{expert_start_loc.shape[0]}"
        )
    if x.shape[1] != k or out.shape != (x.shape[0], n):
        raise ValueError(
            f"grouped_gemm: x must be [num_rows, {k}] and out [num_rows, {n}] as weight says, got {x.shape} and "
            f"{out.shape}"
        )
    rows, weights, written = (torch.from_numpy(array) for array in (x, weight, out))
    starts = expert_start_loc.tolist()
    for expert in np.flatnonzero(np.diff(expert_start_loc)).tolist():
        run = slice(starts[expert], starts[expert + 1])
        torch.mm(rows[run], weights[expert].t(), out=written[run])
