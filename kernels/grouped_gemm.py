"""One matrix product for every expert in one launch: rows sorted by expert, each run of rows times its expert's weight.

    out[row] = weight[expert] @ x[row]  for  expert_start_loc[expert] <= row < expert_start_loc[expert + 1]

program_id(0) is a tile of BLOCK_M rows, counted over all experts as `run_of_tile` says: how many rows each expert has
stays on the device, and a program without rows returns. program_id(1) is a tile of BLOCK_N outputs. Programs that
follow each other read the same weights, of the same expert while its rows last.

The sizes of the model are compiled in, and tiles depend on nothing else: warm-up has compiled all that serving will
launch. Where an expert has few rows the weights' bytes decide the time, not the tile's unused rows.

Layout: x and out packed in their last dimension, weight wholly. Source: the formula of a mixture of experts, Shazeer et
al. 2017 (arXiv 1701.06538); rows sorted by expert in place of padding, Gale et al. 2022 (arXiv 2211.15841).
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_int_tensors
from ._tiles import run_of_tile


@triton.jit
def _grouped_gemm_kernel(
    x,  # [num_rows, K]
    weight,  # [NUM_EXPERTS, N, K], packed
    expert_start_loc,  # [NUM_EXPERTS + 1] int32
    out,  # [num_rows, N], written
    x_stride,  # items from one row to the next
    out_stride,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows a tile
    BLOCK_N: tl.constexpr,  # outputs a tile
    BLOCK_K: tl.constexpr,  # inputs a turn
    WIDE_DOT: tl.constexpr,  # multiply in float32: Triton's interpreter multiplies bfloat16's bits as integers
):
    tile = tl.program_id(0)
    expert = run_of_tile(expert_start_loc, NUM_EXPERTS, tile, BLOCK_M)
    start = tl.load(expert_start_loc + expert)
    end = tl.load(expert_start_loc + expert + 1)
    first_row = start + (tile - (start // BLOCK_M + expert)) * BLOCK_M
    if first_row >= end:
        return

    row = first_row + tl.arange(0, BLOCK_M)
    row_real = row < end
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_real = n < N
    k = tl.arange(0, BLOCK_K)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_columns = weight + expert.to(tl.int64) * (N * K) + n.to(tl.int64)[None, :] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_k in range(0, K, BLOCK_K):
        k_real = first_k + k < K
        a = tl.load(
            x_rows + (first_k + k)[None, :], mask=row_real[:, None] & k_real[None, :], other=0.0
        )
        b = tl.load(
            weight_columns + (first_k + k)[:, None],
            mask=k_real[:, None] & n_real[None, :],
            other=0.0,
        )
        if WIDE_DOT:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(
        out + row.to(tl.int64)[:, None] * out_stride + n[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_real[:, None] & n_real[None, :],
    )


def grouped_gemm_config(*, itemsize: int) -> dict[str, int]:
    """The tile sizes and launch options; fixed, since tuning while serving looks like a hang.

    Units: itemsize is bytes.
    """
    # Two pipeline stages of both tiles are within gfx942's 64 KiB, several programs within an H100's 227. float32 has
    # no tensor cores to multiply with (tf32 would drop 13 bits), so there a thread holds whole rows and columns.
    if itemsize == 4:
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_start_loc: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Multiply each expert's rows by its weight.

    Shapes: x [num_rows, k], sorted by expert; weight [num_experts, n, k]; expert_start_loc [num_experts + 1] int32,
        from 0, not falling; out [num_rows, n] is written. An expert may have no row; rows of out at and behind
        expert_start_loc[-1] keep what they held.
    Example: expert_start_loc [0, 2, 2, 3]: rows 0 and 1 go through weight[0], row 2 through weight[2], none through
        weight[1].
    Raises: ValueError for shapes, strides, dtypes or devices that do not fit together.
    Source: see the module.
    """
    check_int_tensors("grouped_gemm", expert_start_loc=(expert_start_loc, torch.int32, 1))
    if weight.dim() != 3 or not weight.is_contiguous():
        raise ValueError(
            f"grouped_gemm: weight must be [num_experts, n, k] without gaps, got {tuple(weight.shape)} with strides "
            f"{weight.stride()}"
        )
    num_experts, n, k = weight.shape
    if expert_start_loc.shape[0] != num_experts + 1:
        raise ValueError(
            f"grouped_gemm: {num_experts} experts need {num_experts + 1} expert_start_loc, got "
            f"{expert_start_loc.shape[0]}"
        )
    if expert_start_loc.device != weight.device:
        raise ValueError(
            f"grouped_gemm: expert_start_loc must be on {weight.device} as weight is, got {expert_start_loc.device}"
        )
    num_rows = x.shape[0]
    for name, tensor, width in (("x", x, k), ("out", out, n)):
        if tensor.shape != (num_rows, width) or (tensor.stride(1) != 1 and width > 1):
            raise ValueError(
                f"grouped_gemm: {name} must be [{num_rows}, {width}] packed in its last dimension, got "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.dtype != weight.dtype or tensor.device != weight.device:
            raise ValueError(
                f"grouped_gemm: {name} must be {weight.dtype} on {weight.device} as weight is, got "
                f"{tensor.dtype} on {tensor.device}"
            )
    if num_rows == 0 or n == 0:
        return
    config = grouped_gemm_config(itemsize=weight.element_size())
    # The last expert's first tile is at most num_rows // BLOCK_M + num_experts - 1; one more closes its last.
    num_tiles = num_rows // config["BLOCK_M"] + num_experts
    _grouped_gemm_kernel[(num_tiles, triton.cdiv(n, config["BLOCK_N"]))](
        x,
        weight,
        expert_start_loc,
        out,
        x.stride(0),
        out.stride(0),
        NUM_EXPERTS=num_experts,
        N=n,
        K=k,
        WIDE_DOT=weight.dtype == torch.bfloat16
        and not isinstance(_grouped_gemm_kernel, triton.JITFunction),
        **config,
    )


def grouped_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    expert_start_loc: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """The same, a row at a time, in float64 (float32 does for the 16-bit types)."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    starts = expert_start_loc.tolist()
    for expert in range(len(starts) - 1):
        for row in range(starts[expert], starts[expert + 1]):
            out[row] = (weight[expert].to(wide) @ x[row].to(wide)).to(out.dtype)
