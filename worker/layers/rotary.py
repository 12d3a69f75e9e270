"""Rotary position embedding, default frequencies: item i and i + head_dim / 2 of a head turn together by
position * theta ** (-2i / head_dim)."""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Cosines and sines of every position up to max_position, computed once in float32."""

    def __init__(
        self,
        head_dim: int,
        *,
        max_position: int,
        theta: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Units: max_position is one past the last position. Rounds as transformers does: angles in float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (theta**exponent)
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(
            device=device, dtype=dtype
        )

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: positions [num_tokens] int64; returns cos, sin [num_tokens, 1, head_dim // 2]."""
        cos, sin = self._cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of every token.

    Shapes: x [num_tokens, num_heads, head_dim], any stride between tokens; cos, sin [num_tokens, 1, head_dim // 2];
        returns a new packed tensor of x's shape.
    """
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out
