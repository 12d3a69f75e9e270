"""Token id -> vector, with the vocabulary's rows dealt to the ranks."""

from __future__ import annotations

import torch

from ..parallel import TensorParallelGroup


class VocabEmbedding:
    """Shapes: weight [len(rows), hidden_size], the rows [rows.start, rows.stop) of the vocabulary.

    weight may lie in a mapped file, in the dtype that is stored there: vectors become `dtype` when they are looked up.
    scale: what vectors are multiplied by; round_scale: after it was rounded to that dtype.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        rows: range,
        parallel: TensorParallelGroup,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
        round_scale: bool = False,
    ) -> None:
        assert len(weight) == len(rows), (weight.shape, rows)
        self._weight = weight
        self._rows = rows
        self._parallel = parallel
        self._dtype = dtype
        self._scale = torch.tensor(scale, dtype=dtype).item() if round_scale else scale

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Shapes: input_ids [num_tokens] int32; returns [num_tokens, hidden_size], a new tensor."""
        vectors = self._unscaled(input_ids)
        return vectors if self._scale == 1.0 else vectors.mul_(self._scale)

    def _unscaled(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A rank adds zeros for ids that others own, so the sum over ranks is exact."""
        if self._parallel.world_size == 1:
            return self._weight.index_select(0, input_ids).to(self._dtype)
        local = input_ids - self._rows.start
        foreign = (local < 0) | (local >= len(self._rows))
        vectors = self._weight.index_select(0, local.masked_fill_(foreign, 0)).to(self._dtype)
        return self._parallel.sum_(vectors.masked_fill_(foreign.unsqueeze(1), 0.0))
