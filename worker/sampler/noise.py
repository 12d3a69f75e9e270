"""Randomness without a generator: noise is a pure function of (seed, position of the sampled token, vocabulary id).

So a seeded request's text depends on nothing else: not on its batch, its row, its chunks, the rank count or a restart.

    stream = mix(mix(seed + G) + position * G),   G = 2**64 / golden ratio,   mix = splitmix64's finalizer

What becomes of a stream and an id is told in kernels/_noise.py: `gumbel_argmax` makes the noise where it is added.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def streams(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Shapes: seeds int64 and positions, both [n]; returns [n] int64, one stream for each sampled token."""
    state = _mix(seeds.astype(np.int64).view(np.uint64) + _GOLDEN)
    return _mix(state + positions.astype(np.uint64) * _GOLDEN).view(np.int64)


def _mix(z: np.ndarray) -> np.ndarray:
    for shift, multiplier in _STEPS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z
