"""How fast each pair of a head's items turns: RoPE's frequencies, plain and stretched for longer texts.

Every formula rounds as transformers' does, in float32. What follows the length of the text there (dynamic, longrope)
is fixed by max_model_len here: a cached key keeps the turn it was written with.
"""

from __future__ import annotations

import math

import torch

from ..rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def frequencies(rope: Rope, head_dim: int, *, max_model_len: int) -> tuple[torch.Tensor, float]:
    """The angle that each pair turns by per position, and what its cosine and sine are multiplied by.

    Shapes: [rotary_dim // 2] float32. Units: radians a token; max_model_len is tokens.
    Example: theta 10,000, head_dim 4, no scaling -> [1.0, 0.01] and 1.0.
    """
    dim = rope.rotary_dim(head_dim)
    plain = 1.0 / _wavelengths(rope.theta, dim)
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case DynamicScaling() as scaling:
            return _dynamic(rope.theta, scaling, dim, max_model_len), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(rope.theta, scaling, dim), scaling.attention_factor
        case LongRopeScaling() as scaling:
            is_long = max_model_len > scaling.original_max_position
            factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
            return 1.0 / (factors * _wavelengths(rope.theta, dim)), scaling.attention_factor


def _wavelengths(theta: float, dim: int) -> torch.Tensor:
    """Tokens a radian, of each pair."""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic(theta: float, scaling: DynamicScaling, dim: int, max_model_len: int) -> torch.Tensor:
    """Source: NTK-aware scaling as transformers computes it for a text of max_model_len tokens."""
    length = max(max_model_len, scaling.max_position)
    stretched = scaling.factor * length / scaling.max_position - (scaling.factor - 1)
    return 1.0 / _wavelengths(theta * stretched ** (dim / (dim - 2)), dim)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Source: Llama 3.1's reference code."""
    original = scaling.original_max_position
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turn = 2 * math.pi / plain  # tokens a whole turn
    scaled = torch.where(turn > original / low, plain / scaling.factor, plain)
    smooth = (original / turn - low) / (high - low)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = (turn >= original / high) & (turn <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(theta: float, scaling: YarnScaling, dim: int) -> torch.Tensor:
    """Source: Peng et al. 2023 (arXiv 2309.00071), section 3.2: pairs that turn often within the original length keep
    their frequency, those that turn less than beta_slow times have it divided, a ramp between."""

    def pair_that_turns(times: float) -> float:
        turns = scaling.original_max_position / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    wavelengths = _wavelengths(theta, dim)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
