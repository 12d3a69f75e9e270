"""The best id of each row: by logit / temperature + noise(stream, id), or by the logit alone at temperature 0.

    out[i] = max over id of key(logits[rows[i], id - first_id] / temperature[i] + noise(streams[i], id), id)

Comparing keys (`_keys.py`) compares scores, ties to the lowest id. The id with the highest score + noise is distributed
as the softmax of the scores (Gumbel-max). `_noise.py` defines the noise, bit by bit.

program_id(0) is a run of BLOCK ids, program_id(1) the place in `rows`; the programs of one row meet in an atomic
maximum, whose order cannot matter. Logits are read once, from global memory, and nothing but the keys is written.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _noise
from ._checks import check_int_tensors, check_lengths
from ._keys import NO_KEY, key, pack_keys

_BLOCK, _FEW = 4096, 512  # ids of one program; a row of few ids, such as candidates, is one program
# No fusion: the noise would round otherwise (`_noise.py`).
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}

_GOLDEN = tl.constexpr(_noise.GOLDEN)
_MULTIPLIER_0 = tl.constexpr(_noise.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(_noise.MULTIPLIERS[1])
_LOWEST_U = tl.constexpr(_noise.LOWEST_U)
_HIGHEST_U = tl.constexpr(_noise.HIGHEST_U)
_SQRT_HALF_BITS = tl.constexpr(_noise.SQRT_HALF_BITS)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = map(tl.constexpr, _noise.LOG_COEFFICIENTS)
_LOG_2_HIGH = tl.constexpr(_noise.LOG_2_HIGH)
_LOG_2_LOW = tl.constexpr(_noise.LOG_2_LOW)
_NO_KEY = tl.constexpr(NO_KEY)


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    k = k.to(tl.float32)
    p = _C0 * f + _C1
    p = p * f + _C2
    p = p * f + _C3
    p = p * f + _C4
    p = p * f + _C5
    p = p * f + _C6
    p = p * f + _C7
    square = f * f
    tail = (p * f) * square + k * _LOG_2_LOW - 0.5 * square
    return (f + tail) + k * _LOG_2_HIGH


@triton.jit
def gumbel(stream, ids):
    """The noise of `ids` (int64): what `_noise.gumbel` says, in unsigned numbers. Compile without fusion."""
    z = stream.to(tl.uint64) + ids.to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MULTIPLIER_0
    z = (z ^ (z >> 27)) * _MULTIPLIER_1
    z = z ^ (z >> 31)
    u = (z >> 1).to(tl.int64).to(tl.float32) * _LOWEST_U
    u = tl.minimum(tl.maximum(u, _LOWEST_U), _HIGHEST_U)
    w = 1.0 - u
    return -_log(-(_log(w) + ((1.0 - w) - u)))


# How many candidates there are changes from step to step: a form for 1 or a multiple of 16 would compile while serving.
@triton.jit(do_not_specialize=["num_ids", "first_id", "logits_stride", "ids_stride"])
def _gumbel_argmax_kernel(
    logits,  # [num_rows, num_ids]
    rows,  # [n] int32
    temperature,  # [n] float32, 0 is greedy
    streams,  # [n] int64
    ids,  # [num_rows, num_ids] int64, read if HAS_IDS
    below,  # [n] int64, read if HAS_BELOW
    out,  # [n] int64, NO_KEY at first, written
    num_ids,
    first_id,
    logits_stride,  # items from one row to the next
    ids_stride,
    HAS_IDS: tl.constexpr,
    HAS_BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(1)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place).to(tl.int64)
    real = column < num_ids
    scores = tl.load(logits + row * logits_stride + column, mask=real, other=0.0).to(tl.float32)
    if HAS_IDS:  # noqa: SIM108
        id_ = tl.load(ids + row * ids_stride + column, mask=real, other=0)
    else:
        id_ = column + first_id
    divisor = tl.load(temperature + place)
    if divisor > 0.0:
        # `/` may be off by a last bit on a GPU
        scores = tl.div_rn(scores, tl.zeros_like(scores) + divisor)
        scores += gumbel(tl.load(streams + place), id_)
    keys = pack_keys(scores, id_)
    if HAS_BELOW:
        real = real & (keys < tl.load(below + place))
    tl.atomic_max(out + place, tl.max(tl.where(real, keys, _NO_KEY), axis=0))


def gumbel_argmax(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    streams: torch.Tensor,
    *,
    out: torch.Tensor,
    first_id: int = 0,
    ids: torch.Tensor | None = None,
    below: torch.Tensor | None = None,
) -> None:
    """Find the key of the best id of some rows.

    Shapes: logits [num_rows, num_ids], any float dtype, packed in its last dimension; rows [n] int32, which of them;
        temperature [n] float32, 0 for no noise; streams [n] int64, of (seed, position), as `worker/sampler/noise.py`
        makes them; out [n] int64, written, -2**63 where there is nothing to choose from; ids [num_rows, num_ids]
        int64, the ids of the logits, None for first_id, first_id + 1, ...; below [n] int64: only keys lower than that
        (what was the best in an earlier call is passed over), None for all.
    Example: logits [[1.0, 3.0, 3.0]], temperature 0, first_id 10 -> score 3.0, id 11.
    Raises: ValueError for shapes, strides, dtypes or devices that do not fit together.
    Source: Gumbel-max; Maddison, Tarlow, Minka, "A* sampling", 2014.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.dtype == torch.float64:
        raise ValueError(
            f"gumbel_argmax: logits must be float32, bfloat16 or float16 with 2 dimensions, got {logits.dtype} of "
            f"shape {tuple(logits.shape)}"
        )
    check_int_tensors(
        "gumbel_argmax",
        logits=(logits, logits.dtype, 2),
        rows=(rows, torch.int32, 1),
        temperature=(temperature, torch.float32, 1),
        streams=(streams, torch.int64, 1),
        out=(out, torch.int64, 1),
        ids=(out.view(1, -1) if ids is None else ids, torch.int64, 2),
        below=(out if below is None else below, torch.int64, 1),
    )
    num_rows, num_ids = len(rows), logits.shape[1]
    check_lengths(
        "gumbel_argmax",
        num_rows,
        temperature=temperature,
        streams=streams,
        out=out,
        below=out if below is None else below,
    )
    if ids is not None and ids.shape != logits.shape:
        raise ValueError(
            f"gumbel_argmax: ids must be {tuple(logits.shape)} as logits are, got {tuple(ids.shape)}"
        )
    out.fill_(NO_KEY)
    if num_rows == 0 or num_ids == 0:
        return
    block = _FEW if num_ids <= _FEW else _BLOCK
    _gumbel_argmax_kernel[(triton.cdiv(num_ids, block), num_rows)](
        logits,
        rows,
        temperature,
        streams,
        out if ids is None else ids,
        out if below is None else below,
        out,
        num_ids,
        first_id,
        logits.stride(0),
        0 if ids is None else ids.stride(0),
        HAS_IDS=ids is not None,
        HAS_BELOW=below is not None,
        BLOCK=block,
        **OPTIONS,
    )


def gumbel_argmax_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    streams: torch.Tensor,
    *,
    out: torch.Tensor,
    first_id: int = 0,
    ids: torch.Tensor | None = None,
    below: torch.Tensor | None = None,
) -> None:
    """The same, an id at a time."""
    for place, row in enumerate(rows.tolist()):
        listed = torch.arange(first_id, first_id + logits.shape[1]) if ids is None else ids[row]
        scores = logits[row].float()
        if temperature[place] > 0:
            noise = _noise.gumbel(streams[place : place + 1], listed)[0]
            scores = scores / temperature[place] + noise
        keys = [
            key(score, id_) for score, id_ in zip(scores.tolist(), listed.tolist(), strict=True)
        ]
        if below is not None:
            keys = [key for key in keys if key < below[place]]
        out[place] = max(keys, default=NO_KEY)
