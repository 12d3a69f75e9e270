"""What every layer of a step's forward pass shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache
from ..rope import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """rotations: RoPE -> cos, sin of this step's positions, [num_tokens, 1, rotary_dim // 2] each.

    Shapes: the batch's as in `InputBatch`.
    """

    batch: InputBatch
    kv_cache: KVCache
    backend: Backend
    rotations: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]
