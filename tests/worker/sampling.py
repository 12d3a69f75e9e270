"""What tests of the sampler share: rows that ask for the same, one rank's tokens for them, random logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rowcast.worker.backend import select_backend
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.sampler.sampler import Sampler, SamplingRows


def rows_of(
    count: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=7, positions=None
) -> SamplingRows:
    """Scalars are the same for every row; positions default to 0, 1, 2, ..."""
    positions = np.arange(count) if positions is None else positions
    return SamplingRows(
        temperature=np.broadcast_to(np.float32(temperature), count).copy(),
        top_k=np.broadcast_to(np.int32(top_k), count).copy(),
        top_p=np.broadcast_to(np.float32(top_p), count).copy(),
        min_p=np.broadcast_to(np.float32(min_p), count).copy(),
        seeds=np.broadcast_to(np.int64(seeds), count).copy(),
        positions=np.broadcast_to(positions, count).copy(),
    )


def sampler_of(
    vocab_rows_of_rank: tuple[range, ...], group: Any = None, *, kernel_backend: str = "cpu"
) -> Sampler:
    """A rank's sampler; group None: of the only rank."""
    group = TensorParallelGroup.alone() if group is None else group
    return Sampler(vocab_rows_of_rank, group, select_backend(kernel_backend, "cpu"))


def sample(logits: torch.Tensor, rows: SamplingRows, *, kernel_backend: str = "cpu") -> np.ndarray:
    sampler = sampler_of((range(logits.shape[1]),), kernel_backend=kernel_backend)
    return sampler.sample(logits, rows).tokens


def random_logits(
    rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
