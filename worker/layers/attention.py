"""Grouped-query attention over the paged cache, for this rank's heads."""

from __future__ import annotations

import torch

from ...scheduler.kv_groups import AttentionKind
from ..layer_kinds import LayerKind
from ..parallel import TensorParallelGroup
from ..sharding import HeadShard
from .linear import Linear
from .norm import Norm
from .rotary import rotate
from .step_context import StepContext


class Attention:
    """q, k and v in one matrix; normalize; rotate; write k and v; attend; project; sum over ranks.

    Shapes: qkv maps hidden_size -> (q heads, then k heads, then v heads of this rank) * head_dim; output maps this
        rank's q heads * head_dim -> hidden_size. output_bias [hidden_size] is added once, after the sum. qk_norm takes
        and gives [num_tokens, q heads + k heads of this rank, head_dim].
    """

    def __init__(
        self,
        *,
        layer: int,
        kind: LayerKind,
        heads: HeadShard,
        head_dim: int,
        scale: float,
        softcap: float,
        qkv: Linear,
        qk_norm: Norm | None,
        output: Linear,
        output_bias: torch.Tensor | None,
        parallel: TensorParallelGroup,
    ) -> None:
        self._layer = layer
        self._num_q = len(heads.q_heads)
        self._num_kv = len(heads.kv_heads)
        self._head_dim = head_dim
        self._scale = scale
        self._softcap = softcap
        self._rope = kind.rope
        self._window = kind.window if kind.attention is AttentionKind.SLIDING_WINDOW else 0
        self._chunk = kind.window if kind.attention is AttentionKind.CHUNKED else 0
        self._qkv = qkv
        self._qk_norm = qk_norm
        self._output = output
        self._output_bias = output_bias
        self._parallel = parallel

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Shapes: x [num_tokens, hidden_size]; returns the same."""
        num_tokens = x.shape[0]
        num_rotated = self._num_q + self._num_kv
        qkv = self._qkv(x).view(num_tokens, num_rotated + self._num_kv, self._head_dim)
        qk = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        if self._rope is not None:
            qk = rotate(qk, *step.rotations[self._rope])
        query, key, value = qk[:, : self._num_q], qk[:, self._num_q :], qkv[:, num_rotated:]

        batch, cache, layer = step.batch, step.kv_cache, self._layer
        keys, values = cache.keys[layer], cache.values[layer]
        group = cache.group_of_layer[layer]
        step.backend.kv_write(key, value, keys, values, batch.slot_mappings[group])
        attended = torch.empty(query.shape, dtype=x.dtype, device=x.device)
        step.backend.paged_attention(
            query,
            keys,
            values,
            batch.input_block_tables[group],
            batch.seq_lens,
            batch.query_start_loc,
            scale=self._scale,
            out=attended,
            window=self._window,
            chunk=self._chunk,
            softcap=self._softcap,
        )
        out = self._parallel.sum_(self._output(attended.view(num_tokens, -1)))
        return out if self._output_bias is None else out.add_(self._output_bias)
