"""Randomness without a generator: noise is a pure function of (seed, position of the sampled token, vocabulary id).

So a seeded request's text depends on nothing else: not on its batch, its row, its chunks, the rank count or a restart.

    stream = mix(mix(seed + G) + position * G),   bits = mix(stream + id * G),   G = 2**64 / golden ratio
    u = bits / 2**64 in (0, 1),   gumbel = -log(-log(1 - u))

mix is splitmix64's finalizer, so `bits` walks a splitmix64 stream that starts at `stream`. The id with the highest
score + gumbel is distributed as softmax(scores) (Gumbel-max).
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_ITEMS_AT_ONCE = 65_536  # int64: half a MiB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no unsigned arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def streams(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Shapes: seeds int64 and positions, both [n]; returns [n] int64, one stream for each sampled token."""
    golden = np.uint64(_GOLDEN)
    state = _mix(seeds.astype(np.int64).view(np.uint64) + golden)
    return _mix(state + positions.astype(np.uint64) * golden).view(np.int64)


def _mix(z: np.ndarray) -> np.ndarray:
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z


def gumbel(stream: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Shapes: stream [n] int64; ids [m] int64, the same for every row, or [n, m]; returns [n, m] float32.
    """
    steps = ids * _signed(_GOLDEN)  # int64 multiplication wraps, as the unsigned one does
    if steps.dim() == 2 or stream.device.type != "cpu":
        return _gumbel(stream.unsqueeze(1) + steps)
    # A few rows at a time a CPU keeps the dozen passes within its caches.
    out = torch.empty((len(stream), len(ids)), dtype=torch.float32)
    rows = max(1, _ITEMS_AT_ONCE // len(ids))
    for some, noise in zip(stream.split(rows), out.split(rows), strict=True):
        noise.copy_(_gumbel(some.unsqueeze(1) + steps))
    return out


def _gumbel(z: torch.Tensor) -> torch.Tensor:
    """z int64, overwritten."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 0), strict=True):
        # torch shifts arithmetically: mask off the copies of the sign bit
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if multiplier:
            z *= _signed(multiplier)
    z = (z >> 1).bitwise_and_(2**63 - 1)
    # Small u keep their relative precision in float32: they are the large noises, which decide. u stays off 0 and 1.
    u = z.to(torch.float32).mul_(2.0**-63).clamp_(2.0**-63, 1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
