"""What every layer of a step's forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Shapes: cos, sin [num_tokens, 1, head_dim // 2]; the batch's as in `InputBatch`."""

    batch: InputBatch
    kv_cache: KVCache
    backend: Backend
    cos: torch.Tensor
    sin: torch.Tensor
