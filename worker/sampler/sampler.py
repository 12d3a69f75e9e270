"""Logits to tokens (greedy alone so far)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..model_config import ModelConfig
from ..parallel import TensorParallelGroup
from ..sharding import shard_of_rank
from . import greedy, keys


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


class Sampler:
    def __init__(self, config: ModelConfig, parallel: TensorParallelGroup) -> None:
        self._parallel = parallel
        self._first = shard_of_rank(config, parallel.rank, parallel.world_size).vocab_rows.start

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> np.ndarray:
        best = self._parallel.all_gather(greedy.best(logits.float(), self._first)).amax(0)
        return keys.ids_of(best).to(torch.int32).cpu().numpy()
