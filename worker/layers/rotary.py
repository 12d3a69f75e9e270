"""Rotary position embedding: items i and i + rotary_dim / 2 of a head turn together by position * frequency[i].

The frequencies are `rope_scaling.py`'s. Items from rotary_dim on do not turn.
"""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Cosines and sines of every position up to max_position, computed once in float32."""

    def __init__(
        self,
        frequencies: torch.Tensor,
        *,
        factor: float = 1.0,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Shapes: frequencies [rotary_dim // 2] float32, radians a token. factor: what multiplies cosines and sines.

        Units: max_position is one past the last position. Rounds as transformers does: angles in float32.
        """
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self._cos_sin = cos_sin.mul_(factor).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: positions [num_tokens] int64; returns cos, sin [num_tokens, 1, rotary_dim // 2]."""
        cos, sin = self._cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first rotary_dim items of every head of every token.

    Shapes: x [num_tokens, num_heads, head_dim], any stride between tokens; cos, sin [num_tokens, 1, rotary_dim // 2];
        returns a new packed tensor of x's shape.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    out_first, out_second = out[..., :rotary_dim].chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out
