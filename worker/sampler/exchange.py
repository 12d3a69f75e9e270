"""The one all-gather of a sampling step: what every rank tells the others, packed into int64 words.

    [digest | one key for each single row | width keys for each filtered row | one float64 mass for each filtered row]

Single rows (greedy, or all tokens at a temperature) need their best key alone; filtered ones (min-p, top-k, top-p)
need a choice of candidates. The digest is 8 bytes of whatever the ranks want to compare (DESIGN.md, agreement); it
rides here because a collective of its own would cost a step's latency again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..parallel import TensorParallelGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Of one rank: best [num_single] int64, found [num_filtered, width] int64, masses [num_filtered] float64."""

    digest: int
    best: torch.Tensor
    found: torch.Tensor
    masses: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Offers:
    """Of all ranks, in rank order: the same fields with a first dimension of world_size; digests [world_size]."""

    digests: torch.Tensor
    best: torch.Tensor
    found: torch.Tensor
    masses: torch.Tensor


def exchange(offer: Offer, parallel: TensorParallelGroup) -> Offers:
    """Hand this rank's offer to all, and take theirs. Shapes must agree between ranks."""
    num_filtered, width = offer.found.shape
    digest = torch.tensor([offer.digest], dtype=torch.uint64).view(torch.int64)
    digest = digest.to(offer.best.device, non_blocking=True)
    words = torch.cat((digest, offer.best, offer.found.reshape(-1), offer.masses.view(torch.int64)))
    gathered = parallel.all_gather(words)
    digests, best, found, masses = gathered.split(
        [1, len(offer.best), num_filtered * width, num_filtered], dim=1
    )
    return Offers(
        digests=digests.squeeze(1),
        best=best,
        found=found.reshape(len(gathered), num_filtered, width),
        masses=masses.contiguous().view(torch.float64),
    )
