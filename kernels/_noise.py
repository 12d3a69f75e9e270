"""The noise that sampling adds to a score, a pure function of (stream, vocabulary id): its numbers, and its torch form.

    bits = mix(stream + id * G),   G = 2**64 / golden ratio,   mix = splitmix64's finalizer
    u = (bits >> 1) / 2**63, kept within [2**-63, 1 - 2**-24],   noise = -log(-log(1 - u)), standard Gumbel

A logarithm is rounded otherwise by every library, and one last bit can decide between two ids. So the logarithm is
written out here in float32 operations that IEEE 754 rounds alike everywhere, and no multiplication may be fused with an
addition: torch on any device, Triton and the Numba twins then get the same bits, and the same logits and seed the same
token on each of them. The Triton kernel is compiled without fusion for that, the twin without Numba's loose arithmetic.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
LOWEST_U = 2.0**-63
HIGHEST_U = 1 - 2.0**-24

# log(x) for x = 2**k * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)): k * log(2) + f - f**2 / 2 + f**3 * P(f). P is a minimax
# fit of degree 7, its highest coefficient first; the whole is within 1.4 last bits of the logarithm, near 1 too.
SQRT_HALF_BITS = 0x3F3504F3
LOG_COEFFICIENTS = (
    -0.07635536789894104,
    0.12761616706848145,
    -0.1315975785255432,
    0.1420171707868576,
    -0.16623403131961823,
    0.20001231133937836,
    -0.2500081956386566,
    0.3333333134651184,
)
# log(2) in two parts: times k, the first is exact
LOG_2_HIGH = 0.693359375
LOG_2_LOW = -2.12194440e-4


def signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no unsigned arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def gumbel(stream: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Shapes: stream [n] int64; ids [m] int64, the same for every row, or [n, m]; returns [n, m] float32.
    Example: stream 0, id 0 -> bits 0, u 2**-63, noise 43.668.
    """
    z = stream.unsqueeze(1) + ids * signed(GOLDEN)  # int64 wraps, as unsigned numbers do
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        # torch shifts arithmetically: mask off the copies of the sign bit
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * signed(multiplier)
    # Small u keep their relative precision in float32: they are the large noises, which decide.
    u = ((z >> 1) & (2**63 - 1)).to(torch.float32) * LOWEST_U
    u = u.clamp(LOWEST_U, HIGHEST_U)
    w = 1 - u
    return -_log(-(_log(w) + ((1 - w) - u)))  # the last term is what 1 - u lost in rounding


def _log(x: torch.Tensor) -> torch.Tensor:
    """x float32, normal and positive."""
    bits = x.view(torch.int32)
    k = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (k << 23)).view(torch.float32) - 1
    k = k.to(torch.float32)
    p = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        p = p * f + coefficient
    square = f * f
    tail = (p * f) * square + k * LOG_2_LOW - 0.5 * square
    return (f + tail) + k * LOG_2_HIGH
