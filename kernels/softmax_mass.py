"""How much probability lies above a key, before it is divided by the whole: what top-p and min-p ask.

    out[i] = sum of exp(scores[rows[i], id - first_id] - highest[i]) over the ids of key > above[i], in float64

Sums are float64: how ids are dealt to ranks changes their order, and must not change which ids stay. program_id(0) is a
run of BLOCK ids, program_id(1) the place in `rows`. Each program writes its part of a sum, and one more operation adds
the parts: an atomic sum would round in whatever order the programs end.
"""

# pyright: reportArgumentType=false
# (a launch takes plain numbers where the kernel's own signature says tl.constexpr)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_int_tensors, check_lengths
from ._keys import key, pack_keys

_BLOCK = 4096  # ids of one program
OPTIONS = {"num_warps": 8}


# Nothing of it is worth a form of its own for each rank's share of the vocabulary.
@triton.jit(do_not_specialize=["num_ids", "first_id", "scores_stride"])
def _softmax_mass_kernel(
    scores,  # [num_rows, num_ids] float32
    rows,  # [n] int32
    highest,  # [n] float32
    above,  # [n] int64
    parts,  # [n, number of programs a row] float64, packed, written
    num_ids,
    first_id,
    scores_stride,  # items from one row to the next
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    place = tl.program_id(1)
    column = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place).to(tl.int64)
    real = column < num_ids
    score = tl.load(scores + row * scores_stride + column, mask=real, other=float("-inf"))
    counts = real & (pack_keys(score, column + first_id) > tl.load(above + place))
    weight = tl.exp(score.to(tl.float64) - tl.load(highest + place).to(tl.float64))
    tl.store(parts + place * tl.num_programs(0) + part, tl.sum(tl.where(counts, weight, 0.0)))


def softmax_mass(
    scores: torch.Tensor,
    rows: torch.Tensor,
    highest: torch.Tensor,
    above: torch.Tensor,
    *,
    out: torch.Tensor,
    first_id: int = 0,
) -> None:
    """Sum exp(score - highest) over the ids above a key.

    Shapes: scores [num_rows, num_ids] float32, packed in its last dimension, of the ids from first_id on; rows [n]
        int32, which of them; highest [n] float32, finite, at least what counts of the row's scores; above [n] int64,
        -2**63 for all ids; out [n] float64, written.
    Example: scores [[log 2, log 3, log 5]], highest log 5, above the key of (log 3, id 1) -> 1.0; above -2**63 -> 2.0.
    Raises: ValueError for shapes, strides, dtypes or devices that do not fit together.
    """
    check_int_tensors(
        "softmax_mass",
        scores=(scores, torch.float32, 2),
        rows=(rows, torch.int32, 1),
        highest=(highest, torch.float32, 1),
        above=(above, torch.int64, 1),
        out=(out, torch.float64, 1),
    )
    num_rows, num_ids = len(rows), scores.shape[1]
    check_lengths("softmax_mass", num_rows, highest=highest, above=above, out=out)
    if num_rows == 0 or num_ids == 0:
        out.zero_()
        return
    parts_per_row = -(-num_ids // _BLOCK)
    parts = torch.empty((num_rows, parts_per_row), dtype=torch.float64, device=scores.device)
    _softmax_mass_kernel[(parts_per_row, num_rows)](
        scores,
        rows,
        highest,
        above,
        parts,
        num_ids,
        first_id,
        scores.stride(0),
        BLOCK=_BLOCK,
        **OPTIONS,
    )
    torch.sum(parts, dim=1, out=out)


def softmax_mass_reference(
    scores: torch.Tensor,
    rows: torch.Tensor,
    highest: torch.Tensor,
    above: torch.Tensor,
    *,
    out: torch.Tensor,
    first_id: int = 0,
) -> None:
    """The same, a row at a time."""
    for place, row in enumerate(rows.tolist()):
        keys = [key(score, first_id + column) for column, score in enumerate(scores[row].tolist())]
        counts = torch.tensor([one > above[place] for one in keys], dtype=torch.bool)
        out[place] = (scores[row, counts].double() - highest[place].double()).exp().sum()
